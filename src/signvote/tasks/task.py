"""A task of an experiment: training and test data, a model, the preparation of inputs, the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signvote.errors import ConfigError
from signvote.tasks.augment import Augment


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Samples and their labels."""

    inputs: Tensor  # (n, ...): uint8 images (n, C, H, W), or floats or ints used as they are
    labels: Tensor  # (n,) int64

    def __post_init__(self) -> None:
        labels = self.labels
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ConfigError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)};"
                " they must be torch.int64 of shape (n,)"
            )
        inputs = self.inputs.shape[0] if self.inputs.ndim else 0
        if inputs != len(self) or not inputs:
            raise ConfigError(f"{inputs} inputs and {len(self)} labels; they must be as many, at least 1")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def wrong(self, labels: Tensor) -> Tensor:
        """K - 1 - y for labels y of K classes: the labels of a worker with flipped labels."""
        return self.labels.max() - labels

    def to(self, device: torch.device) -> Data:
        """The same samples on a device."""
        inputs = self.inputs.to(device)
        labels = self.labels.to(device)
        return Data(inputs=inputs, labels=labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Data, model and loss of an experiment. A task of your own takes three lines:

    >>> points = torch.randn(100, 2)
    >>> data = Data(inputs=points, labels=(points.sum(1) > 0).long())
    >>> task = Task(name="half-planes", train=data, test=data, model=lambda: nn.Linear(2, 2))

    For another loss, override `losses` in a subclass.
    """

    name: str
    train: Data
    test: Data
    model: Callable[[], nn.Module]  # makes a new model; the caller seeds torch
    mean: tuple[float, ...] = ()  # per channel of uint8 images scaled to 0..1; (): inputs stay as they are
    deviation: tuple[float, ...] = ()
    augment: Augment | None = None  # of uint8 images, in training only
    samples_per_pass: int | None = None  # at most; None: a batch must not be split

    def __post_init__(self) -> None:
        samples = self.samples_per_pass
        if samples is not None and samples < 1:
            raise ConfigError(
                f"samples_per_pass is {samples}; it must be 1 or more, or None to never split a batch"
            )
        train = tuple(self.train.inputs.shape[1:])
        test = tuple(self.test.inputs.shape[1:])
        if train != test:
            raise ConfigError(f"a training input has shape {train}, a test input {test}; they must be equal")
        self._check_normalization()

    def _check_normalization(self) -> None:
        channels = {_channels(self.train.inputs), _channels(self.test.inputs)}
        means = len(self.mean)
        deviations = len(self.deviation)
        if channels != {means} or means != deviations:
            raise ConfigError(
                f"{means} means and {deviations} deviations for inputs with {max(channels)} channels;"
                " uint8 images (n, C, H, W) need C of each, other inputs none"
            )
        if not all(deviation > 0 for deviation in self.deviation):
            raise ConfigError(f"deviation is {self.deviation}; every one must be above 0")

    def draw(self, n: int, generator: torch.Generator) -> Tensor | None:
        """The random numbers with which `prepare` changes n training images, on the CPU; None: no change."""
        if self.augment is None:
            return None
        return self.augment.draw(n, generator)

    def prepare(self, inputs: Tensor, draws: Tensor | None = None) -> Tensor:
        """Inputs in the model's form: images as normalized float32, channels last; others unchanged.

            x = (image / 255 - mean) / deviation      per channel

        Args:
            inputs: rows of `train.inputs` or `test.inputs`, on any device.
            draws: from `draw`, in training, on the same device; None: no random change.

        """
        if draws is not None and self.augment is not None:
            inputs = self.augment.change(inputs, draws)
        if self.mean:
            return self._normalized(inputs)
        if inputs.ndim == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _normalized(self, images: Tensor) -> Tensor:
        # One channel needs this memory format too: convolutions choose their algorithm by the strides.
        x = torch.empty(
            images.shape,
            dtype=torch.float32,
            device=images.device,
            memory_format=torch.channels_last,
        )
        for c, (mean, deviation) in enumerate(zip(self.mean, self.deviation, strict=True)):
            channel = images[:, c].float()
            channel.mul_(1 / (255 * deviation))
            channel.sub_(mean / deviation)
            x[:, c] = channel
        return x

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (n,): cross entropy of the outputs (n, classes)."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        return self.losses(outputs, labels).mean()

    def to(self, device: torch.device) -> Task:
        """The same task with its data on a device."""
        train = self.train.to(device)
        test = self.test.to(device)
        return replace(self, train=train, test=test)


def _channels(inputs: Tensor) -> int:
    """Channels of uint8 images; 0 for other inputs."""
    are_images = inputs.dtype == torch.uint8 and inputs.ndim == 4
    return inputs.shape[1] if are_images else 0
