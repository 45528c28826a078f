"""A task is tried before it is trained: what does not fit together is one sentence, not an error deep inside torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from signvote.errors import ConfigError
from signvote.tasks.data import Batch, Samples, shapes
from signvote.tasks.metrics import need_outputs, sums_of
from signvote.tasks.task import Task

FAILURES = (
    RuntimeError,
    IndexError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
)  # of tensors that do not fit


def tried(task: Task, model: nn.Module) -> None:
    """Compute loss and metrics of two samples, in evaluation. Raise one sentence if that fails.

    Neither the model nor random numbers change.
    """
    device = next(model.parameters()).device
    forked = [device] if device.type == "cuda" else []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=forked):
            for name, samples in (("training", task.train), ("test", task.test)):
                _try(task, model, name, samples, device)
    finally:
        model.train(was_training)


def _try(
    task: Task,
    model: nn.Module,
    name: str,
    samples: Samples,
    device: torch.device,
) -> None:
    indices = torch.tensor([0, len(samples) - 1], device=device)
    doing = f"read {name} data"
    batch = Batch(None)
    try:
        batch = task.batch(samples, indices)
        doing = "compute a loss"
        loss = task.loss(model, batch)
        _check_loss(loss)
        doing = "compute metrics"
        if need_outputs(task.metrics):
            sums_of(task.metrics, len(indices), model(batch.inputs), batch.labels)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None
    except FAILURES as error:
        raise ConfigError(
            f"task {task.name!r} cannot {doing} of 2 samples, {_described(batch)}:"
            f" {type(error).__name__}: {_first_line(error)}"
        ) from error


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise ConfigError(f"the loss is {type(loss).__name__}; it must be a tensor with one number")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ConfigError(
            f"the loss is {loss.dtype} of shape {tuple(loss.shape)};"
            " it must be one floating-point number, the mean over the samples of a batch"
        )


def _described(batch: Batch) -> str:
    if batch.inputs is None:
        return "the first and the last"
    text = f"inputs {shapes(batch.inputs)}"
    return text if batch.labels is None else f"{text} and labels {shapes(batch.labels)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
