"""The models of the experiments.

name        images        parameters   what
mnist-cnn   1 x 28 x 28      582,026   the paper's CNN: two 5 x 5 convolutions, two linear layers
resnet20    3 x 32 x 32      269,722   ResNet for CIFAR, 3 stages of 3 blocks
resnet56    3 x 32 x 32      853,018   the same with 9 blocks, the paper's
mlp         any               50,890   one hidden layer of 64 (parameters for 28 x 28), for quick tests
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from signvote.errors import ConfigError
from signvote.names import check_name

Shape = tuple[int, ...]

MNIST_SHAPE: Shape = (1, 28, 28)
CIFAR_SHAPE: Shape = (3, 32, 32)
CLASSES = 10


class MnistCnn(nn.Module):
    """conv5x5(1,32)-relu-pool2, conv5x5(32,64)-relu-pool2, fc 1024-512-relu, fc 512-10.

    The relu stands after the pooling: of a window, the largest value survives either way, so outputs
    and gradients are the same and the relu has a quarter of the work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(1024, 512)
        self.fc2 = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 28, 28) -> (n, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))  # (n, 32, 12, 12)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # (n, 64, 4, 4)
        x = F.relu(self.fc1(x.flatten(1)))
        out: Tensor = self.fc2(x)
        return out


class BatchNormReLU(nn.BatchNorm2d):
    """relu(batch norm + shortcut): one layer, because that is how often memory should be passed through.

    It keeps no running statistics, as in the authors' code.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """(n, C, H, W) -> the same shape."""
        out = super().forward(x)
        return F.relu(out if shortcut is None else out + shortcut)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second pixel, new channels zero."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = BatchNormReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = BatchNormReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(n, C_in, H, W) -> (n, C, H / stride, W / stride)."""
        out: Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x))), self._shortcut(x))
        return out

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        new = (self.conv1.out_channels - self.conv1.in_channels) // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, new, new))


class ResNet(nn.Module):
    """ResNet for CIFAR (He et al. 2016, option A): 3 stages of `blocks` blocks, 16, 32 and 64 channels.

    Batch norm keeps no running statistics, as in the authors' code: in evaluation, too, a batch is
    normalised by its own, so accuracy depends on the size of the test batches.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = BatchNormReLU(16)
        widths = [16] + [16] * blocks + [32] * blocks + [64] * blocks
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in pairwise(widths)))
        self.fc = nn.Linear(64, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, 32, 32) -> (n, 10)."""
        x = self.blocks(self.bn(self.conv(x)))  # (n, 64, 8, 8)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def mlp(pixels: int = math.prod(MNIST_SHAPE)) -> nn.Module:
    """One hidden layer of 64; an image of any shape is a row of pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mnist-cnn": MnistCnn,
    "resnet20": partial(ResNet, 3),
    "resnet56": partial(ResNet, 9),
    "mlp": mlp,
}
IMAGES = {"mnist-cnn": MNIST_SHAPE, "resnet20": CIFAR_SHAPE, "resnet56": CIFAR_SHAPE}  # mlp: any
CHUNKS = {"mnist-cnn": 64, "mlp": 64}  # samples per pass; batch norm forbids it to the others


def model_for(name: str, shape: Shape) -> Callable[[], nn.Module]:
    """What makes fresh models of that name for images of a shape (C, H, W)."""
    check_name("model", name, MODELS)
    if IMAGES.get(name, shape) != shape:
        fitting = [model for model in MODELS if IMAGES.get(model, shape) == shape]
        raise ConfigError(
            f"model {name!r} takes images of {_text(IMAGES[name])}, these have {_text(shape)};"
            f" for them take {' or '.join(fitting)}"
        )
    return partial(mlp, math.prod(shape)) if name == "mlp" else MODELS[name]


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
