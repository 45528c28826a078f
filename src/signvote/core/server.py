"""The server's side of a round: it reads ballots, makes a decision and updates its trust."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from threading import Lock

from torch import Tensor

from signvote.core.ballot import Ballot, Message, parse
from signvote.core.bits import SERVER, Zeros, check_number, check_zeros, coin_for
from signvote.core.chunks import evidence_of, vote
from signvote.core.header import Kind, understood
from signvote.core.layout import Layout
from signvote.core.learner import Learner
from signvote.core.likeness import signs_of_ballots, signs_of_votes
from signvote.core.report import Arriving, Refusal, Refusals, RoundReport
from signvote.core.rounds import Memory, Round, Store, Stream
from signvote.core.rule import Rule
from signvote.core.rules import make_rule
from signvote.core.tally import Tally
from signvote.core.trust import NOTHING, Evidence, State
from signvote.core.vote import Voters, Votes, empty_decision, everywhere, if_quorum, voters_of
from signvote.core.watch import Watch
from signvote.errors import ConfigError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes

Ballots = Mapping[int, Message] | Iterable[tuple[int, Message]]

VERSION = 2


class Server:
    """Decides rounds by a rule and learns which workers to trust.

    `decide` decides a round at once. `open` does it ballot by ballot, as they arrive, and with the same result.
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
        store: where the ballots of a round are kept, `Spool(...)`; None: in memory.
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
        store: Store | None = None,
        **options: object,
    ) -> None:
        check_zeros(zeros)
        check_number("run", run)
        limits = {"min_voters": min_voters, "remember": remember}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if isinstance(rule, Rule) and (options or rule.layout != layout):
            raise ConfigError("a Rule object must be made for the server's layout and takes no options")
        self.layout = layout
        self.run = run
        self.zeros = zeros
        self.rule = rule if isinstance(rule, Rule) else make_rule(rule, layout, **options)
        if self.rule.has_claims and zeros != "coin":
            raise ConfigError(f"zeros is {zeros!r}; the rule {self.rule.name!r} needs 'coin'")
        self.kinds = list(understood(corrects=self.rule.corrects, scales=self.rule.scales))
        if kinds is not None:
            self.kinds = [kind for kind in self.kinds if kind in kinds]
        self.last_round: int | None = None
        self.refusals = Refusals()
        self._learner = Learner(self.rule, min_voters, remember or self.rule.remembers)
        self._store = store or Memory()
        self._round: Round | None = None  # the last one opened
        self._expected = Voters(workers=())  # the voters of the last round
        self._lock = Lock()
        self._ones: Tensor | None = None  # see `_everywhere`

    def open(self, round: int, *, stream: bool = True) -> Round:
        """Begin a round: give its `add` the ballots as they arrive, from any thread, and `close` it to decide.

        A round that was opened before and is not closed is dropped: nothing of it is counted.

        Args:
            round: must be larger than that of the last decision.
            stream: add ballots to a tally as they arrive, so that little is left to do when the round is closed.
                False: decide them together, which takes less work.

        """
        self.begin(round)
        self._round = Round(
            round,
            read=partial(self._read, round),
            decide=self._decide,
            count_late=self._count_late,
            store=self._store,
            stream=self._stream(round) if stream else None,
        )
        return self._round

    def _stream(self, round: int) -> Stream | None:
        """A tally for a round, if the rule has weights that can be added up."""
        if not self.rule.splits or self.rule.is_local:
            return None
        return Stream(self.rule, self._tally(round), self._expected)

    def _tally(self, round: int) -> Tally:
        return Tally(
            self.layout,
            run=self.run,
            round=round,
            groups=len(self.rule.groups),
        )

    def _read(self, round: int, message: Message, worker: int) -> Ballot:
        return parse(
            message,
            layout=self.layout,
            run=self.run,
            round=round,
            worker=worker,
            kinds=self.kinds,
        )

    def _count_late(self, refusal: Refusal) -> None:
        with self._lock:
            self.refusals.count([refusal])

    def decide(self, round: int, ballots: Ballots) -> bytes:
        """Decide one round; the result is the message that every worker applies.

        Args:
            round: must grow from call to call.
            ballots: messages by worker id as the transport knows it, or pairs of both in order of arrival:
                of two ballots by one worker the first counts. A memoryview of a mapped file is read in place.

        """
        opened = self.open(round, stream=False)
        for worker, message in ballots.items() if isinstance(ballots, Mapping) else ballots:
            opened.add(worker, message)
        decision = opened.close()
        self.settle()
        return decision

    def _decide(self, round: Round) -> bytes:
        """Close a round: see `Round.close`."""
        if round is not self._round:
            raise ConfigError(f"round {round.number} was closed, or dropped when another one was opened")
        self._round = None
        ballots = round.voters
        voters = voters_of(ballots)
        if round.stream is not None:
            decision, arrive = self._tallied(round.stream, round.number, ballots, voters)
        else:
            decision, arrive = self._voted(round.number, ballots)
        report = RoundReport(round=round.number, abstained=round.abstained, refused=tuple(round.refused))
        sizes = dict(zip(voters.workers, voters.batch_sizes, strict=True))
        signs = partial(signs_of_ballots, ballots, self.layout.size) if self._learner.wants_signs else None
        self._close(Arriving(report, arrive, sizes, signs))
        self._expected = Voters(workers=voters.workers, batch_sizes=voters.batch_sizes)
        if self.rule.scales:
            self.settle()  # the scales of the decision follow from the evidence
        has_sparse_votes = any(each.kind is Kind.SPARSE for each in ballots)
        return self.message(round.number, decision, voters, has_sparse_votes)

    def _voted(self, round: int, ballots: list[Ballot]) -> tuple[Planes, Callable[[], Evidence]]:
        """The decision and the evidence, from all ballots at once."""
        if len(ballots) < self.min_voters:
            return empty_decision(self.layout.size, None), lambda: NOTHING
        coin = coin_for(self.zeros, self.run, round)
        decision = empty_decision(self.layout.size, coin)
        evidence = vote(self.rule, decision, ballots, coin)
        return decision, lambda: evidence

    def _tallied(
        self,
        stream: Stream,
        round: int,
        ballots: list[Ballot],
        voters: Voters,
    ) -> tuple[Planes, Callable[[], Evidence]]:
        """The decision from their tally; the evidence is computed when it is asked for."""
        decision, judged = self.conclude(
            round,
            voters,
            lambda: stream.total(ballots, self.rule.weigh(voters)),
        )
        if judged is None:
            return decision, lambda: NOTHING
        return decision, partial(evidence_of, self.rule, judged, ballots)

    def conclude(
        self,
        round: int,
        voters: Voters,
        total: Callable[[], Tally],
    ) -> tuple[Planes, Planes | None]:
        """Decide a round from the tally of all ballots.

        Returns:
            The decision, and what votes are compared with; None: too few voted, and nothing is decided.

        """
        if len(voters.workers) < self.min_voters:
            return empty_decision(self.layout.size, None), None
        coin = coin_for(self.zeros, self.run, round)
        decision = empty_decision(self.layout.size, coin)
        return decision, self.rule.conclude(decision, total(), voters, coin)

    def message(self, round: int, decision: Planes, voters: Voters, has_sparse_votes: bool) -> bytes:
        """The decision as a ballot of the server."""
        is_decided = len(voters.workers) >= self.min_voters
        by_tensor = self.rule.scale(voters) if is_decided else None
        signed = Ballot.cast(
            self.layout,
            decision,
            worker=SERVER,
            round=round,
            run=self.run,
            claims=None if by_tensor is None else by_tensor.numpy(),
            counted=() if by_tensor is None else voters.workers,
            scales=self.rule.scales,
        )
        message = signed.to_bytes()
        is_empty = signed.count == 0
        if signed.support is None or not (has_sparse_votes or is_empty):
            return message
        return min(message, signed.thinned().to_bytes(), key=len)  # few votes, few decisions

    def decide_planes(self, round: int, votes: Votes, abstained: Mapping[int, str] | None = None) -> Planes:
        """Decide one round from votes that are stacked on a device, sorted by worker, without waiting for it.

        The rule learns from the round after its evidence has arrived: in `settle`, at the latest before the next round.

        Args:
            round: must grow from call to call.
            votes: of all workers. Who of them abstains may be known on the device only: `votes.present`.
            abstained: for the report: why a worker abstains, unless it turns out to vote.

        """
        self.begin(round)
        coin = coin_for(self.zeros, self.run, round)
        decision = empty_decision(votes.n, coin, votes.device)
        quorate = if_quorum(votes, self.min_voters)
        evidence = self.rule.vote(decision, quorate, coin)
        sizes = dict(zip(votes.workers, votes.batch_sizes, strict=True))
        report = RoundReport(round=round, abstained=dict(abstained or {}))
        signs = signs_of_votes(quorate) if self._learner.wants_signs else None
        self._close(Arriving(report, evidence.sent(), sizes, signs))
        if quorate.present is None:
            return decision
        support = self._everywhere(votes) if decision.support is None else decision.support
        is_alone = len(votes.workers) == 1
        is_decided = quorate.present if is_alone else quorate.present.any()
        return Planes(decision.signs, support * is_decided)

    def _everywhere(self, votes: Votes) -> Tensor:
        """A plane of ones where these votes are; it is the same in every round."""
        if self._ones is None or self._ones.device != votes.device:
            self._ones = everywhere(votes.n, votes.device)
        return self._ones

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
        self.begin(round)
        report = RoundReport(round=round, abstained=dict(abstained or {}))
        self.finish(report, evidence, batch_sizes or {})

    def finish(self, report: RoundReport, evidence: Evidence | None, batch_sizes: Mapping[int, int]) -> None:
        """Close a round with its evidence; None: there is none to learn from."""
        self._close(Arriving(report, lambda: evidence or NOTHING, batch_sizes))
        self.settle()

    def settle(self) -> None:
        """Learn from the evidence of the last round, if that is not done yet."""
        if self._learner.settle():
            self._store.clear()

    @property
    def report(self) -> RoundReport:
        """What happened in the last round."""
        self.settle()
        return self._learner.report

    @property
    def watch(self) -> Watch:
        """What was noticed since the start."""
        return self._learner.watch

    @property
    def min_voters(self) -> int:
        """A round with fewer voters decides nothing."""
        return self._learner.min_voters

    @min_voters.setter
    def min_voters(self, least: int) -> None:
        self._learner.min_voters = least

    @property
    def remember(self) -> int:
        """About how many workers trust is kept."""
        return self._learner.remember

    def begin(self, round: int) -> None:
        """Check the number of a round, and end the one before."""
        check_number("round", round)
        if self.last_round is not None and round <= self.last_round:
            raise ConfigError(f"round {round} cannot be decided after round {self.last_round}")
        self.settle()
        if self._round is not None:
            self._round.stop()
            self._round = None
            self._store.clear()

    def _close(self, arriving: Arriving) -> None:
        self.last_round = arriving.report.round
        with self._lock:
            self.refusals.count(arriving.report.refused)
        self._learner.close(arriving)

    def forget(self, *workers: int) -> None:
        """Drop all trust in workers that left for good."""
        self.settle()
        self._learner.forget(*workers)

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
            **self._learner.state_dict(),
        }

    def load_state_dict(self, state: State, *parts: State) -> None:
        """Resume from a state: the next decision is the one that the saved server would have made.

        If several servers owned a part of the coordinates each, give the states of all of them.
        """
        check_state(state, kind="server", run=self.run, zeros=self.zeros)
        states = [upgraded(each, "a server's state", VERSION) for each in (state, *parts)]
        try:
            refusals = Refusals({(worker, reason): n for worker, reason, n in state["refusals"]})
            last_round = state["last_round"]
            self._learner.load_state_dict(*states)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"not a state that a server wrote: {error!r}") from error
        self.last_round = last_round
        self.refusals = refusals
