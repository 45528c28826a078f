"""The message: a 64-byte header and exactly the bytes that the layout implies.

    magic 4s | version u8 | kind u8 | reason u8 | 0 u8 | run u64 | layout 16s | worker u64
    round u64 | count u64 | batch size u32 | CRC-32 of everything else u32            little-endian

    dense     count = N; the signs, ceil(N / 8) bytes, bit i of byte b is coordinate 8 b + i, 1 = positive
    abstain   count = votes; who voted, ceil(N / 8) bytes, then the signs, 0 where nobody voted
    sparse    count = votes; which coordinates (see sparse.py), then their signs, ceil(count / 8) bytes

A decision is the server's own ballot: same form, worker id SERVER. Parsing trusts nothing: every
length is checked against the layout before anything is allocated, every accepted message encodes
back to the same bytes, and everything else is a BallotError whose `reason` can be counted.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from signvote.core import sparse
from signvote.core.bits import (
    Bytes,
    bytes_for,
    count_ones,
    plane_from_bytes,
    plane_to_bytes,
)
from signvote.core.layout import Layout
from signvote.errors import BallotError
from signvote.kernels import Planes

MAGIC, VERSION = b"SVOT", 1
HEADER = struct.Struct("<4s4BQ16s3Q2I")
NON_FINITE = 1
REASONS = {0: "", NON_FINITE: "non-finite gradient"}  # why a worker abstains for a whole round


class Kind(IntEnum):
    """How a ballot's body is written."""

    DENSE = 0
    ABSTAIN = 1
    SPARSE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Ballot:
    """One worker's signs of one round, or the server's decision. Arrays may be views: do not write."""

    layout: Layout
    worker: int
    round: int
    run: int
    kind: Kind
    signs: Bytes  # packed, ceil(N / 8) bytes; 0 where there is no vote
    support: Bytes | None = None  # packed likewise, 1 = voted; None: dense
    batch_size: int = 0  # 0: not declared
    reason: int = 0  # key of REASONS; not 0 only if nothing was voted

    @classmethod
    def cast(
        cls, layout: Layout, planes: Planes, *, worker: int, round: int, run: int, **rest: int
    ) -> Ballot:
        """A ballot of these planes, dense or abstaining, whichever they need."""
        signs = plane_to_bytes(planes.signs, layout.size)
        support = None if planes.support is None else plane_to_bytes(planes.support, layout.size)
        if support is not None and count_ones(support) == layout.size:
            support = None
        kind = Kind.DENSE if support is None else Kind.ABSTAIN
        who = {"worker": worker, "round": round, "run": run, **rest}
        return cls(layout=layout, kind=kind, signs=signs, support=support, **who)

    def thinned(self) -> Ballot:
        """The same votes, written as sparse."""
        everywhere = np.packbits(np.ones(self.layout.size, np.uint8), bitorder="little")
        support = everywhere if self.support is None else self.support
        return replace(self, kind=Kind.SPARSE, support=support)

    @property
    def count(self) -> int:
        """How many coordinates this ballot votes on."""
        return self.layout.size if self.support is None else count_ones(self.support)

    def planes(self) -> Planes:
        """The votes as word planes: a copy."""
        n = self.layout.size
        support = None if self.support is None else plane_from_bytes(self.support, n)
        return Planes(plane_from_bytes(self.signs, n), support)

    def to_bytes(self) -> bytes:
        """The message."""
        body = self._body()
        fields = (
            MAGIC, VERSION, self.kind, self.reason, 0, self.run, self.layout.digest,
            self.worker, self.round, self.count, self.batch_size,
        )  # fmt: skip
        checksum = zlib.crc32(body, zlib.crc32(HEADER.pack(*fields, 0)))
        return HEADER.pack(*fields, checksum) + body

    def _body(self) -> bytes:
        if self.support is None:
            return self.signs.tobytes()
        if self.kind is Kind.ABSTAIN:
            return self.support.tobytes() + self.signs.tobytes()
        indices = np.flatnonzero(_unpacked(self.support))
        signs = np.packbits(_unpacked(self.signs)[indices], bitorder="little")
        return sparse.encode_indices(indices, self.layout.size) + signs.tobytes()


