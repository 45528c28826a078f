"""Losses: functions of a model and a batch. The ready ones are a mean over the samples of a batch.

cross_entropy        classes: outputs (n, classes), labels (n,); also per pixel, (n, classes, H, W) and (n, H, W)
token_cross_entropy  sequences: outputs (n, length, vocabulary), labels (n, length)
squared_error        numbers: outputs and labels of one shape
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from signvote.errors import ConfigError
from signvote.tasks.data import Batch

Loss = Callable[[nn.Module, Batch], Tensor]  # the mean over the samples of a batch, a tensor with one number


@dataclass(frozen=True)
class OutputLoss:
    """A loss that follows from outputs and labels, sample by sample. The loss of a batch is their mean.

    The joint pass computes all workers at once for such a loss only: it needs the loss of each sample.

    >>> absolute_error = OutputLoss(lambda outputs, labels: (outputs - labels).abs().mean(1))
    """

    of_samples: Callable[[Any, Any], Tensor]  # outputs (n, ...), labels (n, ...) -> (n,)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        if not isinstance(batch, Batch):  # of outputs and labels, as up to release 0.1.0
            raise ConfigError(
                "a loss takes a model and a batch: task.loss(model, task.batch(task.train, indices));"
                " of outputs and labels, use task.loss.of(outputs, labels)"
            )
        outputs = model(batch.inputs)
        return self.of(outputs, batch.labels)

    def of(self, outputs: Any, labels: Any) -> Tensor:
        """The mean loss of outputs."""
        return self.of_samples(outputs, labels).mean()


def _cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return losses if losses.ndim == 1 else losses.flatten(1).mean(1)


def _token_cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


def _squared_errors(outputs: Tensor, labels: Tensor) -> Tensor:
    return differences(outputs, labels).square().mean(1)


def differences(outputs: Tensor, labels: Tensor) -> Tensor:
    """The differences of outputs and labels, (n, k). They must have one shape: (n, 1) minus (n,) would be (n, n)."""
    if outputs.shape != labels.shape:
        raise ConfigError(
            f"outputs have shape {tuple(outputs.shape)} and labels {tuple(labels.shape)}; they must be equal"
        )
    return (outputs - labels).reshape(len(outputs), -1)


cross_entropy = OutputLoss(_cross_entropies)
token_cross_entropy = OutputLoss(_token_cross_entropies)
squared_error = OutputLoss(_squared_errors)
