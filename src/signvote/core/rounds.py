"""One round of a server, from its first ballot to the decision.

Round     accepts ballots as they arrive, from several threads, until it is closed
Stream    adds them to a tally at once, by the weights that they are expected to have
Store     where ballots are kept until the evidence is counted: in memory, or as `signvote.Spool` does it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from threading import Lock
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from signvote.core.ballot import Ballot, Message
from signvote.core.bits import Bytes
from signvote.core.header import REASONS
from signvote.core.report import Refusal
from signvote.core.rule import Rule
from signvote.core.tally import Tally
from signvote.core.vote import Voters
from signvote.errors import BallotError

Status = Literal["admitted", "duplicate", "late", "refused"]

BATCH = 8  # ballots that are added to a tally at a time: faster than one by one


class Receipt(NamedTuple):
    """What became of a ballot."""

    status: Status
    votes: int  # how many workers vote in this round by now
    message: str = ""  # why the ballot is not admitted


class Store(Protocol):
    """Keeps the packed bits of ballots."""

    def keep(self, packed: Bytes) -> Bytes:
        """The same bits, in a place of the store's choice. Called from several threads."""

    def clear(self) -> None:
        """Drop everything; nothing of it is read any more."""


class Memory:
    """Keeps ballots where they are."""

    def keep(self, packed: Bytes) -> Bytes:
        """See Store."""
        return packed

    def clear(self) -> None:
        """See Store."""


class Stream:
    """A tally that grows as ballots arrive.

    A rule may need to know all voters before it weighs any. A ballot is then added by the weight that its worker has
    if the voters are those of the last round, and `total` adds the difference, which is exact, because tallies are
    integers. The ballot of a worker whose weight cannot be foretold is added in `total`.

    Args:
        rule: weighs; it must not learn until `total` was called.
        tally: an empty one.
        expected: the voters of the last round, with the batch sizes that they declared.

    """

    def __init__(self, rule: Rule, tally: Tally, expected: Voters) -> None:
        self.rule = rule
        self.tally = tally
        self._expected: dict[tuple[int, int], Tensor] = {}
        if expected.workers and not rule.is_alone and not rule.has_claims:
            whose = zip(expected.workers, expected.batch_sizes, strict=True)
            self._expected = dict(zip(whose, rule.weigh(expected), strict=True))
        self._lock = Lock()
        self._is_open = True
        self._waiting: list[tuple[Ballot, Tensor]] = []
        self._added: dict[int, Tensor] = {}  # worker -> the weights by which its ballot was added

    def put(self, ballot: Ballot) -> None:
        """Add a ballot, if its weight can be foretold: at once, or with the next ones."""
        weights = self._foretold(ballot)
        if weights is None:
            return
        with self._lock:
            self._waiting.append((ballot, weights))
            if self._is_open and len(self._waiting) == BATCH:
                self._add(self._waiting)
                self._added |= {each.worker: theirs for each, theirs in self._waiting}
                self._waiting = []

    def _foretold(self, ballot: Ballot) -> Tensor | None:
        if self.rule.is_alone:
            return self.rule.weights(Voters(workers=(ballot.worker,), batch_sizes=(ballot.batch_size,)))[0]
        return self._expected.get((ballot.worker, ballot.batch_size))

    def _add(self, weighed: Sequence[tuple[Ballot, Tensor]]) -> None:
        for start in range(0, len(weighed), BATCH):
            ballots, weights = zip(*weighed[start : start + BATCH], strict=True)
            self.tally.add_all(ballots, torch.stack(weights))

    def total(self, ballots: Sequence[Ballot], weights: Tensor) -> Tally:
        """The tally of these ballots by these weights. The stream is closed.

        Args:
            ballots: all of those that were put, and perhaps more.
            weights: integers, (ballots, groups).

        """
        with self._lock:
            self._is_open = False
        nothing = torch.zeros_like(weights[0])
        pairs = zip(ballots, weights, strict=True)
        missing = [(each, row - self._added.get(each.worker, nothing)) for each, row in pairs]
        self._add([(each, difference) for each, difference in missing if difference.any()])
        return self.tally


