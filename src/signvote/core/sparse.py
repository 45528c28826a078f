"""Sorted index sets in nearly as few bits as possible: Golomb-Rice codes of the gaps.

Each gap between neighboring indices is written as quotient and remainder by 2^k. All quotients form one bit stream, in
unary, and all remainders another, k bits each, so encoding and decoding are a few array operations. k follows from the
density alone. At 1 % and 10 % density a ballot costs less than 2 % more than its entropy. Order and uniqueness need no
check on the wire: a gap cannot be negative, so the code cannot express unsorted or repeated indices.
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
    unary_bits = (n >> k) + count
    return bytes_for(unary_bits) + remainder_bytes(n, count)


def encode_indices(indices: Indices, n: int) -> bytes:
    """Code of strictly increasing indices below n."""
    if indices.size == 0:
        return b""
    first = indices[0]
    last = indices[-1]
    if first < 0 or last >= n:
        raise BallotError("index", f"indices run from {first} to {last}; they must lie in 0..{n - 1}")
    gaps = np.diff(indices, prepend=-1) - 1
    if gaps.min() < 0:
        raise BallotError("index", "indices must be sorted, each once")
    k = rice_parameter(n, indices.size)
    quotients = gaps >> k
    ends = np.cumsum(quotients + 1) - 1
    unary = np.zeros(ends[-1] + 1, np.uint8)
    unary[ends] = 1
    remainders = (gaps[:, None] >> np.arange(k)) & 1
    bits = remainders.astype(np.uint8).ravel()
    return _packed(unary) + _packed(bits)


def body_bytes(support: Tensor, n: int) -> Tensor:
    """Bytes of the sparse body of each row of support planes (rows, words), computed on their device.

    That is the index code, as `encode_indices` would write it, and a sign for each index.
    """
    voted = unpack(support, n)
    count = voted.sum(-1)
    spacing = n // count.clamp_min(1)
    k = torch.log2(spacing.double()).floor().long()
    places = torch.arange(n, device=support.device)
    last = torch.where(voted, places, -1).cummax(-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    gaps = places - before - 1
    quotients = torch.where(voted, gaps >> k[:, None], 0)
    unary_bits = quotients.sum(-1) + count
    remainder_bits = count * k
    bits = torch.stack([unary_bits, remainder_bits, count])
    each = (bits + 7) // 8
    return each.sum(0)


def decode_indices(code: Bytes, n: int, count: int) -> Indices:
    """The indices, or a BallotError. An accepted code encodes back to the same bytes."""
    if count == 0:
        return np.empty(0, np.int64)
    k = rice_parameter(n, count)
    split = code.size - remainder_bytes(n, count)
    unary = np.unpackbits(code[:split], bitorder="little")
    ends = np.flatnonzero(unary)
    if ends.size != count or ends[-1] < unary.size - 8:
        raise BallotError("index", f"the index code holds {ends.size} indices, not the {count} declared")
    bits = np.unpackbits(code[split:], bitorder="little")
    used = count * k
    if bits[used:].any():
        raise BallotError("padding", "padding bits of the index code are not zero")
    remainder_bits = bits[:used].reshape(count, k).astype(np.int64)
    remainders = remainder_bits @ (1 << np.arange(k))
    quotients = np.diff(ends, prepend=-1) - 1
    gaps = (quotients << k) + remainders
    indices: Indices = np.cumsum(gaps + 1) - 1
    if indices[-1] >= n:
        raise BallotError("index", f"index {indices[-1]} is out of range; the layout has {n} coordinates")
    return indices


def _packed(bits: Bytes) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()
