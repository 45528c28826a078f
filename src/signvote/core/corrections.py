"""Votes as corrections: over rounds, one bit carries the mean of the gradients instead of their median.

    b = sign(m - a h)                           a worker's vote: does the server believe too little of it?
    h <- a h + S b                              what it believes then; without S b if the ballot was not counted
    G <- a G + S sum_m w_m b_m / sum_m w_m      on the server: the weighted mean of what it believes of all workers
    decision = sign(G)

a is LEAK. S is a scale for each tensor, a power of two: the weighted median of the workers' claims, each GAIN times the
mean of |m| of a worker. So a worker whose gradient is large says so by voting the same way for many rounds.

All of it is elementwise, in float32 and without fused multiply-add, so every engine and device gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.layout import Layout, Segment

LEAK = 31 / 32  # a
GAIN = 0.7
EXPONENTS = (-126, 127)  # of the powers of two that are normal float32


def believed(belief: Tensor) -> Tensor:
    """What is left of a belief in the next round: a h."""
    return belief * LEAK


def claims(average: Tensor, layout: Layout) -> Tensor:
    """The exponents of GAIN mean |m| for each tensor: (..., n) -> (..., tensors) int8.

    >>> claims(torch.tensor([2.0, 4.0, -0.0, 0.0]), Layout([("a", (2,)), ("b", (2,))])).tolist()
    [1, -126]
    """
    means = [
        average[..., segment.start : segment.stop].abs().mean(-1, dtype=torch.float64)
        for segment in layout.segments
    ]
    exponents = torch.log2(GAIN * torch.stack(means, -1)).nan_to_num(EXPONENTS[0]).round()
    return exponents.clamp(*EXPONENTS).to(torch.int8)


def agreed(claimed: Tensor, weights: Tensor) -> Tensor:
    """The weighted lower median of the workers' exponents: (workers, tensors), (workers,) -> (tensors,) int8.

    >>> agreed(torch.tensor([[1], [5], [9]], dtype=torch.int8), torch.tensor([1, 1, 1])).tolist()
    [5]
    >>> agreed(torch.tensor([[1], [5], [9]], dtype=torch.int8), torch.tensor([1, 1, 3])).tolist()
    [9]
    """
    ordered = claimed.sort(0)
    below = weights.long()[ordered.indices].cumsum(0)
    is_half = 2 * below >= weights.sum()
    middle = is_half.int().argmax(0, keepdim=True)
    return ordered.values.gather(0, middle)[0]


def scales(exponents: Tensor, layout: Layout, first: int, n: int) -> Tensor:
    """S at coordinates first to first + n, (n,) float32."""
    lengths = [_overlap(segment, first, first + n) for segment in layout.segments]
    powers = torch.exp2(exponents.float())
    repeats = torch.tensor(lengths, device=exponents.device)
    return powers.repeat_interleave(repeats, output_size=sum(lengths))


def _overlap(segment: Segment, first: int, stop: int) -> int:
    """How many coordinates of a tensor lie in a range."""
    return max(0, min(segment.stop, stop) - max(segment.start, first))


def corrected(belief: Tensor, signs: Tensor | None, scale: Tensor) -> None:
    """Follow a decision, in place: h <- a h + S b, without S b if the ballot was not counted.

    Args:
        belief: h, (..., n).
        signs: b, int8; 0 or None: not counted.
        scale: S, (n,).

    """
    belief *= LEAK
    if signs is not None:
        belief += signs * scale  # exact: S is a power of two