class Round:
    """The ballots of one round. `add` may be called from several threads, also while another one closes the round.

    Args:
        number: of the round.
        read: parses a message of a worker, or raises a BallotError.
        decide: makes the decision from this round, once it is closed.
        count_late: is told of ballots that come after the round was closed.
        store: keeps ballots.
        stream: adds them up as they arrive; None: `decide` does.

    """

    def __init__(
        self,
        number: int,
        *,
        read: Callable[[Message, int], Ballot],
        decide: Callable[[Round], bytes],
        count_late: Callable[[Refusal], None],
        store: Store,
        stream: Stream | None,
    ) -> None:
        self.number = number
        self.refused: list[Refusal] = []
        self.stream = stream
        self.is_open = True
        self._read = read
        self._decide = decide
        self._count_late = count_late
        self._store = store
        self._ballots: dict[int, Ballot] = {}
        self._votes = 0
        self._lock = Lock()

    def add(self, worker: int, message: Message) -> Receipt:
        """Parse and check a ballot, and count it in. A bad one costs its worker one vote, and nothing else.

        Of two ballots by one worker the first counts. What comes after the round was closed is late.
        """
        sender = index(worker)  # a plain int, whatever integer type the transport uses
        try:
            self._expect(sender)
            ballot = self._kept(self._read(message, sender))
            with self._lock:
                self._expect(sender)  # another thread may have closed the round, or admitted a ballot
                self._ballots[sender] = ballot
                self._votes += not ballot.reason
        except BallotError as error:
            return self._refuse(Refusal(worker=sender, reason=error.reason, message=str(error)))
        if self.stream is not None and not ballot.reason:
            self.stream.put(ballot)
        return Receipt("admitted", self._votes)

    def _expect(self, worker: int) -> None:
        """Raise unless this worker may still vote."""
        if not self.is_open:
            raise BallotError(
                "late", f"the ballot of worker {worker} came after round {self.number} was closed"
            )
        if worker in self._ballots:
            raise BallotError("duplicate", f"worker {worker} has already voted in round {self.number}")

    def _kept(self, ballot: Ballot) -> Ballot:
        signs = self._store.keep(ballot.signs)
        support = None if ballot.support is None else self._store.keep(ballot.support)
        if signs is ballot.signs and support is ballot.support:
            return ballot
        claims = (
            None if ballot.claims is None else ballot.claims.copy()
        )  # a view would keep the whole message
        return replace(ballot, signs=signs, support=support, claims=claims)

    def _refuse(self, refusal: Refusal) -> Receipt:
        with self._lock:
            if self.is_open:
                self.refused.append(refusal)
            else:
                self._count_late(refusal)
        status: Status = "refused"
        if refusal.reason in ("duplicate", "late"):
            status = refusal.reason  # type: ignore[assignment]  # which mypy does not narrow
        return Receipt(status, self._votes, refusal.message)

    def close(self) -> bytes:
        """Decide: the result is the message that every worker applies."""
        self.stop()
        return self._decide(self)

    def stop(self) -> None:
        """Admit no more ballots."""
        with self._lock:
            self.is_open = False

    @property
    def votes(self) -> int:
        """How many workers vote by now."""
        return self._votes

    @property
    def voters(self) -> list[Ballot]:
        """The ballots that vote, sorted by worker, so that the order of arrival changes nothing."""
        return [self._ballots[worker] for worker in sorted(self._ballots) if not self._ballots[worker].reason]

    @property
    def abstained(self) -> dict[int, str]:
        """The workers that abstain, and why."""
        silent = [ballot for ballot in self._ballots.values() if ballot.reason]
        return {ballot.worker: REASONS[ballot.reason] for ballot in sorted(silent, key=lambda b: b.worker)}
