"""The yardstick of sparse changes, in the form of SparseLoCo (2025): the largest few of each chunk, in few bits.

    p = change + 0.95 e                 e: what was not sent so far
    of each 4,096 coordinates the 64 of largest |p| are sent: 12 bits for the place, 2 for the value
    e <- p - what was sent

The 2 bits are the sign, and whether the magnitude is above the mean of those sent. Each of the two levels is the mean
of its magnitudes, a float16. There is no server: every worker gets the messages of all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
KEPT = 64  # of a chunk
FEEDBACK = 0.95
PLACE_BITS = 12
VALUE_BITS = 2
LEVEL_BYTES = 2 * 2  # two float16


def message_bytes(n: int) -> int:
    """Bytes of one worker's message about n coordinates.

    >>> message_bytes(4096)
    116
    """
    chunks = -(-n // CHUNK)
    lengths = [min(CHUNK, n - CHUNK * c) for c in range(chunks)]
    kept = sum(map(_kept, lengths))
    bits = kept * (PLACE_BITS + VALUE_BITS)
    return -(-bits // 8) + LEVEL_BYTES * chunks


def _kept(length: int) -> int:
    """How many coordinates of a chunk are sent."""
    return -(-KEPT * length // CHUNK)


def compressed(change: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What a worker sends of its change, as the others see it, and the new residual. All are (n,)."""
    p = change + FEEDBACK * residual
    sent = torch.zeros_like(p)
    for start in range(0, len(p), CHUNK):
        at = slice(start, min(start + CHUNK, len(p)))
        _send_(sent[at], p[at])
    return sent, p - sent


def _send_(sent: Tensor, p: Tensor) -> None:
    """Write what is sent of a chunk."""
    places = p.abs().topk(_kept(len(p))).indices
    chosen = p[places]
    magnitude = chosen.abs()
    above = magnitude > magnitude.mean()
    high = _level(magnitude, above)
    low = _level(magnitude, ~above)
    sent[places] = torch.where(above, high, low) * torch.sign(chosen)


def _level(magnitude: Tensor, these: Tensor) -> Tensor:
    """The mean of some magnitudes, as a float16 holds it; 0 of none."""
    total = (magnitude * these).sum()
    mean = total / these.sum().clamp_min(1)
    return mean.half().to(magnitude.dtype)
