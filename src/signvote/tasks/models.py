"""The models of the experiments.

name        images        parameters   layers
mnist-cnn   1 x 28 x 28      582,026   the paper's CNN: two 5 x 5 convolutions, two linear layers
resnet20    3 x 32 x 32      269,722   ResNet for CIFAR, 3 stages of 3 blocks
resnet20-gn 3 x 32 x 32      269,722   the same with group norm, for workers whose batches have few labels
resnet56    3 x 32 x 32      853,018   the same as resnet20 with 9 blocks, as in the paper
mlp         any               50,890   one hidden layer of 64 (parameters for 28 x 28), for quick tests
gpt-tiny    bytes            119,104   a transformer, 2 layers of 64, sequences of 64; see gpt.py
gpt-small   bytes          4,852,992   6 layers of 256, sequences of 256
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.tasks.gpt import GPTS

Shape = tuple[int, ...]

MNIST_SHAPE: Shape = (1, 28, 28)
CIFAR_SHAPE: Shape = (3, 32, 32)
CLASSES = 10


class MnistCnn(nn.Module):
    """conv5x5(1,32)-relu-pool2, conv5x5(32,64)-relu-pool2, fc 1024-512-relu, fc 512-10.

    The relu comes after the pooling. Pooling keeps the largest value of a window either way, so outputs
    and gradients are the same, and the relu has a quarter of the work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(1024, 512)
        self.fc2 = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 28, 28) -> (n, 10)."""
        x = F.max_pool2d(self.conv1(x), 2)
        x = F.relu(x)  # (n, 32, 12, 12)
        x = F.max_pool2d(self.conv2(x), 2)
        x = F.relu(x)  # (n, 64, 4, 4)
        x = self.fc1(x.flatten(1))
        x = F.relu(x)  # (n, 512)
        out: Tensor = self.fc2(x)
        return out


class BatchNormReLU(nn.BatchNorm2d):
    """relu(batch norm + shortcut). It keeps no running statistics, as in the authors' code."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """(n, C, H, W) -> the same shape."""
        return batch_norm_relu(x, shortcut, self.weight, self.bias, self.eps)


def batch_norm_relu(
    x: Tensor,
    shortcut: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """relu(batch norm + shortcut) as one function, so that a kernel can compute it in one pass over memory."""
    if has_torch_function_unary(x):
        replaced: Tensor = handle_torch_function(batch_norm_relu, (x,), x, shortcut, weight, bias, eps)
        return replaced
    out = F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    if shortcut is not None:
        out = out + shortcut
    return F.relu(out)


class GroupNormReLU(nn.GroupNorm):
    """relu(group norm + shortcut), with 8 groups. No sample depends on the others of its batch."""

    def __init__(self, channels: int) -> None:
        super().__init__(8, channels)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """(n, C, H, W) -> the same shape."""
        out = super().forward(x)
        if shortcut is not None:
            out = out + shortcut
        return F.relu(out)


Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second pixel, new channels zero."""

    def __init__(self, channels_in: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.stride = channels // channels_in
        self.conv1 = nn.Conv2d(
            channels_in,
            channels,
            kernel_size=3,
            stride=self.stride,
            padding=1,
            bias=False,
        )
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(n, C_in, H, W) -> (n, C, H / stride, W / stride)."""
        hidden = self.bn1(self.conv1(x))
        hidden = self.conv2(hidden)
        out: Tensor = self.bn2(hidden, self._shortcut(x))
        return out

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        new_channels = self.conv1.out_channels - self.conv1.in_channels
        each_side = new_channels // 2
        sampled = x[:, :, :: self.stride, :: self.stride]
        return F.pad(sampled, (0, 0, 0, 0, each_side, each_side))


class ResNet(nn.Module):
    """ResNet for CIFAR (He et al. 2016, option A): 3 stages of `blocks` blocks, 16, 32 and 64 channels.

    Batch norm keeps no running statistics, as in the authors' code. Evaluation normalizes each batch by its
    own statistics too, so accuracy depends on the size of the test batches. Group norm is for workers whose batches
    have few labels.
    """

    def __init__(self, blocks: int, norm: Norm = BatchNormReLU) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = norm(16)
        widths = [16]
        for channels in (16, 32, 64):
            widths += [channels] * blocks
        layers = [Block(before, after, norm) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*layers)
        self.fc = nn.Linear(64, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, 32, 32) -> (n, 10)."""
        x = self.bn(self.conv(x))
        x = self.blocks(x)  # (n, 64, 8, 8)
        x = x.mean((2, 3))
        out: Tensor = self.fc(x)
        return out


def mlp(pixels: int = math.prod(MNIST_SHAPE)) -> nn.Module:
    """One hidden layer of 64. An image of any shape becomes a row of pixels."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mnist-cnn": MnistCnn,
    "resnet20": partial(ResNet, 3),
    "resnet20-gn": partial(ResNet, 3, GroupNormReLU),
    "resnet56": partial(ResNet, 9),
    "mlp": mlp,
    **GPTS,
}
IMAGES = {"mnist-cnn": MNIST_SHAPE} | dict.fromkeys(
    ("resnet20", "resnet20-gn", "resnet56"), CIFAR_SHAPE
)  # mlp: any
SAMPLES_PER_PASS = {"mnist-cnn": 64, "mlp": 64}  # samples per pass; models with batch norm need whole batches


def model_for(name: str, shape: Shape) -> Callable[[], nn.Module]:
    """A function that makes new models of this name, for images of a shape (C, H, W)."""
    check_name("model", name, MODELS)
    if name in GPTS:
        raise ConfigError(
            f"model {name!r} reads text, and the task has images; for text use the task python-source"
        )
    if not _accepts(name, shape):
        fitting = [model for model in MODELS if model not in GPTS and _accepts(model, shape)]
        raise ConfigError(
            f"model {name!r} takes images of {_text(IMAGES[name])}, these have {_text(shape)};"
            f" for them use {' or '.join(fitting)}"
        )
    if name == "mlp":
        return partial(mlp, math.prod(shape))
    return MODELS[name]


def _accepts(model: str, shape: Shape) -> bool:
    return IMAGES.get(model, shape) == shape


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
