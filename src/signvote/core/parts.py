"""Parts of a signal: its direction, its largest coordinates, and what a vote on these leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLED = 61  # one number of so many gives a bound; prime, so that no period of a layer meets it


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """Gradients (..., n), each scaled down to this norm if it is longer.

    The squares are summed in float64: neither threads nor rows may change a bit of the result.
    """
    norms: Tensor = torch.linalg.vector_norm(
        gradient,
        dim=-1,
        keepdim=True,
        dtype=torch.float64,
    )
    factor = (norm / norms).clamp_max(1)
    return gradient * factor.to(gradient.dtype)


def largest(signal: Tensor, share: float) -> Tensor:
    """The signal where its magnitude is among the largest `share` of a row, at least one; 0 elsewhere."""
    n = signal.shape[-1]
    k = max(1, round(share * n))
    magnitude = signal.abs()
    if signal.ndim == 1 and not signal.is_cuda:
        is_kept = magnitude >= _kth_largest(magnitude, k)
        if is_kept.count_nonzero() == k:  # no ties at the bound
            return torch.where(is_kept, signal, 0)
    kept = magnitude.topk(k).indices
    values = signal.gather(-1, kept)
    return torch.zeros_like(signal).scatter_(-1, kept, values)


def _kth_largest(magnitude: Tensor, k: int) -> Tensor:
    """The k-th largest number of a row.

    In a long row, a sample gives a bound that somewhat more than k numbers reach; only those are searched.
    """
    sample = magnitude[::SAMPLED]
    among = int(1.2 * k / SAMPLED) + 8
    if among < len(sample):
        bound = sample.topk(among).values[-1]
        candidates = magnitude[magnitude >= bound]
        if len(candidates) >= k:  # the sample is like the row
            magnitude = candidates
    return magnitude.topk(k).values[-1]


def left_out(signal: Tensor, sent: Tensor) -> Tensor:
    """The residual: the signal less the signs sent, each times the mean magnitude where a sign was sent.

    The mean is summed in float64: neither threads nor rows may change a bit of it.
    """
    cast = sent != 0
    magnitude = (signal.abs() * cast).sum(-1, keepdim=True, dtype=torch.float64)
    count = cast.count_nonzero(dim=-1)[..., None]
    scale = magnitude / count.clamp_min(1)
    return signal - scale.to(signal.dtype) * sent
