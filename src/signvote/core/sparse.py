"""The body of a sparse ballot: which coordinates are voted on, in nearly as few bits as possible, and their signs.

The coordinates are Golomb-Rice codes of the gaps between neighboring indices. Each gap is written as quotient and
remainder by 2^k. All quotients form one bit stream, in unary, and all remainders another, k bits each. The signs are a
third one. k follows from the density alone. At 1 % and 10 % density a ballot costs less than 2 % more than its entropy.
Order and uniqueness need no check on the wire: a gap cannot be negative, so the code cannot express unsorted or
repeated indices.

A sparse ballot that could be longer than the same votes in another form is neither written nor read: see `pays`. Both
ways work on a block of bits at a time, so the memory that they need beside their result does not depend on the ballot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signvote.core.bits import Bytes, bytes_for, count_ones
from signvote.errors import BallotError
from signvote.kernels.reference import unpack

Indices = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_BYTES = 2**13  # of packed bits that are unpacked at a time


def rice_parameter(n: int, count: int) -> int:
    """Bits of a remainder, k = floor(log2(n / count)), at `count` indices below n."""
    return (n // count).bit_length() - 1


def remainder_bytes(n: int, count: int) -> int:
    """Bytes that the remainders fill."""
    return bytes_for(count * rice_parameter(n, count))


def most_unary_bits(n: int, count: int) -> int:
    """The longest unary stream: all gaps together are n - count at most."""
    return ((n - count) >> rice_parameter(n, count)) + count


def most_bytes(n: int, count: int) -> int:
    """The longest body of any `count` votes on n coordinates."""
    if count == 0:
        return 0
    unary = bytes_for(most_unary_bits(n, count))
    return unary + remainder_bytes(n, count) + bytes_for(count)


def least_bytes(n: int, count: int) -> int:
    """The shortest one: a quotient of 0 is one bit."""
    if count == 0:
        return 0
    return bytes_for(count) + remainder_bytes(n, count) + bytes_for(count)


def pays(n: int, count: int) -> bool:
    """Whether `count` votes on n coordinates may be sparse: no such body is longer than in the other form.

    That form is dense if all coordinates are voted on, and abstaining otherwise.

    >>> pays(1000, 10), pays(1000, 999), pays(1000, 1000)
    (True, True, False)
    """
    planes = 1 if count == n else 2
    return most_bytes(n, count) <= planes * bytes_for(n)


def encode_body(signs: Bytes, support: Bytes, n: int) -> bytes:
    """The body with these votes. Bits of `support` beyond n must be zero."""
    count = count_ones(support)
    if count == 0:
        return b""
    return _encoded(support, n, count) + _gathered(signs, support)


def _encoded(support: Bytes, n: int, count: int) -> bytes:
    """The code of the indices at which `support` has its ones."""
    k = rice_parameter(n, count)
    if k == 0:
        return support.tobytes().rstrip(b"\0")  # a gap in unary is as many zeros, and a one
    unary_bytes = bytes_for(most_unary_bits(n, count))
    unary = np.zeros(unary_bytes, np.uint8)
    remainders = np.zeros(remainder_bytes(n, count), np.uint8)
    done = 0
    last_index = -1
    last_end = -1
    for indices in _ones(support):
        gaps = np.diff(indices, prepend=last_index) - 1
        quotients = gaps >> k
        ends = np.cumsum(quotients + 1) + last_end
        places = np.arange(done, done + indices.size)
        first_bits = places * k
        _set_(unary, ends)
        for bit in range(k):
            is_set = (gaps >> bit) & 1 == 1
            _set_(remainders, first_bits[is_set] + bit)
        done += indices.size
        last_index = int(indices[-1])
        last_end = int(ends[-1])
    used = bytes_for(last_end + 1)
    return unary[:used].tobytes() + remainders.tobytes()


def decode_body(body: Bytes, n: int, count: int) -> tuple[Bytes, Bytes]:
    """(signs, support), packed, or a BallotError. An accepted body encodes back to the same bytes.

    Args:
        body: of a length from `least_bytes` to `most_bytes`.
        n: coordinates of the layout.
        count: votes, as the header declares them.

    """
    support = np.zeros(bytes_for(n), np.uint8)
    if count == 0:
        return support, support
    split = body.size - bytes_for(count)
    code = body[:split]
    packed = body[split:]
    check_padding(packed, count)
    k = rice_parameter(n, count)
    if k == 0:
        _check_unary(code, count)
        support[: code.size] = code
        check_padding(support, n, "index", f"an index is out of range; the layout has {n} coordinates")
        return _spread(packed, support), support
    signs = np.zeros(bytes_for(n), np.uint8)
    done = 0
    for indices in _decoded(code, n, count):
        bits = _unpacked(packed, done, indices.size)
        _set_(support, indices)
        _set_(signs, indices[bits == 1])
        done += indices.size
    return signs, support


def _decoded(code: Bytes, n: int, count: int) -> Iterator[Indices]:
    """The indices in a code, block by block."""
    k = rice_parameter(n, count)
    split = code.size - remainder_bytes(n, count)
    unary = code[:split]
    remainders = code[split:]
    _check_unary(unary, count)
    check_padding(remainders, count * k, "padding", "padding bits of the index code are not zero")
    done = 0
    last_index = -1
    last_end = -1
    for ends in _ones(unary):
        quotients = np.diff(ends, prepend=last_end) - 1
        rests = _numbers(remainders, k, done, ends.size)
        gaps = (quotients << k) + rests
        indices: Indices = np.cumsum(gaps + 1) + last_index
        done += ends.size
        last_index = int(indices[-1])
        last_end = int(ends[-1])
        if last_index >= n:
            raise BallotError("index", f"index {last_index} is out of range; the layout has {n} coordinates")
        yield indices


def _check_unary(unary: Bytes, count: int) -> None:
    """Each index ends with a one, and the last one lies in the last byte."""
    found = count_ones(unary)
    if found != count or not unary[-1]:
        raise BallotError("index", f"the index code holds {found} indices, not the {count} declared")


def _numbers(packed: Bytes, k: int, first: int, size: int) -> Indices:
    """Numbers of k bits each, from number `first` on."""
    bits = _unpacked(packed, first * k, size * k)
    columns = bits.reshape(size, k).T
    numbers: Indices = np.zeros(size, np.int64)
    for bit, column in enumerate(columns):
        numbers |= column.astype(np.int64) << bit
    return numbers


def _gathered(signs: Bytes, support: Bytes) -> bytes:
    """The signs where `support` has a one, packed without the others."""
    pieces = []
    left = np.empty(0, np.uint8)  # fewer than 8 bits, which do not fill a byte yet
    for first in range(0, support.size, BLOCK_BYTES):
        block = slice(first, first + BLOCK_BYTES)
        voted = _bits(support[block]).view(bool)
        bits = _bits(signs[block])
        known = np.concatenate([left, bits[voted]])
        whole = known.size // 8 * 8
        pieces.append(_packed(known[:whole]))
        left = known[whole:]
    pieces.append(_packed(left))
    return b"".join(pieces)


def _spread(packed: Bytes, support: Bytes) -> Bytes:
    """The inverse of `_gathered`: the signs as a plane, 0 where there is no vote."""
    signs = np.zeros_like(support)
    done = 0
    for first in range(0, support.size, BLOCK_BYTES):
        block = slice(first, first + BLOCK_BYTES)
        voted = _bits(support[block]).view(bool)
        votes = int(np.count_nonzero(voted))
        bits = np.zeros(voted.size, np.uint8)
        bits[voted] = _unpacked(packed, done, votes)
        signs[block] = np.packbits(bits, bitorder="little")
        done += votes
    return signs


def check_padding(
    packed: Bytes,
    n: int,
    reason: str = "padding",
    message: str = "padding bits are not zero",
) -> None:
    """Refuse packed bits of which one beyond the first n is set."""
    used = n % 8  # bits of the last byte; 0: all
    if used and packed[-1] >> used:
        raise BallotError(reason, message)


def _ones(packed: Bytes) -> Iterator[Indices]:
    """Where the ones are, in order: an array for each block that has any."""
    for first in range(0, packed.size, BLOCK_BYTES):
        block = packed[first : first + BLOCK_BYTES]
        places: Indices = np.flatnonzero(_bits(block))
        if places.size:
            yield places + 8 * first


def _unpacked(packed: Bytes, first: int, size: int) -> Bytes:
    """`size` bits from bit `first` on, a byte each."""
    start, skipped = divmod(first, 8)
    stop = bytes_for(first + size)
    bits = _bits(packed[start:stop])
    return bits[skipped : skipped + size]


def _bits(packed: Bytes) -> Bytes:
    """A byte for each bit."""
    return np.unpackbits(packed, bitorder="little")


def _packed(bits: Bytes) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def _set_(packed: Bytes, places: Indices) -> None:
    """Set the bits at these sorted places, each once."""
    if not places.size:
        return
    values = np.left_shift(1, places & 7).astype(np.uint8)
    where = places >> 3
    is_new = np.diff(where, prepend=-1)
    starts = np.flatnonzero(is_new)
    touched = where[starts]
    packed[touched] |= np.bitwise_or.reduceat(values, starts)


def body_bytes(support: Tensor, n: int) -> Tensor:
    """Bytes of the body of each row of support planes (rows, words), computed on their device.

    That is the sparse body, as `encode_body` would write it, or where that does not pay the other form.
    """
    voted = unpack(support, n)
    count = voted.sum(-1)
    spacing = n // count.clamp_min(1)
    k = torch.log2(spacing.double()).floor().long()
    gaps = _gaps(voted)
    quotients = torch.where(voted, gaps >> k[:, None], 0)
    unary_bits = quotients.sum(-1) + count
    most_quotients = (n - count) >> k
    most_bits = torch.where(count > 0, most_quotients + count, 0)
    remainders = _whole_bytes(count * k)
    signs = _whole_bytes(count)
    others = remainders + signs
    planes = torch.where(count == n, 1, 2)
    other_form = planes * bytes_for(n)
    longest = _whole_bytes(most_bits) + others
    sparse = _whole_bytes(unary_bits) + others
    return torch.where(longest <= other_form, sparse, other_form)


def _gaps(voted: Tensor) -> Tensor:
    """For each coordinate those between it and the last vote before, in each row."""
    places = torch.arange(voted.shape[-1], device=voted.device)
    marked = torch.where(voted, places, -1)
    last = marked.cummax(-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    return places - before - 1


def _whole_bytes(bits: Tensor) -> Tensor:
    return (bits + 7) // 8
