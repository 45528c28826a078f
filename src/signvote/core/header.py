"""The header of a ballot: what it must say before anything behind it is read. ballot.py has the message as a whole."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from signvote.core import sparse
from signvote.core.bits import bytes_for
from signvote.core.layout import Layout
from signvote.errors import BallotError

MAGIC = b"SVOT"
VERSION = 1
HEADER = struct.Struct("<4s4BQ16s3Q2I")
NON_FINITE = 1
NO_GRADIENT = 2
REASONS = {
    0: "",
    NON_FINITE: "non-finite gradient",
    NO_GRADIENT: "no gradient",
}  # why a worker abstains for a whole round


class Kind(IntEnum):
    """The form of a ballot's body."""

    DENSE = 0
    ABSTAIN = 1
    SPARSE = 2
    CORRECT = 3
    SCALED = 4


KINDS = frozenset(Kind)
CLAIMING = (Kind.CORRECT, Kind.SCALED)  # forms with a byte for each tensor
WHOLE = (Kind.DENSE, *CLAIMING)  # forms that vote on every coordinate


def understood(*, corrects: bool, scales: bool) -> tuple[Kind, ...]:
    """The forms that a rule understands: corrections only, scaled votes only, or any without claims."""
    if corrects:
        return (Kind.CORRECT,)
    if scales:
        return (Kind.SCALED,)
    return tuple(kind for kind in Kind if kind not in CLAIMING)


class Fields(NamedTuple):
    """The fields of the header, in order."""

    magic: bytes
    version: int
    kind: int
    reason: int
    reserved: int  # 0
    run: int
    layout: bytes  # digest
    worker: int
    round: int
    votes: int  # `count`: a tuple has a method of that name
    batch_size: int
    checksum: int


def read_header(message: memoryview) -> Fields:
    """The header's fields. Refuses a message that is no ballot of this version."""
    if len(message) < HEADER.size:
        raise BallotError("length", f"{len(message)} bytes are no ballot; a header alone has {HEADER.size}")
    fields = Fields(*HEADER.unpack_from(message))
    if fields.magic != MAGIC:
        raise BallotError("magic", f"not a ballot: it starts with {fields.magic!r}, not {MAGIC!r}")
    if fields.version != VERSION:
        raise BallotError(
            "version",
            f"ballot of version {fields.version}; this program reads version {VERSION}",
        )
    if fields.kind not in KINDS or fields.reason not in REASONS or fields.reserved:
        raise BallotError(
            "kind",
            f"unknown kind {fields.kind}, reason {fields.reason} or reserved byte {fields.reserved}",
        )
    return fields


def check_identity(
    fields: Fields,
    layout: Layout,
    run: int,
    round: int | None,
    worker: int | None,
) -> None:
    """Refuse a ballot of another layout, run, round or worker; see `parse`."""
    if fields.layout != layout.digest:
        theirs = fields.layout.hex()[:8]
        ours = layout.digest.hex()[:8]
        raise BallotError("layout", f"ballot for layout {theirs}, not ours, {ours}: another model")
    if fields.run != run:
        raise BallotError("run", f"ballot of run {fields.run}; this is run {run}")
    if round is not None and fields.round != round:
        reason = "late" if fields.round < round else "future"
        raise BallotError(reason, f"ballot for round {fields.round}; this is round {round}")
    if worker is not None and fields.worker != worker:
        raise BallotError("worker", f"worker {worker} sent a ballot in the name of {fields.worker}")


def check_size(
    kind: Kind,
    n: int,
    count: int,
    size: int,
    reason: int,
) -> None:
    """Compare the body's size and count with the layout, before any memory is allocated."""
    if count > n or (kind in WHOLE and count != n):
        raise BallotError(
            "count", f"{kind.name.lower()} ballot of {count} votes; the layout has {n} coordinates"
        )
    if reason and (kind is not Kind.SPARSE or count):
        raise BallotError("kind", f"a worker that abstains ({REASONS[reason]}) cannot vote")
    if kind is not Kind.SPARSE:
        least = most = bytes_for(n) * (1 if kind in WHOLE else 2)
    elif sparse.pays(n, count):
        least = sparse.least_bytes(n, count)
        most = sparse.most_bytes(n, count)
    else:
        raise BallotError(
            "count", f"sparse ballot of {count} votes on {n} coordinates; another form is shorter"
        )
    if not least <= size <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        raise BallotError("length", f"{kind.name.lower()} body of {size} bytes; wanted {wanted}")
