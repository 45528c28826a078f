"""Metrics that come ready, and how they are measured on the test data.

accuracy    the share of right classes
loss        the loss itself
worst class  the share of right answers in the class that has the smallest
perplexity  exp(loss), for a loss that is a cross entropy in nats
rmse, mae   the root of the mean squared error, the mean absolute error
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from signvote.errors import ConfigError
from signvote.metrics import ACCURACY, LOSS, SHARE, Metric
from signvote.tasks.losses import differences

LARGEST_EXPONENT = 700.0  # exp of more is no float

Values = Callable[[Any, Any], Tensor]  # outputs, labels -> (n, ...), a row per sample


def itself(mean: Any) -> float:
    """The mean is the metric."""
    return float(mean)


@dataclass(frozen=True, kw_only=True)
class Measure(Metric):
    """A metric, and how it is measured: values of each sample, their mean over all test data, then `finish`.

    With several values per sample, `finish` receives the mean of each. This is R2, the share of variance explained:

    >>> def sums(outputs, labels):
    ...     return torch.stack([(outputs - labels) ** 2, labels, labels**2], 1)
    >>> def explained(means):
    ...     error, mean, square = means
    ...     return 1 - error / (square - mean**2)
    >>> r2 = Measure(name="R2", more_is_better=True, values=sums, finish=explained)
    """

    values: Values | None = None  # None: the loss of the task
    finish: Callable[[Any], float | Tensor] = itself  # float64 mean of the values -> metric


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether each sample is classified right, (n,); of several labels per sample, the share."""
    guesses = outputs.argmax(1)
    if guesses.shape != labels.shape:
        raise ConfigError(
            f"accuracy needs labels of shape {tuple(guesses.shape)}, a class each; they have {tuple(labels.shape)}"
        )
    hits = guesses == labels
    return hits if hits.ndim == 1 else hits.flatten(1).double().mean(1)


def accuracy() -> Measure:
    """The share of right classes: outputs (n, classes, ...), labels (n, ...)."""
    return Measure(**ACCURACY.as_dict(), values=right)


def worst_class(classes: int) -> Measure:
    """The accuracy of the class that has the smallest: what unlike data cost those who own it.

    Args:
        classes: their number; a class without test data does not count.

    """

    def values(outputs: Tensor, labels: Tensor) -> Tensor:
        members: Tensor = one_hot(labels.long(), classes)
        hits = members * right(outputs, labels)[:, None]
        return torch.stack([hits, members], 1)

    def smallest(means: Tensor) -> Tensor:
        hits, members = means
        shares: Tensor = hits / members
        return shares.nan_to_num(1.0).min()

    return Measure(
        name="worst class",
        unit=SHARE,
        more_is_better=True,
        values=values,
        finish=smallest,
    )


def loss(unit: str = "") -> Measure:
    """The loss of the task."""
    return Measure(name=LOSS.name, unit=unit)


def perplexity() -> Measure:
    """exp(loss)."""
    return Measure(name="perplexity", finish=_exp)


def rmse(unit: str = "") -> Measure:
    """The root of the mean squared error, for outputs and labels of one shape."""
    return Measure(
        name="rmse",
        unit=unit,
        values=_squares,
        finish=_root,
    )


def mae(unit: str = "") -> Measure:
    """The mean absolute error, for outputs and labels of one shape."""
    return Measure(name="mae", unit=unit, values=_magnitudes)


class Score:
    """Adds up the metrics of a task over batches of test data."""

    def __init__(self, metrics: Sequence[Measure]) -> None:
        self.metrics = metrics
        self.samples = 0
        self.loss = 0.0
        self.sums: dict[str, Tensor] = {}

    def add(self, samples: int, loss: float, outputs: Any, labels: Any) -> None:
        """Add a batch with this mean loss. The outputs may be None if no metric needs them."""
        self.samples += samples
        self.loss += loss * samples
        for name, summed in sums_of(self.metrics, samples, outputs, labels).items():
            before = self.sums.get(name)
            self.sums[name] = summed if before is None else before + summed

    def result(self) -> dict[str, float]:
        """Each metric by name."""
        return finished(self.metrics, self.samples, self.loss, self.sums)


def need_outputs(metrics: Sequence[Measure]) -> bool:
    """Whether a metric follows from outputs and labels, not from the loss."""
    return any(metric.values is not None for metric in metrics)


def sums_of(metrics: Sequence[Measure], samples: int, outputs: Any, labels: Any) -> dict[str, Tensor]:
    """The sums over some samples, in float64, of the metrics that are not the loss."""
    found = {}
    for metric in metrics:
        if metric.values is not None:
            values = metric.values(outputs, labels)
            if not values.ndim or len(values) != samples:
                raise ConfigError(
                    f"the metric {metric.name!r} has values of shape {tuple(values.shape)} for {samples} samples;"
                    " they must have a row per sample"
                )
            found[metric.name] = values.sum(0, dtype=torch.float64)
    return found


def finished(
    metrics: Sequence[Measure],
    samples: int,
    loss: float,
    sums: dict[str, Tensor],
) -> dict[str, float]:
    """Each metric by name, from its sum over all samples."""
    found = {}
    for metric in metrics:
        mean = loss / samples if metric.values is None else _mean(sums[metric.name], samples)
        found[metric.name] = float(metric.finish(mean))
    return found


def _mean(summed: Tensor, samples: int) -> float | Tensor:
    return summed.cpu() / samples if summed.ndim else float(summed) / samples


def _squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return differences(outputs, labels).square().mean(1)


def _magnitudes(outputs: Tensor, labels: Tensor) -> Tensor:
    return differences(outputs, labels).abs().mean(1)


def _root(mean: float) -> float:
    return math.sqrt(mean)


def _exp(mean: float) -> float:
    return math.inf if mean > LARGEST_EXPONENT else math.exp(mean)


def measures_of(metrics: Sequence[Measure], is_classifier: bool) -> tuple[Measure, ...]:
    """The metrics of a task that names none: accuracy and loss of a classifier, else the loss."""
    if metrics:
        return tuple(metrics)
    return (accuracy(), loss()) if is_classifier else (loss(),)
