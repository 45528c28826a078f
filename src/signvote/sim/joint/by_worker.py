"""What layers need to sum the samples of each worker by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from signvote.sim.joint import layers_plain
from signvote.sim.joint.crew import Crew, NotTogetherError


def sums_of(crew: Crew) -> Any:
    """The module with the sums per worker."""
    if not crew.triton:
        return layers_plain
    from signvote.sim.joint import layers_cuda

    return layers_cuda


def check_rows(crew: Crew, x: Tensor, what: str) -> None:
    """Raise unless every sample has a row."""
    if not x.ndim or len(x) != crew.parts.samples:
        raise NotTogetherError(f"its model gives {what} a tensor of {tuple(x.shape)}, not a row per sample")


def sum_rows(crew: Crew, into: Tensor, rows: Tensor) -> None:
    """Sum (samples, ..., features) to (workers, features)."""
    for workers, samples in crew.parts.equals():
        count = workers.stop - workers.start
        by_worker = rows[samples].reshape(count, -1, rows.shape[-1])
        into[workers] = by_worker.sum(1, dtype=torch.float32)
