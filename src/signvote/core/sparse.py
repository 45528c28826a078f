"""Sorted index sets in nearly as few bits as possible: Golomb-Rice codes of the gaps.

Each gap between neighbouring indices is written as quotient and remainder by 2^k. All quotients go,
in unary, into one bit stream and all remainders, k bits each, into another, so both directions are a
handful of array operations. k follows from the density alone. At 1 % and 10 % density a ballot costs
less than 2 % more than its entropy. Order and uniqueness need no check on the wire: a gap
cannot be negative, so unsorted or repeated indices cannot be written down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from signvote.core.bits import Bytes, bytes_for
from signvote.errors import BallotError
from signvote.kernels.reference import unpack

Indices = np.ndarray[Any, np.dtype[np.int64]]


def rice_parameter(n: int, count: int) -> int:
    """Bits of a remainder, k = floor(log2(n / count)), at `count` indices below n."""
    return (n // count).bit_length() - 1


def remainder_bytes(n: int, count: int) -> int:
    """Bytes that the remainders fill."""
    return bytes_for(count * rice_parameter(n, count))


def most_bytes(n: int, count: int) -> int:
    """The longest code of any `count` indices below n."""
    if count == 0:
        return 0
    k = rice_parameter(n, count)
    return bytes_for((n >> k) + count) + remainder_bytes(n, count)


def encode_indices(indices: Indices, n: int) -> bytes:
    """Code of strictly increasing indices below n."""
    if indices.size == 0:
        return b""
    if indices[0] < 0 or indices[-1] >= n:
        raise BallotError(
            "index", f"indices run from {indices[0]} to {indices[-1]}; they must lie in 0..{n - 1}"
        )
    gaps = np.diff(indices, prepend=-1) - 1
    if gaps.min() < 0:
        raise BallotError("index", "indices must be sorted, each once")
    k = rice_parameter(n, indices.size)
    ends = np.cumsum((gaps >> k) + 1) - 1
    unary = np.zeros(ends[-1] + 1, np.uint8)
    unary[ends] = 1
    remainders = (gaps[:, None] >> np.arange(k)) & 1
    return _packed(unary) + _packed(remainders.astype(np.uint8).ravel())


def body_bytes(support: Tensor, n: int) -> Tensor:
    """Bytes of the sparse body of each row of support planes (rows, words), computed where they lie.

    That is the index code, as `encode_indices` would write it, and a sign for each index.
    """
    voted = unpack(support, n)
    count = voted.sum(-1)
    k = torch.log2((n // count.clamp_min(1)).double()).floor().long()
    places = torch.arange(n, device=support.device)
    last = torch.where(voted, places, -1).cummax(-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    quotients = torch.where(voted, (places - before - 1) >> k[:, None], 0).sum(-1)
    bits = torch.stack([quotients + count, count * k, count])
    return ((bits + 7) // 8).sum(0)


def decode_indices(code: Bytes, n: int, count: int) -> Indices:
    """The indices, or a BallotError: whatever is accepted encodes back to the same bytes."""
    if count == 0:
        return np.empty(0, np.int64)
    k, tail = rice_parameter(n, count), remainder_bytes(n, count)
    split = code.size - tail
    unary = np.unpackbits(code[:split], bitorder="little")
    ends = np.flatnonzero(unary)
    if ends.size != count or ends[-1] < unary.size - 8:
        raise BallotError("index", f"the index code holds {ends.size} indices, not the {count} declared")
    bits = np.unpackbits(code[split:], bitorder="little")
    if bits[count * k :].any():
        raise BallotError("padding", "padding bits of the index code are not zero")
    remainders = bits[: count * k].reshape(count, k).astype(np.int64) @ (1 << np.arange(k))
    quotients = np.diff(ends, prepend=-1) - 1
    indices: Indices = np.cumsum((quotients << k) + remainders + 1) - 1
    if indices[-1] >= n:
        raise BallotError("index", f"index {indices[-1]} is out of range; the layout has {n} coordinates")
    return indices


def _packed(bits: Bytes) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()