def parse(
    message: bytes, *, layout: Layout, run: int, round: int | None = None, worker: int | None = None
) -> Ballot:
    """The ballot that a message holds, or a BallotError.

    Args:
        message: untrusted bytes.
        layout: of our model; another digest is refused.
        run: our run's number; a ballot of another run is refused.
        round: the round being decided; earlier ones are late, later ones from the future. None: any.
        worker: who sent it, as the transport knows; None: whoever the header names.

    """
    if not isinstance(message, bytes):
        raise BallotError("type", f"a ballot is bytes, not {type(message).__name__}")
    if len(message) < HEADER.size:
        raise BallotError("length", f"{len(message)} bytes are no ballot; a header alone has {HEADER.size}")
    (magic, version, kind, reason, zero, its_run, digest, its_worker, its_round,
     count, batch_size, checksum) = HEADER.unpack_from(message)  # fmt: skip
    if magic != MAGIC:
        raise BallotError("magic", f"not a ballot: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise BallotError("version", f"ballot of version {version}; this program reads version {VERSION}")
    if kind not in list(Kind) or reason not in REASONS or zero:
        raise BallotError("kind", f"unknown kind {kind}, reason {reason} or reserved byte {zero}")
    if digest != layout.digest:
        raise BallotError(
            "layout",
            f"ballot for layout {digest.hex()[:8]}, not ours, {layout.digest.hex()[:8]}: another model",
        )
    if its_run != run:
        raise BallotError("run", f"ballot of run {its_run}; this is run {run}")
    if round is not None and its_round != round:
        reason_word = "late" if its_round < round else "future"
        raise BallotError(reason_word, f"ballot for round {its_round}; this is round {round}")
    if worker is not None and its_worker != worker:
        raise BallotError("worker", f"worker {worker} sent a ballot in the name of {its_worker}")
    _check_size(Kind(kind), layout.size, count, len(message) - HEADER.size, reason)
    body = memoryview(message)[HEADER.size :]
    if zlib.crc32(body, zlib.crc32(bytes(4), zlib.crc32(message[: HEADER.size - 4]))) != checksum:
        raise BallotError("checksum", "checksum mismatch: the ballot was damaged on its way")
    signs, support = _read_body(Kind(kind), np.frombuffer(body, np.uint8), layout.size, count)
    return Ballot(
        layout=layout, worker=its_worker, round=its_round, run=its_run, kind=Kind(kind),
        signs=signs, support=support, batch_size=batch_size, reason=reason,
    )  # fmt: skip


def _check_size(kind: Kind, n: int, count: int, size: int, reason: int) -> None:
    """Compare the body's size and count with the layout: before anything is allocated."""
    if count > n or (kind is Kind.DENSE and count != n):
        raise BallotError(
            "count", f"{kind.name.lower()} ballot of {count} votes; the layout has {n} coordinates"
        )
    if reason and (kind is not Kind.SPARSE or count):
        raise BallotError("kind", f"a worker that abstains ({REASONS[reason]}) cannot vote")
    if kind is not Kind.SPARSE:
        least = most = bytes_for(n) * (1 + kind)
    else:
        code = sparse.most_bytes(n, count)
        most = code + bytes_for(count)
        least = sparse.remainder_bytes(n, count) + bytes_for(count) * 2 if count else 0
    if not least <= size <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        raise BallotError("length", f"{kind.name.lower()} body of {size} bytes; wanted {wanted}")


def _read_body(kind: Kind, body: Bytes, n: int, count: int) -> tuple[Bytes, Bytes | None]:
    """(signs, support), packed; refuses what no encoder writes."""
    if kind is Kind.DENSE:
        _check_padding(body, n)
        return body, None
    if kind is Kind.ABSTAIN:
        support, signs = body[: bytes_for(n)], body[bytes_for(n) :]
        _check_padding(support, n)
        if count_ones(support) != count:
            raise BallotError("count", f"{count_ones(support)} votes in the ballot, {count} in its header")
        if np.any(signs & ~support):
            raise BallotError("padding", "signs are set where there is no vote")
        return signs, support
    split = body.size - bytes_for(count)
    indices = sparse.decode_indices(body[:split], n, count)
    _check_padding(body[split:], count)
    return _scatter(indices, np.unpackbits(body[split:], count=count, bitorder="little"), n), _scatter(
        indices, np.ones(count, np.uint8), n
    )


def _check_padding(packed: Bytes, n: int) -> None:
    if n % 8 and packed[-1] >> (n % 8):
        raise BallotError("padding", "padding bits are not zero")


def _unpacked(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, bitorder="little")


def _scatter(indices: sparse.Indices, bits: Bytes, n: int) -> Bytes:
    plane = np.zeros(n, np.uint8)
    plane[indices] = bits
    return np.packbits(plane, bitorder="little")
