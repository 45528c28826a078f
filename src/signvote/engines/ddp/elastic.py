"""The votes of a worker that may lose others: a `Poll` whose group is made anew when members come or go.

meet       a view is agreed on, its group is made, and all members catch up with the one furthest ahead
attempt    a round in this group. If an exchange fails, the members meet again and try the same round with the same
           votes: momentum advances once, when they are counted
stepped    the round is kept for those that catch up; if somebody knocked, the members meet at once
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from signvote import checkpoint
from signvote.core.encoding import Encoding, Memory
from signvote.core.header import REASONS
from signvote.core.report import Refusal, RoundReport
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.core.trust import NOTHING, State
from signvote.core.vote import Voters, empty_decision
from signvote.engines.ddp.catching_up import Model, Story
from signvote.engines.ddp.company import Company
from signvote.engines.ddp.evidence import Packings
from signvote.engines.ddp.fixed import Outcome
from signvote.engines.ddp.handshake import SETTINGS, Member
from signvote.engines.ddp.members import Members
from signvote.engines.ddp.past import Decided, Past
from signvote.engines.ddp.poll import Poll
from signvote.engines.ddp.process_group import Alone
from signvote.engines.ddp.sealed import FAULTS
from signvote.engines.ddp.sealed_exchange import SealedExchange
from signvote.engines.ddp.shares import Shares
from signvote.engines.ddp.status import Status
from signvote.engines.ddp.stepping import Setting
from signvote.engines.ddp.team import Team
from signvote.engines.ddp.torch_names import sharding_of
from signvote.engines.ddp.transport import Transport
from signvote.engines.ddp.view_group import Lost
from signvote.errors import ConfigError, EngineError
from signvote.formats import check_state
from signvote.kernels import Planes
from signvote.kernels.reference import pack, unpack

log = logging.getLogger("signvote")

TRIES = 20  # of one round


class Round(NamedTuple):
    """What the members know about a round before they decide."""

    statuses: list[Status]  # by rank
    used: list[bool]  # which parameters have a gradient on some worker
    faults: list[int]  # of the votes of each rank, on any other; keys of FAULTS
    has_knocks: bool


class ElasticPoll(Poll):
    """One worker's side of the votes, among members that come and go.

    Args:
        parameters: by name.
        server: makes the decisions on this worker's pieces.
        members: the settings of this worker.
        encoding: how gradients become signs.
        transport: how votes travel.
        dtype: of gradients and momentum.

    """

    comes_and_goes = True

    def __init__(
        self,
        parameters: dict[str, Tensor],
        server: Server,
        *,
        members: Members,
        encoding: Encoding,
        transport: Transport,
        dtype: torch.dtype,
    ) -> None:
        check(server.rule, encoding, transport, parameters)
        device = next(iter(parameters.values())).device
        super().__init__(
            parameters,
            server,
            Team(Alone(device)),
            encoding=encoding,
            transport=transport,
            worker_id=members.worker_id,
            dtype=dtype,
        )
        self.company = Company(members, self._facts())
        self._chunk = transport.chunk
        self._model: Model | None = None
        self._story: Story | None = None
        self._pending = 0  # the round whose votes are encoded and not counted; 0: none
        self._is_new = True  # whether this process has taken part in no round
        self._is_fresh = False  # whether a round was decided that `stepped` has not kept
        self._has_knocks = False

    def _facts(self) -> dict[str, str]:
        """What all workers must share."""
        texts = dict(zip(SETTINGS, self.handshake.settings, strict=True))
        texts["layout of the model"] = self.layout.digest.hex()
        return {
            name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()
        }

    @property
    def story(self) -> Story:
        """What is the same on every member; it begins with the parameters as they are at the first step."""
        if self._story is None:
            origin = repr((self.round, self.comparison.digest())).encode() + checkpoint.to_bytes(
                self.server.state_dict()
            )
            past = Past(hashlib.blake2b(origin, digest_size=16).digest())
            assert self._model is not None  # `moves` was called
            self._story = Story(self._model, self.server, past)
        return self._story

    def moves(self, model: Model) -> None:
        """See Poll."""
        self._model = model

    # ---- a round ---------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Members meet in `decide`."""

    def decide(self, batch_size: int, *, seconds: float = 0.0, used: Sequence[bool] = ()) -> Outcome:
        """Hold the vote, or catch up: then nothing is decided here, and the next gradient is for a later round.

        Args:
            batch_size: declared by this worker; 0: not declared.
            seconds: that this worker worked; 0: unknown.
            used: which parameters have a gradient here; if none of them has, this worker abstains.

        """
        self.sender.put_missing()
        self._tell()
        self._pending = self.round + 1
        link = self.story.past.link
        for _ in range(TRIES):
            try:
                self._meet()
                if self.story.past.link != link:
                    return self._nothing(used)
                return self._attempt(batch_size, seconds, used)
            except Lost as error:
                self.company.lose(str(error))
        raise EngineError(f"round {self.round + 1} failed {TRIES} times, at last: {self.company.cause}")

    def _attempt(self, batch_size: int, seconds: float, used: Sequence[bool]) -> Outcome:
        """Hold the vote in this group."""
        self.exchange.begin(self.round + 1)
        self.exchange.send(range(self.exchange.shares.chunks), self.sender.planes)
        known = self._known(self._status(batch_size, seconds, used, None), used)
        self._compare(known.statuses)
        decision, voting = self._decided(known)
        if voting is not None:
            self.story.count(dict.fromkeys(voting.workers, self.round))
            if self.worker_id in voting.workers:
                self.sender.keep_memory()
        self._pending = 0
        self._is_new = False
        self._is_fresh = True
        self._has_knocks = known.has_knocks
        self.begin()
        self._tell()
        worked = [each.nanoseconds / 1e9 for each in known.statuses]
        return Outcome(decision, known.used, worked, self.report.is_decided)

    def _known(self, mine: Status, used: Sequence[bool]) -> Round:
        """The status of every member, and the votes that somebody refuses."""
        exchange = self.exchange
        assert isinstance(exchange, SealedExchange)
        numbers = torch.tensor([*mine, bool(self.company.membership.knocks)])
        faults = torch.tensor(exchange.faults)
        bits = pack(torch.tensor(used, dtype=torch.bool))
        rows = exchange.gather(torch.cat([numbers, faults, bits]))
        sizes = [len(numbers), len(faults), len(bits)]
        its_numbers, its_faults, its_bits = torch.split(rows, sizes, dim=1)
        by_rank = unpack(its_bits.contiguous(), len(used))
        return Round(
            statuses=[Status(*row[:-1]) for row in its_numbers.tolist()],
            used=by_rank.any(0).tolist(),
            faults=its_faults.amax(0).tolist(),
            has_knocks=bool(its_numbers[:, -1].any()),
        )

    def _compare(self, statuses: Sequence[Status]) -> None:
        """Raise if members have different parameters."""
        self.batch_sizes = tuple(status.batch_size for status in statuses)
        digests = [status.digest for status in statuses]
        self._check_digests(digests, [0] * len(digests), f"round {self.round + 1}")

    def _decided(self, known: Round) -> tuple[Planes, Voters | None]:
        """The decision, and who made it; None: they were too few."""
        ids = self.handshake.ids
        round = self.round + 1
        ranks = []  # whose votes count
        abstained = {}
        refused = []
        for rank, status in enumerate(known.statuses):
            fault = known.faults[rank]
            if not status.votes:
                abstained[ids[rank]] = REASONS[status.reason]
            elif fault:
                refused.append(_refusal(ids[rank], round, fault))
            else:
                ranks.append(rank)
        report = RoundReport(round=round, abstained=abstained, refused=tuple(refused))
        if len(ranks) < self.server.min_voters:
            self.server.finish(report, NOTHING, {})
            return empty_decision(self.placement.size, None, self.exchange.device), None
        voting = self._voting(ranks, torch.zeros(0))
        decision, evidence = self._vote(ranks, voting)
        sizes = dict(zip(voting.workers, voting.batch_sizes, strict=True))
        self.server.finish(report, evidence, sizes)
        return decision, voting

    def _nothing(self, used: Sequence[bool]) -> Outcome:
        """The outcome of a step in which this worker caught up."""
        decision = empty_decision(self.placement.size, None, self.exchange.device)
        return Outcome(decision, list(used), [], is_decided=False)

    def _tell(self) -> None:
        """Log once what was noticed in the last round, on one member, and whose votes were refused, on all."""
        report = self.report
        if report is not self._told:
            for refusal in report.refused:
                log.warning("signvote: %s", refusal.message)
        super()._tell()
        self._told = report

    # ---- between rounds --------------------------------------------------------------------------

    def stepped(self, outcome: Outcome, settings: Sequence[Setting]) -> None:
        """Keep the round that was applied, and let in those that knocked. Call it after every step.

        Args:
            outcome: of `decide`.
            settings: by which it was applied.

        """
        if not self._is_fresh:
            return
        self._is_fresh = False
        decided = Decided(
            round=self.round,
            decision=outcome.decision,
            used=outcome.used,
            settings=list(settings),
            is_decided=bool(outcome.is_decided),
        )
        self.story.past.add(decided)
        self._save()
        if self._has_knocks:
            self.company.lose("")
            self._meet_at_last()

    def leave(self) -> None:
        """Wait for the others at the end of the training, so that all have the last round."""
        if self.company.membership.view.epoch:
            self.company.leave(self.story)

    def _meet_at_last(self) -> None:
        for _ in range(TRIES):
            try:
                return self._meet()
            except Lost as error:
                self.company.lose(str(error))
        raise EngineError(f"{TRIES} views ended before their members had met, at last: {self.company.cause}")

    def _meet(self) -> None:
        """Be in a group whose members are equal."""
        link = self.story.past.link
        if not self.company.meet(self.story):
            return
        self._rebuild()
        if self.story.past.link != link:
            self._settle_memory()
            self.begin()

    def _rebuild(self) -> None:
        """Share out the coordinates among the members of a new view."""
        group = self.company.group
        assert group is not None
        self.team = Team(group)
        self.handshake.ids = list(group.ranks)
        self.handshake.members = [Member(worker, 0) for worker in group.ranks]
        shares = Shares.of(self.placement.size, group.world, self._chunk)
        owned = [self.placement.decided_by(shares, rank) for rank in range(group.world)]
        self.server.rule.own(owned[group.rank])
        planes = self.encoding.planes
        self.exchange = SealedExchange(
            group,
            shares,
            vote_planes=planes,
            decision_planes=1 if self.encoding.zeros == "coin" else 2,
            device=torch.device("cpu"),
            overlap=False,
        )
        self.packings = Packings(self.server.rule.groups, owned, dense=planes == 1)

    # ---- this worker's memory --------------------------------------------------------------------

    def _settle_memory(self) -> None:
        """After a jump: keep the memory of the pending votes if they were counted."""
        if self._is_new and self.company.has_joined:
            self._load()
        elif self._pending and self.story.counted.get(self.worker_id) == self._pending:
            self.sender.keep_memory()
        self._pending = 0
        self._is_new = False

    def _save(self) -> None:
        """Save this worker's memory now and then."""
        settings = self.company.settings
        if settings.save is not None and self.round % settings.save_every == 0:
            checkpoint.save(
                settings.save,
                {
                    **self._owner(),
                    "round": self.round,
                    "average": self.sender.memory.average,
                },
            )

    def _load(self) -> None:
        """Load the memory that an earlier process of this worker saved."""
        path = self.company.settings.save
        if path is None or not Path(path).exists():
            return
        state = checkpoint.load(path)
        check_state(state, **self._owner())
        self.sender.load_memory(Memory(state["average"], None, None))

    def _owner(self) -> State:
        return {
            **self._identity(),
            "worker": self.worker_id,
            "run": self.server.run,
        }


def check(rule: Rule, encoding: Encoding, transport: Transport, parameters: Mapping[str, Tensor]) -> None:
    """Raise for what members that come and go cannot do."""
    if rule.scales:
        raise ConfigError("members does not support local steps and scaled votes")
    if type(rule).own is not Rule.own:
        raise ConfigError(
            f"rule {rule.name!r} keeps counters per coordinate, which members cannot share; use 'weighted'"
        )
    if encoding.needs_whole_vector:
        raise ConfigError("members supports neither top, feedback nor polar")
    if transport.overlap:
        raise ConfigError("members does not support overlap=True; use overlap=False")
    if any(sharding_of(parameter) is not None for parameter in parameters.values()):
        raise ConfigError("members does not support sharded parameters (FSDP)")
    devices = {parameter.device.type for parameter in parameters.values()}
    if devices != {"cpu"}:
        raise ConfigError(
            f"members supports parameters on the CPU; these are on {', '.join(sorted(devices))}"
        )


def _refusal(worker: int, round: int, fault: int) -> Refusal:
    return Refusal(
        worker=worker,
        reason="message",
        message=f"round {round}: the votes of worker {worker} are {FAULTS[fault]}, and do not count",
    )
