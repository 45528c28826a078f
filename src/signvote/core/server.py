"""The server's side of a round: it reads ballots, makes a decision and updates its trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.ballot import Ballot, Kind, parse
from signvote.core.bits import SERVER, Zeros, check_number, check_zeros, coin_for
from signvote.core.layout import Layout
from signvote.core.report import Admitted, Refusal, RoundReport
from signvote.core.rule import Rule
from signvote.core.rules import make_rule
from signvote.core.trust import NOTHING, Evidence, State
from signvote.core.vote import Voters, Votes, claims_of, empty_decision, everywhere
from signvote.core.watch import Watch
from signvote.errors import BallotError, ConfigError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import WORD, Coin, Planes

Ballots = Mapping[int, bytes] | Iterable[tuple[int, bytes]]

VERSION = 2
STACK_BYTES = 2**22  # ballots are stacked and decided in chunks of about this size


class Arriving(NamedTuple):
    """A round whose evidence is still to be learned from."""

    report: RoundReport
    arrive: Callable[[], Evidence]
    batch_sizes: Mapping[int, int]  # worker -> declared


class Server:
    """Decides rounds by a rule and learns which workers to trust.

    One bad ballot costs its worker one vote: it is refused, reported and counted, and the round continues.
    After each round `report` shows what happened; `refusals` counts (worker, reason) since the start, and
    `watch.notices` has the notices since the start.

    Args:
        layout: of the model being trained.
        rule: a name from `RULES`, or a Rule made for this layout.
        run: the run's number, below 2^64. Ballots carry it, coins are keyed by it: all workers must share it.
        zeros: "coin": a zero tally gets a fair bit. "abstain": it decides nothing.
        min_voters: a round with fewer voters decides nothing: no parameter moves.
        remember: about how many workers trust is kept; those not seen for longest are forgotten first, but
            never a voter of the last round. None: as many as the rule can afford.
        kinds: the forms of ballots that are accepted; None: all that the rule understands.
        options: keyword arguments of the named rule.

    >>> layout = Layout([("w", (3,))])
    >>> server = Server(layout, rule="majority")
    >>> decision = server.decide(1, {})        # nobody answered: nothing moves
    >>> server.report.voters, server.report.is_decided
    ((), False)

    """

    def __init__(
        self,
        layout: Layout,
        rule: str | Rule = "weighted",
        *,
        run: int = 0,
        zeros: Zeros = "coin",
        min_voters: int = 1,
        remember: int | None = None,
        kinds: Collection[Kind] | None = None,
        **options: object,
    ) -> None:
        check_zeros(zeros)
        check_number("run", run)
        for name, value in (("min_voters", min_voters), ("remember", remember)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if isinstance(rule, Rule) and (options or rule.layout != layout):
            raise ConfigError("a Rule object must be made for the server's layout and takes no options")
        self.layout = layout
        self.run = run
        self.zeros = zeros
        self.rule = rule if isinstance(rule, Rule) else make_rule(rule, layout, **options)
        self.min_voters = min_voters
        if self.rule.corrects and zeros != "coin":
            raise ConfigError(f"zeros is {zeros!r}; the rule {self.rule.name!r} needs 'coin'")
        self.kinds = (
            [Kind.CORRECT] if self.rule.corrects else [kind for kind in Kind if kind is not Kind.CORRECT]
        )
        if kinds is not None:
            self.kinds = [kind for kind in self.kinds if kind in kinds]
        self.remember = remember or self.rule.remembers
        self._seen: dict[int, None] = {}  # workers with trust, those seen last at the end
        self.last_round: int | None = None
        self._report = RoundReport(round=0)
        self.watch = Watch(self.remember)
        self._arriving: Arriving | None = None
        self.refusals: Counter[tuple[int, str]] = Counter()

    def admit(self, round: int, ballots: Ballots) -> Admitted:
        """Parse the ballots of a round without deciding it; nothing changes.

        Args:
            round: of the ballots.
            ballots: messages by worker id as the transport knows it, or pairs of both in order of arrival:
                of two ballots by one worker the first counts.

        """
        admitted: dict[int, Ballot] = {}
        refused: list[Refusal] = []
        pairs = ballots.items() if isinstance(ballots, Mapping) else ballots
        for sender, message in pairs:
            worker = index(sender)  # a plain int, whatever integer type the transport uses
            try:
                if worker in admitted:
                    raise BallotError("duplicate", f"worker {worker} has already voted in round {round}")
                admitted[worker] = parse(
                    message,
                    layout=self.layout,
                    run=self.run,
                    round=round,
                    worker=worker,
                    kinds=self.kinds,
                )
            except BallotError as error:
                refusal = Refusal(worker=worker, reason=error.reason, message=str(error))
                refused.append(refusal)
        by_worker = tuple(admitted[worker] for worker in sorted(admitted))
        return Admitted(round=round, ballots=by_worker, refused=tuple(refused))

    def decide(self, round: int, ballots: Ballots | Admitted) -> bytes:
        """Decide one round; the result is the message that every worker applies.

        Args:
            round: must grow from call to call.
            ballots: as for `admit`, or its result.

        """
        self._open(round)
        admitted = ballots if isinstance(ballots, Admitted) else self.admit(round, ballots)
        if admitted.round != round:
            raise ConfigError(f"ballots of round {admitted.round} cannot decide round {round}")
        voters = admitted.voters
        coin = coin_for(self.zeros, self.run, round)
        if len(voters) >= self.min_voters:
            decision, evidence = self._vote(voters, coin)
        else:
            decision, evidence = empty_decision(self.layout.size, None), NOTHING
        self.refusals.update((refusal.worker, refusal.reason) for refusal in admitted.refused)
        report = RoundReport(round=round, abstained=admitted.abstained, refused=admitted.refused)
        self._close(report, lambda: evidence, {ballot.worker: ballot.batch_size for ballot in voters})
        self.settle()
        return self._message(decision, voters)

    def _message(self, decision: Planes, voters: list[Ballot]) -> bytes:
        """The decision as a ballot of the server."""
        assert self.last_round is not None
        exponents = self._exponents(voters)
        signed = Ballot.cast(
            self.layout,
            decision,
            worker=SERVER,
            round=self.last_round,
            run=self.run,
            claims=None if exponents is None else exponents.numpy(),
            counted=() if exponents is None else tuple(ballot.worker for ballot in voters),
        )
        message = signed.to_bytes()
        has_sparse_votes = any(ballot.kind is Kind.SPARSE for ballot in voters)
        is_empty = signed.count == 0
        if signed.support is None or not (has_sparse_votes or is_empty):
            return message
        return min(message, signed.thinned().to_bytes(), key=len)  # few votes, few decisions

    def _exponents(self, voters: list[Ballot]) -> Tensor | None:
        """The scales by which workers follow what is believed of them; None unless corrections were decided."""
        if len(voters) < self.min_voters:
            return None
        return self.rule.scale(
            Voters(
                workers=tuple(ballot.worker for ballot in voters),
                batch_sizes=tuple(ballot.batch_size for ballot in voters),
                claims=claims_of(voters),
            )
        )

    def decide_planes(self, round: int, votes: Votes) -> Planes:
        """Decide one round from votes that are stacked on a device, sorted by worker, without waiting for it.

        The rule learns from the round after its evidence has arrived: in `settle`, at the latest before the next round.
        """
        self._open(round)
        coin = coin_for(self.zeros, self.run, round)
        decision = empty_decision(votes.n, coin, votes.device)
        quorate = self._if_quorum(votes)
        evidence = self.rule.vote(decision, quorate, coin)
        sizes = dict(zip(votes.workers, votes.batch_sizes, strict=True))
        self._close(RoundReport(round=round), evidence.sent(), sizes)
        if quorate.present is None:
            return decision
        support = everywhere(votes.n, votes.device) if decision.support is None else decision.support
        return Planes(decision.signs, support * quorate.present.any())

    def _if_quorum(self, votes: Votes) -> Votes:
        """The votes, all of them absent if they are too few. Who votes may be known on the device only."""
        if votes.present is None and len(votes.workers) >= self.min_voters:
            return votes
        everybody = torch.ones(len(votes.workers), dtype=torch.bool, device=votes.device)
        present = everybody if votes.present is None else votes.present
        is_quorum = present.sum() >= self.min_voters
        return replace(votes, present=present & is_quorum)

    def learn(
        self,
        round: int,
        evidence: Evidence,
        abstained: Mapping[int, str] | None = None,
        batch_sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Close a round that was decided elsewhere by calls of `rule.vote`, with the evidence of all calls.

        Args:
            round: must grow from call to call.
            evidence: the sum of all calls; `NOTHING` if too few voted.
            abstained: the workers that abstained, and why.
            batch_sizes: that the voters declared.

        """
        self._open(round)
        report = RoundReport(round=round, abstained=dict(abstained or {}))
        self._close(report, lambda: evidence, batch_sizes or {})
        self.settle()

    def settle(self) -> None:
        """Learn from the evidence of the last round, if that is not done yet."""
        if self._arriving is None:
            return
        report, arrive, sizes = self._arriving
        evidence = arrive()
        self._arriving = None
        notices = self._notices(report.round, evidence, sizes)  # before the rule forgets this round's weights
        self.rule.learn(evidence)
        self._remember(evidence.workers)
        mismatches = evidence.mismatches.sum(1)
        cast = evidence.cast.sum(1).clamp_min(1)
        shares = (mismatches / cast).tolist()
        overruled = dict(zip(evidence.workers, shares, strict=True))
        self._report = replace(
            report,
            voters=evidence.workers,
            disagreement=overruled,
            is_decided=len(evidence.workers) >= self.min_voters,
            notices=tuple(notices),
        )

    def _notices(self, round: int, evidence: Evidence, sizes: Mapping[int, int]) -> list[str]:
        """What there is to notice about the workers of a round."""
        workers = evidence.workers
        if len(workers) < self.min_voters:
            return self.watch.observe_undecided(round, self.min_voters)
        declared = tuple(sizes.get(worker, 0) for worker in workers)
        voters = Voters(workers=workers, batch_sizes=declared)
        return self.watch.observe(round, voters, evidence, self.rule.shares(workers))

    def _remember(self, voters: tuple[int, ...]) -> None:
        """Keep trust in these voters, and forget those who were not seen for longest."""
        if self.rule.trust is None:
            return
        for worker in voters:
            self._seen.pop(worker, None)
            self._seen[worker] = None
        limit = max(self.remember, len(voters))
        too_many = len(self._seen) - limit
        if too_many > 0:
            self.forget(*list(self._seen)[:too_many])

    @property
    def report(self) -> RoundReport:
        """What happened in the last round."""
        self.settle()
        return self._report

    def _open(self, round: int) -> None:
        check_number("round", round)
        if self.last_round is not None and round <= self.last_round:
            raise ConfigError(f"round {round} cannot be decided after round {self.last_round}")
        self.settle()

    def _close(
        self, report: RoundReport, arrive: Callable[[], Evidence], batch_sizes: Mapping[int, int]
    ) -> None:
        self.last_round = report.round
        self._arriving = Arriving(report, arrive, batch_sizes)

    def _vote(self, voters: list[Ballot], coin: Coin | None) -> tuple[Planes, Evidence]:
        """Decide chunk by chunk, which needs little memory besides the ballots themselves."""
        n = self.layout.size
        decision = empty_decision(n, coin)
        words_at_once = STACK_BYTES // (8 * max(1, len(voters)))
        size = max(1, words_at_once) * WORD

        def chunks() -> Iterator[tuple[Planes, Votes]]:
            for first in range(0, n, size):
                votes = Votes.stack(voters, first, min(size, n - first))
                start = first // WORD
                stop = start + votes.planes.signs.shape[1]
                words = slice(start, stop)
                yield decision.map(lambda plane: plane[words]), votes  # noqa: B023

        evidence = vote_in_chunks(self.rule, chunks(), coin)
        return decision, evidence

    def forget(self, *workers: int) -> None:
        """Drop all trust in workers that left for good."""
        self.settle()
        self.rule.forget(*workers)
        self.watch.forget(*workers)
        for worker in workers:
            self._seen.pop(worker, None)

    def state_dict(self) -> State:
        """Everything needed to resume: tensors, numbers, strings and lists; never objects."""
        self.settle()
        return {
            "kind": "server",
            "version": VERSION,
            "run": self.run,
            "zeros": self.zeros,
            "last_round": self.last_round,
            "refusals": [[worker, reason, n] for (worker, reason), n in self.refusals.items()],
            "seen": list(self._seen),
            "watch": self.watch.state_dict(),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: State, *parts: State) -> None:
        """Resume from a state: the next decision is the one that the saved server would have made.

        If several servers owned a part of the coordinates each, give the states of all of them.
        """
        check_state(state, kind="server", run=self.run, zeros=self.zeros)
        states = [upgraded(each, "a server's state", VERSION) for each in (state, *parts)]
        try:
            refusals = Counter({(worker, reason): n for worker, reason, n in state["refusals"]})
            last_round = state["last_round"]
            watch = Watch(self.remember)
            if "watch" in state:  # earlier versions kept none
                watch.load_state_dict(state["watch"])
            self.rule.load_state_dict(*(each["rule"] for each in states))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"not a state that a server wrote: {error!r}") from error
        self._arriving = None
        self.last_round = last_round
        self.refusals = refusals
        self.watch = watch
        known = [] if self.rule.trust is None else self.rule.trust.workers
        self._seen = dict.fromkeys(state.get("seen", known))


def vote_in_chunks(rule: Rule, chunks: Iterable[tuple[Planes, Votes]], coin: Coin | None) -> Evidence:
    """Decide chunk by chunk, and add the evidence up.

    Args:
        rule: decides.
        chunks: for each chunk, the planes for its decision, and its votes; at least one chunk.
        coin: of the server and round.

    """
    total: Evidence | None = None
    for out, votes in chunks:
        first_coin = None if coin is None else coin.after(votes.first)
        seen = rule.vote(out, votes, first_coin)
        total = seen if total is None else total + seen
    assert total is not None  # a layout has at least one coordinate
    return total
