"""The polar factors of a signal's matrices: what a worker may send the signs of, instead of the signal's own.

A matrix G = U S V^T has the polar factor U V^T: the same directions, each with length 1. The signs of a momentum are
those of its few large directions. The signs of its polar factor count all directions alike. This is the step of Muon,
and its signs are Sign-Muon's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from signvote.core.layout import Layout, Segment

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # Muon's: singular values from 0.01 to 1 end near 1 in five iterations
SMALLEST = 1e-30  # norm that is divided by


def with_polar_factors(signal: Tensor, layout: Layout) -> Tensor:
    """Signals (..., n) with the polar factor of each matrix instead of the matrix; vectors stay as they are."""
    result = signal.clone()
    for segment in matrices(layout):
        part = signal[..., segment.start : segment.stop]
        matrix = part.reshape(*part.shape[:-1], segment.shape[0], -1)
        result[..., segment.start : segment.stop] = _each(matrix).flatten(-2)
    return result


def matrices(layout: Layout) -> Iterable[Segment]:
    """The parameters with two dimensions or more. All dimensions of a convolution but the first count as one."""
    return (s for s in layout.segments if len(s.shape) >= 2 and s.start < s.stop)


def _each(stack: Tensor) -> Tensor:
    """The polar factors of matrices (..., r, c). On a CPU one at a time: a worker's bits depend on no other worker."""
    if stack.is_cuda or stack.ndim == 2:
        return polar_factor(stack)
    return torch.stack([_each(matrix) for matrix in stack])


def polar_factor(matrix: Tensor) -> Tensor:
    """U V^T of matrices U S V^T, (..., r, c), nearly: by Newton and Schulz's iteration, without a decomposition.

        X <- a X + b (X X^T) X + c (X X^T)^2 X      five times, from X = G / |G|

    Its singular values lie between 0.7 and 1.2, which hardly changes a sign. A row or column of zeros stays zero.

    >>> polar_factor(torch.diag(torch.tensor([2.0, 0.5, 0.02]))).diag().round(decimals=1)
    tensor([0.7000, 0.7000, 0.7000])
    """
    x = matrix.float() if matrix.element_size() < 4 else matrix
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    x = x / norm.clamp_min(SMALLEST).to(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(ITERATIONS):
        product = x @ x.mT
        x = A * x + (B * product + C * (product @ product)) @ x
    factor: Tensor = x.mT if is_tall else x
    return factor.to(matrix.dtype)
