"""Damage to files: what disks, cables and cut copies do to bytes."""

from __future__ import annotations

import random
from pathlib import Path


def rewrite(path: Path, data: bytes) -> None:
    """A new file under the old name: tensors that were loaded before may lie in the old one."""
    path.unlink()
    path.write_bytes(data)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The data with one random fault; never the data itself."""
    kinds = (_flip, _flip, _flip, _cut, _overwrite, _swap, _append)  # single bits are the hardest to notice
    while True:
        found = chance.choice(kinds)(bytearray(data), chance)
        if found != data:
            return bytes(found)


def _flip(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def _cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def _overwrite(data: bytearray, chance: random.Random) -> bytearray:
    """A run of zeros or of noise, as from a block that was never written."""
    start = chance.randrange(len(data))
    size = min(chance.choice((1, 8, 512)), len(data) - start)
    data[start : start + size] = chance.choice((bytes(size), chance.randbytes(size)))
    return data


def _swap(data: bytearray, chance: random.Random) -> bytearray:
    """Two blocks change places."""
    size = min(16, len(data) // 2)
    a = chance.randrange(len(data) - size + 1)
    b = chance.randrange(len(data) - size + 1)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return data


def _append(data: bytearray, chance: random.Random) -> bytearray:
    return data + chance.randbytes(chance.randrange(1, 64))
