"""Messages between the servers of a tree: a header, and arrays of known types. No pickle; nothing is trusted.

    magic 4s | version u8 | form u8 | 0 u16 | run u64 | layout 16s | round u64 | count u64
    CRC-32 of everything else u32 | for each array its length in bytes, u64, and its bytes          little-endian

`Form` names the messages, and `ARRAYS` the arrays of each. `count` is the number of workers in the message,
or of planes in a tally. A message that is damaged, of another run, layout or round, or of a length that the
header does not imply is refused with a BallotError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from signvote.core.layout import Layout
from signvote.errors import BallotError

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"SVTR"
VERSION = 1
HEADER = struct.Struct("<4s2BHQ16s2QI")
LENGTH = struct.Struct("<Q")


class Form(IntEnum):
    """What a message is."""

    TALLY = 0  # a partial tally: see tally.py
    ROLL = 1  # up: the workers whose ballots are in
    WEIGHTS = 2  # down: the weights of these workers
    PARTIAL = 3  # up: which of them are counted, and their tally
    VERDICT = 4  # down: the decision, and what votes are compared with
    EVIDENCE = 5  # up: what the vote shows about the workers


ARRAYS: dict[Form, tuple[str, ...]] = {
    Form.TALLY: ("<u8", "u1", "u1"),  # bounds, lowest digit, planes
    Form.ROLL: ("<u8", "<u4", "u1", "i1", "<u8", "u1", "u1"),  # see messages.py
    Form.WEIGHTS: ("<u8", "<i4"),  # workers, weights
    Form.PARTIAL: ("<u8", "u1"),  # workers, tally
    Form.VERDICT: ("u1", "u1", "u1"),  # decision, ties, signs that votes are compared with
    Form.EVIDENCE: (
        "<u8",
        "<i8",
        "<i8",
        "<u8",
        "u1",
        "u1",
    ),  # workers, mismatches, cast; the sample: n, signs, support
}


class Topic(NamedTuple):
    """What the messages of one round share."""

    layout: Layout
    run: int
    round: int


def seal(form: Form, topic: Topic, count: int, *arrays: Array) -> bytes:
    """The message with these arrays."""
    types = ARRAYS[form]
    parts = []
    for array, kind in zip(arrays, types, strict=True):
        part = np.ascontiguousarray(array, kind).tobytes()
        length = LENGTH.pack(len(part))
        parts += [length, part]
    body = b"".join(parts)
    checksum = _checksum(form, topic, count, body)
    return _header(form, topic, count, checksum) + body


def unseal(form: Form, topic: Topic, message: bytes) -> tuple[int, list[Array]]:
    """The count and the arrays of a message, or a BallotError."""
    name = form.name.lower()
    if not isinstance(message, bytes):
        raise BallotError("type", f"a {name} is bytes, not {type(message).__name__}")
    if len(message) < HEADER.size:
        raise BallotError("length", f"{len(message)} bytes are no {name}; a header alone has {HEADER.size}")
    count, checksum = HEADER.unpack_from(message)[-2:]
    expected = _header(form, topic, count, checksum)
    if message[: HEADER.size] != expected:
        raise BallotError("header", f"not a {name} of this run, layout and round")
    body = message[HEADER.size :]
    if _checksum(form, topic, count, body) != checksum:
        raise BallotError("checksum", f"checksum mismatch: the {name} was damaged on its way")
    return count, list(_arrays(name, ARRAYS[form], body))


def form_of(message: bytes) -> Form | None:
    """What a message is, as far as its header says; None: nothing known."""
    if len(message) < HEADER.size or message[:4] != MAGIC:
        return None
    number = message[5]
    return Form(number) if number in list(Form) else None


def _header(form: Form, topic: Topic, count: int, checksum: int) -> bytes:
    layout, run, round = topic
    return HEADER.pack(MAGIC, VERSION, form, 0, run, layout.digest, round, count, checksum)


def _checksum(form: Form, topic: Topic, count: int, body: bytes) -> int:
    header = _header(form, topic, count, 0)
    return zlib.crc32(body, zlib.crc32(header))


def _arrays(name: str, types: tuple[str, ...], body: bytes) -> Iterator[Array]:
    """The arrays of a body, which has these and nothing else."""
    at = 0
    for kind in types:
        start = at + LENGTH.size
        size = LENGTH.unpack_from(body, at)[0] if start <= len(body) else -1
        itemsize = np.dtype(kind).itemsize
        if not 0 <= size <= len(body) - start or size % itemsize:
            raise BallotError("length", f"the arrays of the {name} do not fill it")
        yield np.frombuffer(body, kind, size // itemsize, start)
        at = start + size
    if at != len(body):
        raise BallotError("length", f"the {name} has {len(body) - at} bytes too many")
