"""A task of an experiment: training and test data, a model, the loss and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from signvote.errors import ConfigError
from signvote.metrics import check_metrics
from signvote.names import check_name
from signvote.recipes import RECIPES, USUAL
from signvote.tasks.augment import Augment
from signvote.tasks.data import Batch, Data, Samples, mapped, samples_of, shapes
from signvote.tasks.losses import Loss, cross_entropy
from signvote.tasks.metrics import Measure, measures_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Data, model, loss and metrics of an experiment. A classifier of your own takes three lines:

    >>> points = torch.randn(100, 2)
    >>> data = Data(inputs=points, labels=(points.sum(1) > 0).long())
    >>> task = Task(name="half-planes", train=data, test=data, model=lambda: nn.Linear(2, 2))

    Anything else names its loss, and the metrics besides it:

    >>> from signvote.tasks import rmse, squared_error
    >>> data = Data(inputs=points, labels=points.sum(1, keepdim=True))
    >>> task = Task(
    ...     name="sums", train=data, test=data, model=nn.Linear(2, 1), loss=squared_error, metrics=(rmse("m"),)
    ... )
    """

    name: str
    train: Any  # Data, a map-style data set of pairs (inputs, label) or of inputs alone, or any Samples
    test: Any  # likewise
    model: Callable[
        [], nn.Module
    ]  # makes a new model, the caller seeds torch; or a model, of which runs train a copy
    loss: Loss = cross_entropy  # of a model and a batch: the mean over the samples
    metrics: Sequence[
        Measure
    ] = ()  # the most important first; (): accuracy and loss for cross_entropy, else the loss
    mean: tuple[float, ...] = ()  # per channel of uint8 images scaled to 0..1; (): inputs stay as they are
    deviation: tuple[float, ...] = ()
    augment: Augment | None = None  # of uint8 images, in training only
    samples_per_pass: int | None = None  # at most; None: a batch must not be split
    about: Mapping[str, str] = field(
        default_factory=dict
    )  # the data in words and a checksum, for the results
    recipe: str = USUAL  # of runs that name none

    def __post_init__(self) -> None:
        check_name("recipe", self.recipe, RECIPES)
        self._fill("train", samples_of(self.train))
        self._fill("test", samples_of(self.test))
        if isinstance(self.model, nn.Module):
            self._fill("model", partial(deepcopy, self.model))
        self._fill("metrics", measures_of(self.metrics, self.loss is cross_entropy))
        check_metrics(self.metrics)
        samples = self.samples_per_pass
        if samples is not None and samples < 1:
            raise ConfigError(
                f"samples_per_pass is {samples}; it must be 1 or more, or None to never split a batch"
            )
        if isinstance(self.train, Data) and isinstance(self.test, Data):
            self._check_inputs(self.train.inputs, self.test.inputs)

    def _fill(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_inputs(self, train: Any, test: Any) -> None:
        one_of_each = [shapes(mapped(lambda tensor: tensor[0], inputs)) for inputs in (train, test)]
        if one_of_each[0] != one_of_each[1]:
            raise ConfigError(
                f"a training input has shape {one_of_each[0]}, a test input {one_of_each[1]}; they must be equal"
            )
        self._check_normalization(train, test)

    def _check_normalization(self, train: Any, test: Any) -> None:
        channels = {_channels(train), _channels(test)}
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
        """The random numbers with which `batch` changes n training samples, on the CPU; None: no change."""
        if self.augment is None:
            drawn: Tensor | None = self.train.draw(n, generator)
            return drawn
        return self.augment.draw(n, generator)

    def batch(self, samples: Samples, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """A batch in the model's form: some of the samples, prepared."""
        inputs, labels = samples.batch(indices, draws)
        return Batch(self.prepare(inputs, draws), labels)

    def prepare(self, inputs: Any, draws: Tensor | None = None) -> Any:
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
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
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

    def to(self, device: torch.device) -> Task:
        """The same task with its data on a device."""
        train = self.train.to(device)
        test = self.test.to(device)
        return replace(self, train=train, test=test)


def _channels(inputs: Any) -> int:
    """Channels of uint8 images; 0 for other inputs."""
    are_images = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == 4
    return int(inputs.shape[1]) if are_images else 0
