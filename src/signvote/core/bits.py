"""Signs and packed bits: one bit per coordinate, and what a zero does.

A zero has no sign. Under `zeros="coin"` it gets a fair bit that is a pure function of (run, round, worker, coordinate),
so that one bit per coordinate suffices and nothing drifts. Under `zeros="abstain"` it gets no vote, and a second plane,
the support, marks the votes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from signvote.errors import ConfigError
from signvote.kernels import Coin, Coins, Planes, backend, reference, words_for

Zeros = Literal["coin", "abstain"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SERVER = 2**64 - 1  # the server's own worker id: it signs decisions, and its coin breaks ties
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BLOCK = 2**16  # bytes
_ONES = 2**64 - 1


def check_zeros(zeros: str) -> None:
    """Raise unless `zeros` names a zero rule."""
    if zeros not in ("coin", "abstain"):
        raise ConfigError(f"zeros is {zeros!r}; it must be 'coin' or 'abstain'")


def check_number(name: str, value: int) -> None:
    """Raise unless the value fits the header's 64 bits."""
    if not 0 <= value < 2**64:
        raise ConfigError(f"{name} is {value}; it must lie in 0..2^64-1")


def coin_for(zeros: Zeros, run: int, round: int, worker: int = SERVER) -> Coin | None:
    """The coin that one worker tosses in one round, or None where zeros abstain.

    >>> coin_for("coin", 7, 1, worker=3) == coin_for("coin", 7, 1, worker=3)
    True
    >>> coin_for("coin", 7, 1, worker=3) == coin_for("coin", 7, 2, worker=3)
    False
    """
    if zeros == "abstain":
        return None
    key = 0
    for part in (run, round, worker):
        key = _mix((key + part + reference.WEYL) & _ONES)
    return Coin(key)


def _mix(z: int) -> int:
    """splitmix64's finalizer: every bit of z reaches every bit of the result."""
    for by, factor in reference.MIX:
        z ^= z >> by
        z = (z * factor) & _ONES
    return z ^ (z >> 31)


def pack_signs(x: Tensor, coin: Coin | None) -> tuple[Planes, bool | Tensor]:
    """Signs of a float tensor of any shape and stride, and whether all of it is finite.

    Args:
        x: float32, float64, float16 or bfloat16; read in row-major order, never changed.
        coin: decides zeros; None: zeros abstain.

    >>> planes, finite = pack_signs(torch.tensor([0.5, -2.0, 0.0]), coin=None)
    >>> unpack_signs(planes, 3).tolist(), finite
    ([1, -1, 0], True)

    """
    flat = x.detach().contiguous().view(-1)
    return sign_planes(flat, coin)


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
    """The same for a contiguous vector, or for each row of a matrix, which needs a coin for each row."""
    if x.dtype not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise ConfigError(f"signs of {x.dtype} are not defined; wanted one of {names}")
    return backend(x.device).sign_planes(x, coin)


def unpack_signs(planes: Planes, n: int) -> Tensor:
    """The first n signs as int8: +1, -1, or 0 where there is none. Leading dimensions stay."""
    unpack = backend(planes.signs.device).unpack
    signs = 2 * unpack(planes.signs, n).to(torch.int8) - 1
    if planes.support is None:
        return signs
    return signs * unpack(planes.support, n)


def bytes_for(n: int) -> int:
    """Bytes that n bits fill."""
    return -(-n // 8)


def plane_to_bytes(plane: Tensor, n: int) -> Bytes:
    """A view of the ceil(n / 8) bytes of a plane on the CPU; bit i of byte b is coordinate 8 b + i."""
    packed = plane.numpy().view(np.uint8)
    return packed[: bytes_for(n)]


def plane_from_bytes(packed: Bytes, n: int) -> Tensor:
    """A plane with a copy of these bits, padded with zeros to whole words."""
    plane = torch.zeros(words_for(n), dtype=torch.int64)
    view = plane_to_bytes(plane, n)
    view[:] = packed
    return plane


def blocks(*packed: Bytes) -> Iterator[tuple[Bytes, ...]]:
    """The same bytes of each, BLOCK at a time: what is computed from them needs little memory."""
    for start in range(0, packed[0].size, BLOCK):
        yield tuple(each[start : start + BLOCK] for each in packed)


def count_ones(packed: Bytes) -> int:
    """Number of ones in packed bits."""
    ones = 0
    for (block,) in blocks(packed):
        by_byte = np.bitwise_count(block)
        ones += int(by_byte.sum(dtype=np.int64))
    return ones
