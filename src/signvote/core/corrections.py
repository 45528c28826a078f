"""Votes as corrections: over rounds, one bit carries the mean of the gradients instead of their median.

    b = sign(m - a h)                             a worker's vote: does the server believe too little of it?
    h <- a h + S b                                what it believes then; without S b if the ballot was not counted
    G <- a G + sum_m w_m S_m b_m / sum_m w_m      on the server: the weighted mean of what it believes of all workers
    decision = sign(G)

a is LEAK. S is a worker's own scale for a tensor, a power of two: the mean of its |m|, but at most twice the median of
all workers' claims. A gradient of few samples is noisy, so its scale is large. With a scale that all workers share,
either its worker could not follow its own gradient, or that of many samples would drown in steps of this size.

All of it is elementwise, in float32 and without fused multiply-add, so every engine and device gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.powers import agreed
from signvote.core.scales import spread

LEAK = 31 / 32  # a
EXPONENTS = (-80, 80)  # of scales: what is computed from them stays in float32's normal range


def believed(belief: Tensor) -> Tensor:
    """What is left of a belief in the next round: a h."""
    return belief * LEAK


def claims(average: Tensor, layout: Layout) -> Tensor:
    """The exponents of mean |m| for each tensor: (..., n) -> (..., tensors) int8.

    >>> claims(torch.tensor([2.0, 4.0, -0.0, 0.0]), Layout([("a", (2,)), ("b", (2,))])).tolist()
    [2, -80]
    """
    means = [
        average[..., segment.start : segment.stop].abs().mean(-1, dtype=torch.float64)
        for segment in layout.segments
    ]
    exponents = torch.log2(torch.stack(means, -1)).nan_to_num(EXPONENTS[0]).round()
    return exponents.clamp(*EXPONENTS).to(torch.int8)


def largest(claimed: Tensor, present: Tensor | None = None) -> Tensor:
    """The exponent of the largest scale that counts: twice the median claim, (workers, tensors) -> (tensors,) int8.

    Args:
        claimed: exponents.
        present: (workers,), False: the worker does not vote; None: all do.

    >>> largest(torch.tensor([[-3], [-2], [0], [9]], dtype=torch.int8)).tolist()
    [-1]

    """
    voices = torch.ones(len(claimed), device=claimed.device) if present is None else present
    return agreed(claimed, voices) + 1


def own(claimed: Tensor, largest: Tensor) -> Tensor:
    """The exponents of the scales that count: a worker's claim, and at most the largest."""
    return claimed.minimum(largest)


def scales(exponents: Tensor, layout: Layout, first: int, n: int) -> Tensor:
    """S at coordinates first to first + n, (n,) float32, from the exponents of a worker."""
    return spread(torch.exp2(exponents.float()), layout, first, n)


def corrected(belief: Tensor, signs: Tensor | None, scale: Tensor | None) -> None:
    """Follow a decision, in place: h <- a h + S b, without S b if the ballot was not counted.

    Args:
        belief: h, (..., n).
        signs: b, int8; 0 or None: not counted.
        scale: S, of the same shape; None without signs.

    """
    belief *= LEAK
    if signs is not None and scale is not None:
        belief += signs * scale  # exact: S is a power of two
