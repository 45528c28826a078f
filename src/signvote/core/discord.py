"""Who contradicts the others, where votes are corrections: pairs of workers on a sample of the coordinates.

    C_mk = mean of b_m b_k                                  over about 32 rounds
    d_m  = sqrt(M) sum_k v_k max(0, -C_mk) / sum_k v_k      M: number of workers; over the others k
    v_k  = f_k / (1 + sum_j max(0, C_kj))                   j: the others of k, so copies share one voice
    f_m  = min(1, LIMIT / d_m)^4                            three times, from f = 1

Where workers own different data, their gradients contradict each other. Their corrections do not. These carry how a
gradient changes, and rounding errors. Rounding errors of different workers are independent, and a step of the model
changes the gradients of all of them alike. A worker that votes against the sum of M independent votes differs from
each of them: C is about -0.8 / sqrt(M), so d is 0.8 with any number of workers. One that was found so does not
count against others, and workers that push together count as one. Nobody gains by agreement.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.pairs import ENOUGH

LIMIT = 0.35  # of d; docs/unlike-data.md has what was measured
STEEP = 4
REPEATS = 3


class Pairs(NamedTuple):
    """On how many coordinates two workers differ, and on how many both voted: (workers, witnesses) int64 each."""

    differ: Tensor
    common: Tensor


def compared(signs: Tensor, at: Tensor | None = None) -> Pairs:
    """Count the pairs of workers that differ: (workers, coordinates) of 1 and -1.

    Args:
        signs: at most 2^24 coordinates.
        at: the row of each witness; None: all workers are.

    >>> compared(torch.tensor([[1, -1, 1], [1, 1, -1]])).differ.tolist()
    [[0, 2], [2, 0]]

    """
    n = signs.shape[1]
    workers = signs.float()
    witnesses = workers if at is None else workers[at]
    products = (workers @ witnesses.T).long()  # exact: integers
    return Pairs((n - products) // 2, torch.full_like(products, n))


def accord(c: Tensor, at: Tensor | None = None) -> Tensor:
    """f, (workers,), from C, (workers, witnesses), which is 0 for a worker with itself; 1 for few workers.

    >>> c = torch.full((5, 5), -0.4).fill_diagonal_(0)
    >>> c[:4, :4] = 0
    >>> accord(c.double()).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.02...]

    """
    workers = len(c)
    factor = torch.ones(workers, dtype=c.dtype)
    if workers < ENOUGH:
        return factor
    rows = torch.arange(workers) if at is None else at
    against = (-c).clamp_min(0)
    copies = 1 + c[rows].clamp_min(0).sum(1)
    for _ in range(REPEATS):
        heard = factor[rows] / copies
        itself = torch.zeros_like(factor).index_copy(0, rows, heard)
        others = heard.sum() - itself
        d = math.sqrt(workers) * (against * heard).sum(1) / others
        factor = (LIMIT / d).clamp_max(1) ** STEEP
    return factor
