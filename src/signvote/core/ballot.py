"""The message: a 64-byte header and exactly the bytes that the layout implies.

    magic 4s | version u8 | kind u8 | reason u8 | 0 u8 | run u64 | layout 16s | worker u64
    round u64 | count u64 | batch size u32 | CRC-32 of everything else u32            little-endian

    dense     count = N; the signs, ceil(N / 8) bytes, bit i of byte b is coordinate 8 b + i, 1 = positive
    abstain   count = votes; who voted, ceil(N / 8) bytes, then the signs, 0 where nobody voted
    correct   count = N; the signs, then one signed byte for each tensor (see corrections.py). In a decision, the ids of
              the workers that were counted follow, u64 each; the field of the batch size has their number
    scaled    the same, and the bytes are scales (see scales.py). A decision has a second byte for each tensor: the
              limit of the scales that were counted (see scaled.py)
    sparse    count = votes; which coordinates (see sparse.py), then their signs, ceil(count / 8) bytes; only
              where that is not longer than the forms above

A decision is the server's own ballot: same form, worker id SERVER. Parsing trusts nothing. It checks every length
against the layout before it allocates memory, and whatever the form, it allocates at most two planes and a few
megabytes. Every accepted message encodes back to the same bytes. Every other message raises a BallotError, whose
`reason` can be counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signvote.core import sparse
from signvote.core.bits import (
    SERVER,
    Bytes,
    blocks,
    bytes_for,
    count_ones,
    plane_from_bytes,
    plane_to_bytes,
)
from signvote.core.header import (
    CLAIMING,
    HEADER,
    MAGIC,
    NON_FINITE,
    VERSION,
    WHOLE,
    Fields,
    Kind,
    check_identity,
    check_size,
    read_header,
)
from signvote.core.layout import Layout
from signvote.errors import BallotError
from signvote.kernels import Planes

Claims = np.ndarray[Any, np.dtype[np.int8]]
Message = bytes | memoryview  # a memoryview, as of a mapped file, must not change while the ballot is in use


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
    claims: Claims | None = (
        None  # (tensors,) int8: exponents of a correction, codes of scales, or those decided
    )
    counted: tuple[int, ...] = ()  # workers that a decision with claims counts

    @classmethod
    def cast(
        cls,
        layout: Layout,
        planes: Planes,
        *,
        worker: int,
        round: int,
        run: int,
        batch_size: int = 0,
        claims: Claims | None = None,
        counted: tuple[int, ...] = (),
        scales: bool = False,
    ) -> Ballot:
        """A ballot of these planes: with claims a correction or scaled, else dense or, with gaps, abstaining."""
        support = None
        if planes.support is not None:
            support = plane_to_bytes(planes.support, layout.size)
            if count_ones(support) == layout.size:
                support = None
        return cls(
            layout=layout,
            worker=worker,
            round=round,
            run=run,
            kind=_kind(support, claims, scales),
            signs=plane_to_bytes(planes.signs, layout.size),
            support=support,
            batch_size=batch_size,
            claims=claims,
            counted=counted,
        )

    @classmethod
    def abstention(
        cls,
        layout: Layout,
        *,
        worker: int,
        round: int,
        run: int,
        batch_size: int,
    ) -> Ballot:
        """The ballot of a worker whose signal was not finite: a header alone."""
        nothing = np.zeros(bytes_for(layout.size), np.uint8)
        return cls(
            layout=layout,
            worker=worker,
            round=round,
            run=run,
            kind=Kind.SPARSE,
            signs=nothing,
            support=nothing,
            batch_size=batch_size,
            reason=NON_FINITE,
        )

    def thinned(self) -> Ballot:
        """The same votes, written as sparse, unless another form is shorter (`sparse.pays`)."""
        if self.support is None or not sparse.pays(self.layout.size, self.count):
            return self
        return replace(self, kind=Kind.SPARSE)

    @property
    def count(self) -> int:
        """How many coordinates this ballot votes on."""
        if self.support is None:
            return self.layout.size
        return count_ones(self.support)

    def planes(self, first: int = 0, n: int | None = None) -> Planes:
        """The votes on coordinates first to first + n as word planes: a copy. `first` must be a multiple of 8."""
        n = self.layout.size - first if n is None else n
        at = slice(first // 8, bytes_for(first + n))
        signs = plane_from_bytes(self.signs[at], n)
        if self.support is None:
            return Planes(signs, None)
        return Planes(signs, plane_from_bytes(self.support[at], n))

    def to_bytes(self) -> bytes:
        """The message: one copy of the votes."""
        return b"".join(self.buffers())

    def buffers(self) -> list[Message]:
        """The message in parts, without a copy of dense votes: `file.writelines(ballot.buffers())` writes it."""
        body = self._body()
        fields = Fields(
            magic=MAGIC,
            version=VERSION,
            kind=self.kind,
            reason=self.reason,
            reserved=0,
            run=self.run,
            layout=self.layout.digest,
            worker=self.worker,
            round=self.round,
            votes=self.count,
            batch_size=len(self.counted) or self.batch_size,
            checksum=0,
        )
        header = HEADER.pack(*fields)
        checksum = reduce(lambda crc, part: zlib.crc32(part, crc), body, zlib.crc32(header))
        signed = fields._replace(checksum=checksum)
        return [HEADER.pack(*signed), *body]

    def _body(self) -> list[Message]:
        signs = self.signs.data
        if self.claims is not None:
            ids = np.array(self.counted, "<u8")
            return [signs, self.claims.tobytes(), ids.tobytes()]
        if self.support is None:
            return [signs]
        if self.kind is Kind.ABSTAIN:
            return [self.support.data, signs]
        return [sparse.encode_body(self.signs, self.support, self.layout.size)]


def _kind(support: Bytes | None, claims: Claims | None, scales: bool) -> Kind:
    """The form of a ballot that is not sparse."""
    if claims is not None:
        return Kind.SCALED if scales else Kind.CORRECT
    return Kind.DENSE if support is None else Kind.ABSTAIN


def scales_of(decision: Ballot) -> Tensor:
    """The codes of the scales of a scaled decision, (tensors,) int8."""
    return _claims_of(decision)[: len(decision.layout.segments)]


def limits_of(decision: Ballot) -> Tensor:
    """The codes of the largest scales that counted in a scaled decision, (tensors,) int8."""
    return _claims_of(decision)[len(decision.layout.segments) :]


def _claims_of(ballot: Ballot) -> Tensor:
    assert ballot.claims is not None
    return torch.from_numpy(ballot.claims.copy())


def parse(
    message: Message,
    *,
    layout: Layout,
    run: int,
    round: int | None = None,
    worker: int | None = None,
    kinds: Collection[Kind] = tuple(Kind),
) -> Ballot:
    """The ballot that a message holds, or a BallotError. Dense votes are not copied: they are a view of the message.

    Args:
        message: untrusted bytes, or a memoryview of them, such as `memoryview(mmap.mmap(...))`.
        layout: of our model; another digest is refused.
        run: our run's number; a ballot of another run is refused.
        round: the round being decided; a ballot for another round is refused as late or future. None: any.
        worker: the sender, as the transport knows it; None: the worker that the header names.
        kinds: the forms that are accepted. An abstention for the whole round, a header alone, always is.

    """
    whole = _whole(message)
    fields = read_header(whole)
    check_identity(fields, layout, run, round, worker)
    kind = Kind(fields.kind)
    if kind not in kinds and not fields.reason:
        accepted = ", ".join(each.name.lower() for each in sorted(kinds))
        raise BallotError("kind", f"{kind.name.lower()} ballot; this server accepts {accepted}")
    body = whole[HEADER.size :]
    counted = fields.batch_size if kind in CLAIMING and fields.worker == SERVER else 0
    claimed = _claim_bytes(kind, layout, fields.worker == SERVER)
    tail = claimed + 8 * counted
    check_size(kind, layout.size, fields.votes, len(body) - tail, fields.reason)
    header = bytes(whole[: HEADER.size - 4]) + bytes(4)
    if zlib.crc32(body, zlib.crc32(header)) != fields.checksum:
        raise BallotError("checksum", "checksum mismatch: the ballot was damaged on its way")
    packed = np.frombuffer(body, np.uint8)
    signed = len(packed) - tail
    signs, support = _read_body(kind, packed[:signed], layout.size, fields.votes)
    ids = packed[len(packed) - 8 * counted :].tobytes()
    return Ballot(
        layout=layout,
        worker=fields.worker,
        round=fields.round,
        run=fields.run,
        kind=kind,
        signs=signs,
        support=support,
        batch_size=0 if counted else fields.batch_size,
        reason=fields.reason,
        claims=packed[signed : signed + claimed].view(np.int8) if claimed else None,
        counted=tuple(np.frombuffer(ids, "<u8").tolist()),
    )


def _claim_bytes(kind: Kind, layout: Layout, is_decision: bool) -> int:
    """Bytes of the claims in a message."""
    if kind not in CLAIMING:
        return 0
    tensors = len(layout.segments)
    return 2 * tensors if is_decision and kind is Kind.SCALED else tensors


def _whole(message: Message) -> memoryview:
    """The bytes of a message."""
    if not isinstance(message, Message):
        raise BallotError("type", f"a ballot is bytes, not {type(message).__name__}")
    view = memoryview(message)
    if not view.c_contiguous:
        raise BallotError("type", "a ballot is bytes that lie one after another, not a view with gaps")
    return view.cast("B")


def _read_body(kind: Kind, body: Bytes, n: int, count: int) -> tuple[Bytes, Bytes | None]:
    """(signs, support), packed. Refuses a body that no encoder writes."""
    if kind in WHOLE:
        sparse.check_padding(body, n)
        return body, None
    if kind is Kind.ABSTAIN:
        support = body[: bytes_for(n)]
        signs = body[bytes_for(n) :]
        sparse.check_padding(support, n)
        votes = count_ones(support)
        if votes != count:
            raise BallotError("count", f"{votes} votes in the ballot, {count} in its header")
        if any(np.any(some & ~voted) for some, voted in blocks(signs, support)):
            raise BallotError("padding", "signs are set where there is no vote")
        return signs, support
    return sparse.decode_body(body, n, count)
