"""Yardsticks: aggregates of whole gradients, 32 bits per coordinate, to compare one-bit rules with.

    oracle    the sign of the mean gradient of all samples, without attackers
    sgd       that mean itself; one attacker can turn it
    median    the median of the workers' gradients in each coordinate; it takes half of the workers to turn it

An attacker of sgd or median sends its own magnitudes with the signs of its attack, so every yardstick and rule
faces the same attack. A real attacker could do more: it could scale its floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.vote import Votes

FLOAT32_BYTES = 4


def float_bytes(n: int) -> int:
    """Bytes of one gradient of n coordinates. A yardstick sends one up and one down per worker and round."""
    return FLOAT32_BYTES * n


def messages(signals: Tensor, votes: Votes) -> tuple[Tensor, tuple[int, ...]]:
    """The gradients that workers send, (workers, N), and their batch sizes. Absent workers have no row.

    Args:
        signals: the gradient that each worker would send if it were honest, one row per voter.
        votes: the signs that workers do send.

    """
    magnitudes = signals.abs()
    sent = magnitudes * unpack_signs(votes.planes, votes.n)
    if votes.present is None:
        return sent, votes.batch_sizes
    rows = votes.present.nonzero()[:, 0].tolist()
    sizes = tuple(votes.batch_sizes[row] for row in rows)
    return sent[rows], sizes


def mean(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """The mean over all samples: each worker counts by its declared batch size."""
    sizes = torch.tensor(
        batch_sizes,
        dtype=sent.dtype,
        device=sent.device,
    )
    shares = sizes / sizes.sum()
    weighted = sent * shares[:, None]
    return weighted.sum(0)


def median(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """The median of the workers in each coordinate; the mean of the middle two if their number is even."""
    ordered = sent.sort(0).values
    last = len(sent) - 1
    lower = ordered[last // 2]
    upper = ordered[(last + 1) // 2]
    return (lower + upper) / 2


AGGREGATES = {"sgd": mean, "median": median}
