"""What an experiment trains and on what: two sets of samples, a model, how inputs are prepared, the loss."""

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
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            raise ConfigError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)};"
                " they must be torch.int64 of shape (n,)"
            )
        inputs = self.inputs.shape[0] if self.inputs.ndim else 0
        if inputs != len(self) or not inputs:
            raise ConfigError(f"{inputs} inputs and {len(self)} labels; they must be as many, at least 1")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def wrong(self, labels: Tensor) -> Tensor:
        """K - 1 - y for labels y of K classes: what a worker with flipped labels trains on."""
        return self.labels.max() - labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Data, model and loss of an experiment; your own takes these lines:

    >>> points = torch.randn(100, 2)
    >>> data = Data(inputs=points, labels=(points.sum(1) > 0).long())
    >>> task = Task(name="half-planes", train=data, test=data, model=lambda: nn.Linear(2, 2))

    For another loss, derive from this class and override `losses`.
    """

    name: str
    train: Data
    test: Data
    model: Callable[[], nn.Module]  # makes a fresh one; the caller seeds torch
    mean: tuple[float, ...] = ()  # of uint8 images scaled to 0..1, per channel; (): inputs used as they are
    deviation: tuple[float, ...] = ()
    augment: Augment | None = None  # on uint8 images, in training only
    chunk: int | None = None  # at most so many samples per pass; None: a batch must never be split

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(f"chunk is {self.chunk}; it must be 1 or more, or None to never split a batch")
        train, test = tuple(self.train.inputs.shape[1:]), tuple(self.test.inputs.shape[1:])
        if train != test:
            raise ConfigError(f"a training input has shape {train}, a test input {test}; they must be equal")
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        channels = {
            data.inputs.shape[1] if _are_images(data.inputs) else 0 for data in (self.train, self.test)
        }
        if channels != {len(self.mean)} or len(self.mean) != len(self.deviation):
            raise ConfigError(
                f"{len(self.mean)} means and {len(self.deviation)} deviations for inputs with"
                f" {max(channels)} channels; uint8 images (n, C, H, W) need C of each, other inputs none"
            )
        if not all(d > 0 for d in self.deviation):
            raise ConfigError(f"deviation is {self.deviation}; every one must be above 0")

    def draw(self, n: int, generator: torch.Generator) -> Tensor | None:
        """What `prepare` needs to change n training images at random, on the CPU; None: no change."""
        return None if self.augment is None else self.augment.draw(n, generator)

    def prepare(self, inputs: Tensor, draws: Tensor | None = None) -> Tensor:
        """Inputs as the model wants them: images as normalised float32, channels last; others as they are.

            x = (image / 255 - mean) / deviation      per channel

        Args:
            inputs: some rows of `train.inputs` or `test.inputs`, on any device.
            draws: of `draw`, in training, beside the inputs; None: they stay as they are.

        """
        if draws is not None and self.augment is not None:
            inputs = self.augment.change(inputs, draws)
        if not self.mean:
            return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs
        x = torch.empty(
            inputs.shape, dtype=torch.float32, device=inputs.device, memory_format=torch.channels_last
        )  # of one channel, too, in this order: convolutions look at the strides
        for c, (mean, deviation) in enumerate(zip(self.mean, self.deviation, strict=True)):
            x[:, c] = inputs[:, c].float().mul_(1 / (255 * deviation)).sub_(mean / deviation)
        return x

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (n,): cross entropy of the outputs (n, classes)."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        return self.losses(outputs, labels).mean()

    def to(self, device: torch.device) -> Task:
        """The same task with its data on a device."""

        def moved(data: Data) -> Data:
            return Data(inputs=data.inputs.to(device), labels=data.labels.to(device))

        return replace(self, train=moved(self.train), test=moved(self.test))


def _are_images(inputs: Tensor) -> bool:
    return inputs.dtype == torch.uint8 and inputs.ndim == 4
