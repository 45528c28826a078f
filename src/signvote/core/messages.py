"""What the servers of a tree tell one another in a round: see `relay.py`. Each is bytes in the form of `wire.py`.

Roll       up      the workers whose ballots are in, and what they declare; who abstains; what was refused
Weights    down    the weights of those that are counted
Partial    up      who is counted in a tally, and the tally
Verdict    down    the decision, and the signs that votes are compared with
Shown      up      the evidence, and the votes on which pairs of workers are compared
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import Ballot, parse
from signvote.core.bits import SERVER
from signvote.core.header import REASONS
from signvote.core.report import Refusal
from signvote.core.tally import Tally
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, everywhere
from signvote.core.wire import Form, Topic, seal, unseal
from signvote.errors import BallotError
from signvote.kernels import Planes

Numbers = np.ndarray[Any, np.dtype[Any]]
Workers = tuple[int, ...]

CODES = {text: code for code, text in REASONS.items()}
NO_BYTES = np.zeros(0, np.uint8)


class Declared(NamedTuple):
    """What a ballot says besides its votes."""

    batch_size: int
    is_sparse: bool
    claims: tuple[int, ...]  # exponents of a correction


@dataclass(frozen=True, kw_only=True)
class Roll:
    """The workers below one server of the tree."""

    declared: dict[int, Declared]  # by worker that votes, sorted
    abstained: dict[int, str]  # worker -> why
    refused: tuple[Refusal, ...]

    def voters(self, workers: Sequence[int]) -> Voters:
        """Some of those that vote."""
        theirs = [self.declared[worker] for worker in workers]
        claims = torch.tensor([each.claims for each in theirs], dtype=torch.int8)
        return Voters(
            workers=tuple(workers),
            batch_sizes=tuple(each.batch_size for each in theirs),
            claims=claims if claims.numel() else None,
        )

    def to_bytes(self, topic: Topic) -> bytes:
        """The message."""
        voters = self.voters(list(self.declared))
        refused = [[each.worker, each.reason, each.message] for each in self.refused]
        return seal(
            Form.ROLL,
            topic,
            len(voters.workers),
            np.array(voters.workers, np.uint64),
            np.array(voters.batch_sizes, np.uint32),
            np.array([each.is_sparse for each in self.declared.values()], np.uint8),
            NO_BYTES if voters.claims is None else voters.claims.numpy(),
            np.array(list(self.abstained), np.uint64),
            np.array([CODES[why] for why in self.abstained.values()], np.uint8),
            _bytes(json.dumps(refused).encode()),
        )

    @classmethod
    def from_bytes(cls, message: bytes, topic: Topic) -> Roll:
        """The roll in a message, or a BallotError."""
        count, arrays = unseal(Form.ROLL, topic, message)
        workers, sizes, is_sparse, claims, silent, why, refused = arrays
        tensors = len(topic.layout.segments)
        _check("roll", count == len(workers) == len(sizes) == len(is_sparse))
        _check("roll", len(claims) in (0, count * tensors))
        _check("roll", len(silent) == len(why))
        rows = claims.reshape(count, -1).tolist() if count else []
        columns = (sizes.tolist(), is_sparse.astype(bool).tolist(), rows)
        said = [Declared(size, sparse, tuple(claim)) for size, sparse, claim in zip(*columns, strict=True)]
        reasons = [REASONS[code] for code in why.tolist()]
        refusals = []
        for worker, reason, text in json.loads(refused.tobytes()):
            refusals.append(Refusal(worker=worker, reason=reason, message=text))
        return cls(
            declared=dict(zip(_ids(workers), said, strict=True)),
            abstained=dict(zip(_ids(silent), reasons, strict=True)),
            refused=tuple(refusals),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Who is counted below one server of the tree, and by what weights."""

    workers: Workers
    weights: Tensor | None  # (workers, groups) int32; None: relays know them

    def to_bytes(self, topic: Topic) -> bytes:
        """The message."""
        weights = NO_BYTES if self.weights is None else self.weights.numpy()
        return seal(Form.WEIGHTS, topic, len(self.workers), np.array(self.workers, np.uint64), weights)

    @classmethod
    def from_bytes(cls, message: bytes, topic: Topic, groups: int) -> Weights:
        """The weights in a message, or a BallotError."""
        count, (workers, weights) = unseal(Form.WEIGHTS, topic, message)
        _check("weights", count == len(workers))
        _check("weights", len(weights) in (0, count * groups))
        rows = _rows(weights, count, groups) if len(weights) else None
        return cls(workers=_ids(workers), weights=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Partial:
    """A tally of some ballots."""

    workers: Workers
    tally: Tally

    def to_bytes(self, topic: Topic) -> bytes:
        """The message."""
        workers = np.array(self.workers, np.uint64)
        return seal(Form.PARTIAL, topic, len(workers), workers, _bytes(self.tally.to_bytes()))

    @classmethod
    def from_bytes(cls, message: bytes, topic: Topic, groups: int) -> Partial:
        """The tally in a message, or a BallotError."""
        count, (workers, tally) = unseal(Form.PARTIAL, topic, message)
        _check("partial", count == len(workers))
        read = Tally.from_bytes(tally.tobytes(), **topic._asdict(), groups=groups)
        return cls(workers=_ids(workers), tally=read)


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """The decision of a round."""

    decision: bytes  # as workers apply it
    judged: Planes | None  # what votes are compared with, no sign at ties; None: too few voted

    def to_bytes(self, topic: Topic) -> bytes:
        """The message. Few ties take few bytes, and signs are left out where they are those of the decision."""
        ties = signs = b""
        if self.judged is not None:
            decided = _decided(self.decision, topic)
            assert decided.support is not None
            assert self.judged.support is not None
            missing = ~self.judged.support & decided.support
            if missing.any():
                tied = Planes(torch.zeros_like(missing), missing)
                ties = _cast(topic, tied).thinned().to_bytes()
            untied = decided.signs & self.judged.support
            if not torch.equal(untied, self.judged.signs):
                own = Planes(self.judged.signs, None)
                signs = _cast(topic, own).to_bytes()
        return seal(
            Form.VERDICT,
            topic,
            self.judged is not None,
            _bytes(self.decision),
            _bytes(ties),
            _bytes(signs),
        )

    @classmethod
    def from_bytes(cls, message: bytes, topic: Topic) -> Verdict:
        """The verdict in a message, or a BallotError."""
        is_decided, arrays = unseal(Form.VERDICT, topic, message)
        decision, ties, signs = (array.tobytes() for array in arrays)
        decided = _decided(decision, topic)
        assert decided.support is not None
        support = decided.support
        if ties:
            missing = _parsed(ties, topic).planes().support
            support = support & ~(everywhere(topic.layout.size) if missing is None else missing)
        own = _parsed(signs, topic).planes().signs if signs else decided.signs
        return cls(decision=decision, judged=Planes(own & support, support) if is_decided else None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """The evidence about some workers."""

    evidence: Evidence
    sampled: Votes | None  # of the same workers

    def to_bytes(self, topic: Topic) -> bytes:
        """The message."""
        evidence = self.evidence
        packed_signs = NO_BYTES
        packed_support = NO_BYTES
        n = 0
        if self.sampled is not None:
            n = self.sampled.n
            signs, support = self.sampled.planes
            packed_signs = _packed(signs)
            if support is not None:
                packed_support = _packed(support)
        return seal(
            Form.EVIDENCE,
            topic,
            len(evidence.workers),
            np.array(evidence.workers, np.uint64),
            evidence.mismatches.numpy(),
            evidence.cast.numpy(),
            np.array([n], np.uint64),
            packed_signs,
            packed_support,
        )

    @classmethod
    def from_bytes(cls, message: bytes, topic: Topic, groups: int) -> Shown:
        """The evidence in a message, or a BallotError."""
        count, (workers, mismatches, cast, n, signs, support) = unseal(Form.EVIDENCE, topic, message)
        counts = count * groups
        word_of_each = 8 * max(1, count)  # bytes
        _check("evidence", count == len(workers))
        _check("evidence", len(mismatches) == len(cast) == counts)
        _check("evidence", len(signs) % word_of_each == 0)
        _check("evidence", len(support) in (0, len(signs)))
        ids = _ids(workers)
        evidence = Evidence(
            workers=ids,
            mismatches=_rows(mismatches, count, groups),
            cast=_rows(cast, count, groups),
        )
        if not len(signs):
            return cls(evidence=evidence, sampled=None)
        voted = _unpacked(support, count) if len(support) else None
        planes = Planes(_unpacked(signs, count), voted)
        sampled = Votes(workers=ids, planes=planes, n=int(n[0]))
        return cls(evidence=evidence, sampled=sampled)


def _check(name: str, is_right: bool) -> None:
    if not is_right:
        raise BallotError("length", f"the parts of the {name} have lengths that do not fit")


def _rows(numbers: Numbers, rows: int, columns: int) -> Tensor:
    return torch.from_numpy(numbers.reshape(rows, columns).copy())


def _bytes(data: bytes) -> Numbers:
    return np.frombuffer(data, np.uint8)


def _ids(workers: Numbers) -> Workers:
    return tuple(workers.tolist())


def _packed(plane: Tensor) -> Numbers:
    return plane.contiguous().numpy().view(np.uint8)


def _unpacked(packed: Numbers, rows: int) -> Tensor:
    return torch.from_numpy(packed.reshape(rows, -1).copy().view(np.int64))


def _cast(topic: Topic, planes: Planes) -> Ballot:
    return Ballot.cast(
        topic.layout,
        planes,
        worker=SERVER,
        round=topic.round,
        run=topic.run,
    )


def _parsed(message: bytes, topic: Topic) -> Ballot:
    return parse(message, **topic._asdict(), worker=SERVER)


def _decided(decision: bytes, topic: Topic) -> Planes:
    """The planes of a decision; both of them."""
    signs, support = _parsed(decision, topic).planes()
    return Planes(signs, everywhere(topic.layout.size) if support is None else support)
