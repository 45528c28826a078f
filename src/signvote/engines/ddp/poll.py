"""The votes of one rank, round by round: every rank is a worker, and decides a share of the coordinates.

    gradients -> encode -> signs        as they arrive, chunk by chunk
    all-to-all                          each rank gets all votes on its pieces              N / 8 bytes
    vote                                by the rule, on the pieces; evidence is counted
    all-gather                          the decisions and their evidence                    N / 8 bytes
    learn                               from all evidence, the same on every rank

`sender.py` does the first step, `exchange.py` moves the bytes. Signs, votes and trust come from `core`, so the
result equals the simulator's bit for bit. A rank whose gradient is not finite abstains; all ranks know that before the
vote. If the ranks of a worker hold shards, each votes on its own, and evidence is summed over all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from signvote.core.bits import coin_for
from signvote.core.chunks import vote_in_chunks
from signvote.core.encoding import Encoding, Memory
from signvote.core.header import NO_GRADIENT, NON_FINITE, REASONS
from signvote.core.layout import Layout
from signvote.core.report import RoundReport
from signvote.core.server import Server
from signvote.core.trust import NOTHING, Evidence, State
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.engines.ddp import comparison
from signvote.engines.ddp.comparison import Comparison
from signvote.engines.ddp.evidence import Packings, in_a_row, with_counts
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.fixed import Fixed, Outcome
from signvote.engines.ddp.handshake import Handshake, settings_of
from signvote.engines.ddp.pieces import pieces
from signvote.engines.ddp.sender import Sender
from signvote.engines.ddp.shares import Shares
from signvote.engines.ddp.sparse_exchange import SparseExchange
from signvote.engines.ddp.status import Status, Statuses, gathered
from signvote.engines.ddp.team import Team, own, placed
from signvote.engines.ddp.torch_names import local_of
from signvote.engines.ddp.transport import Transport
from signvote.errors import EngineError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes

log = logging.getLogger("signvote")

VERSION = 1


class Poll(Fixed):
    """One rank's side of the votes, and what it keeps between rounds.

    Args:
        parameters: by name; shards of them as FSDP2 makes them.
        server: makes the decisions on this rank's pieces. Its rule must own all coordinates.
        team: the ranks.
        encoding: how gradients become signs.
        transport: how votes travel.
        worker_id: the key of this worker's trust; None: its rank among the voters.
        dtype: of gradients and momentum; None: the widest of the parameters.
        steps: a text about how parameters step by decisions, which all ranks must share.

    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        server: Server,
        team: Team,
        *,
        encoding: Encoding,
        transport: Transport,
        worker_id: int | None = None,
        dtype: torch.dtype | None = None,
        steps: str = "",
    ) -> None:
        self.parameters = parameters
        self.server = server
        self.team = team
        self.encoding = encoding = encoding.suiting(server.rule)
        self.comparison = Comparison(parameters, transport.check_every)
        settings = settings_of(
            server,
            encoding,
            chunk=transport.chunk,
            check_every=transport.check_every,
            steps=steps,
        )  # before the rule owns its coordinates, which differ by rank
        voters = team.voters
        self.handshake = Handshake(voters.rank if worker_id is None else worker_id, settings)
        self.placement = placed(self.layout, parameters, team, encoding)
        device = local_of(next(iter(parameters.values()))).device
        chunk = transport.chunk
        if voters.world == 1 and device.type != "cpu":
            chunk = max(chunk, self.placement.size)  # nothing travels, so fewer launches are better
        shares = Shares.of(self.placement.size, voters.world, chunk)
        owned = [self.placement.decided_by(shares, rank) for rank in range(voters.world)]
        everything = [(0, self.layout.size)]
        own(server.rule, everything if team.is_alone else owned[voters.rank], team)
        dtypes = [parameter.dtype for parameter in parameters.values()]
        widest = reduce(torch.promote_types, dtypes)
        exchange = Exchange if encoding.top is None else SparseExchange
        self.exchange = exchange(
            voters,
            shares,
            vote_planes=encoding.planes,
            decision_planes=1 if encoding.zeros == "coin" else 2,
            device=device,
            overlap=transport.overlap and not team.is_alone,
        )
        self.sender = Sender(
            parameters, self.placement, self.exchange, encoding, dtype or widest, is_alone=team.is_alone
        )
        tensors = self.layout.ranges
        self.packings = Packings(server.rule.groups, owned, tensors, dense=encoding.planes == 1)
        self.batch_sizes: tuple[int, ...] = ()  # that the workers declared in the last round; 0: not declared
        self._told: RoundReport | None = None  # the last one whose notices were logged
        self.begin()

    @property
    def worker_id(self) -> int:
        """The key of this worker's trust."""
        return self.handshake.worker_id

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters, as without shards."""
        return self.server.layout

    @property
    def check_every(self) -> int:
        """Rounds between two comparisons of the parameters; 0: never."""
        return self.comparison.every

    @property
    def round(self) -> int:
        """The last round decided, from 1."""
        return self.server.last_round or 0

    @property
    def report(self) -> RoundReport:
        """The last round."""
        return self.server.report

    def begin(self) -> None:
        """Prepare for the next round's gradients."""
        next_round = self.round + 1
        coin = coin_for(self.server.zeros, self.server.run, next_round, self.worker_id)
        self.exchange.begin(next_round)
        self.sender.begin(coin)

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Take in gradients; encode and send the chunks that are complete."""
        self._introduce()
        self.sender.put(parameters, gradients)

    def put_all(self, gradients: list[Tensor | None]) -> None:
        """Take in the gradients of all parameters, in the order of the layout, but those that came before."""
        self._introduce()
        self.sender.put_all(gradients)

    def _introduce(self) -> None:
        """Compare the ranks, before they vote for the first time."""
        if not self.handshake.ids:
            self.handshake.run(self.team, self.layout, self.parameters, self.round)

    # ---- the decision ----------------------------------------------------------------------------

    def decide(self, batch_size: int, *, seconds: float = 0.0, used: Sequence[bool] = ()) -> Outcome:
        """Hold the vote.

        Args:
            batch_size: declared by this rank; 0: not declared.
            seconds: that this rank worked; 0: unknown.
            used: which parameters have a gradient on this rank; if none of them has, this worker abstains.

        """
        self.sender.put_missing()
        self.exchange.wait()
        self._tell()
        voted = self._voted(used)
        mine = self._status(batch_size, seconds, used, voted)
        claimed = self.sender.claims(self.layout)
        statuses = gathered(mine, used, claimed, self.exchange, self.team.everyone)
        workers = self._compared(statuses)
        decision, voting = self._decision(workers, statuses.claims, voted)
        self.team.name_stage(f"round {self.round + 1}")
        self._remember(workers, voting, voted)
        self.begin()
        if voted is None:
            self._tell()
        is_decided = self.report.is_decided if voted is None else voted
        return Outcome(decision, statuses.used, [each.nanoseconds / 1e9 for each in workers], is_decided)

    def _decision(
        self,
        workers: Sequence[Status],
        claims: Tensor,
        voted: Tensor | None,
    ) -> tuple[Planes, Voters | None]:
        """The decision on the coordinates that this rank holds, and who made it; None: nobody, they were too few."""
        ids = self.handshake.ids
        ranks = []  # that vote
        abstained = {}
        for rank in self.handshake.by_worker:
            status = workers[rank]
            if status.votes:
                ranks.append(rank)
            else:
                abstained[ids[rank]] = REASONS[status.reason]
        round = self.round + 1
        if len(ranks) < self.server.min_voters:  # nothing moves, as all ranks know
            self.server.learn(round, NOTHING, abstained)
            return empty_decision(self.placement.size, None, self.exchange.device), None
        if self.team.is_alone:
            votes = self._alone(claims, voted)
            reasons = {} if voted is None else {self.worker_id: REASONS[NON_FINITE]}
            return self.server.decide_planes(round, votes, reasons), votes
        voting = self._voting(ranks, claims)
        decision, evidence = self._vote(ranks, voting)
        sizes = dict(zip(voting.workers, voting.batch_sizes, strict=True))
        self.server.learn(round, evidence, abstained, sizes)
        return decision, voting

    def _remember(self, workers: Sequence[Status], voting: Voters | None, voted: Tensor | None) -> None:
        """Keep what this round added to the memory of a worker that voted."""
        if voted is not None:
            self.sender.keep_memory_if(voted)
        elif workers[self.team.voters.rank].votes:
            self.sender.keep_memory()
        if voting is not None and voting.claims is not None:
            counted = self.worker_id in voting.workers if voted is None else voted
            self.sender.correct(self.server.rule.scale(voting), self.layout, counted)

    def _voted(self, used: Sequence[bool]) -> Tensor | None:
        """Whether this rank votes, if only its device knows; None: the host knows, or has to.

        A rank that is alone has nobody to tell, so it need not wait.
        """
        finite = self.sender.finite
        has_gradient = any(used) or not len(used)
        may_go_on = self.team.is_alone and has_gradient and self.server.min_voters == 1
        return finite if may_go_on and isinstance(finite, Tensor) else None

    def _status(self, batch_size: int, seconds: float, used: Sequence[bool], voted: Tensor | None) -> Status:
        """The status of this rank."""
        reason = 0
        if voted is None and not self.sender.finite:
            reason = NON_FINITE
        elif len(used) and not any(used):
            reason = NO_GRADIENT
        next_round = self.round + 1
        is_compared = self.comparison.is_due(next_round, self.team)
        return Status(
            round=next_round,
            votes=int(not reason),
            reason=reason,
            batch_size=batch_size,
            nanoseconds=int(1e9 * seconds),
            traveled=self.exchange.nanoseconds,
            digest=self.comparison.digest() if is_compared else 0,
        )

    def _compared(self, statuses: Statuses) -> list[Status]:
        """The status of each voter; raise if ranks have different parameters."""
        if self.team.is_alone:
            (mine,) = statuses.ranks
            self.batch_sizes = (mine.batch_size,)
            return statuses.ranks
        workers = statuses.of_voters(self.handshake)
        self.batch_sizes = tuple(status.batch_size for status in workers)
        digests = [status.digest for status in statuses.ranks]
        shards = [member.shard for member in self.handshake.members]
        self._check_digests(digests, shards, f"round {self.round + 1}")
        return workers

    def _voting(self, ranks: list[int], claims: Tensor) -> Voters:
        """The workers of these ranks, and what they declare and claim."""
        return Voters(
            workers=tuple(self.handshake.ids[rank] for rank in ranks),
            batch_sizes=tuple(self.batch_sizes[rank] for rank in ranks),
            claims=claims[ranks] if self.encoding.has_claims else None,
        )

    def _alone(self, claims: Tensor, voted: Tensor | None) -> Votes:
        """All votes there are: those of this rank, on all coordinates."""
        return Votes(
            workers=(self.worker_id,),
            batch_sizes=self.batch_sizes,
            claims=claims if self.encoding.has_claims else None,
            planes=self.sender.planes.map(lambda plane: plane[None]),
            n=self.layout.size,
            present=None if voted is None else voted[None],
        )

    def _vote(self, ranks: list[int], voters: Voters) -> tuple[Planes, Evidence]:
        """Decide this rank's pieces; share the decisions, and the evidence of all ranks."""
        mine = vote_in_chunks(
            self.server.rule,
            self._pieces(ranks, voters),
            coin_for(self.server.zeros, self.server.run, self.round + 1),
        )
        decision, total = self._shared(mine)
        if self.team.shards is not None:
            total = self.exchange.gather(total, self.team.shards).sum(0).cpu()
        return decision, with_counts(mine, total)

    def _shared(self, mine: Evidence) -> tuple[Planes, Tensor]:
        """The decision on all pieces, and the counts of all ranks, added."""
        packing = self.packings.of(mine)
        counts = in_a_row(mine)
        message = packing.pack(counts, self.team.voters.rank)
        decision, messages = self.exchange.share(message)
        total = packing.total(messages)
        if total is None:  # a rule that counts something else
            total = self.exchange.gather(counts).sum(0).cpu()
        return decision, total

    def _pieces(self, ranks: list[int], voters: Voters) -> Iterator[tuple[Planes, Votes]]:
        """The pieces that this rank decides: for each the buffer for its decision, and the votes on it."""
        claims = None if voters.claims is None else voters.claims.to(self.exchange.group.device)
        for piece in pieces(self.placement, self.exchange, ranks):
            votes = Votes(
                workers=voters.workers,
                planes=piece.votes,
                n=piece.n,
                first=piece.first,
                batch_sizes=voters.batch_sizes,
                claims=claims,
            )
            yield piece.decision, votes

    def _tell(self) -> None:
        """Log once what was noticed in the last round, on one rank, because all know the same."""
        report = self.report
        if report is self._told or self.team.everyone.rank != 0:
            return
        self._told = report
        for notice in report.notices:
            log.warning("signvote: %s", notice)

    # ---- memory and state ------------------------------------------------------------------------

    def check_parameters(self, stage: str) -> None:
        """Raise if ranks have different parameters, unless nobody wants to know. Every rank calls this."""
        if self.check_every:
            digests, shards = self.comparison.of_everyone(self.team)
            self._check_digests(digests, shards, stage)

    def _check_digests(self, digests: Sequence[int], shards: Sequence[int], stage: str) -> None:
        """Raise if ranks have different parameters. The step may be repeated then."""
        try:
            comparison.check(digests, shards, self.team, stage)
        except EngineError:
            self.begin()
            raise

    def state_dict(self) -> State:
        """This rank's state, besides the model. The states of all ranks together make a checkpoint."""
        memory = self.sender.memory.map(Tensor.clone)
        return {
            **self._identity(),
            "worker": self.worker_id,
            "average": memory.average,
            "residual": memory.residual,
            "belief": memory.belief,
            "server": self.server.state_dict(),
        }

    def load_state_dict(self, *states: State) -> None:
        """Resume from the states of all ranks. Their number may differ from now; a new rank starts without momentum."""
        if not states:
            raise StateError("no state given; wanted those of all ranks")
        for state in states:
            check_state(upgraded(state, "a rank's state", VERSION), **self._identity())
        self.resume(*(state["server"] for state in states))
        for state in states:
            if state["worker"] == self.worker_id:
                memory = Memory(state["average"], state.get("residual"), state.get("belief"))
                self.sender.load_memory(memory)

    def resume(self, *servers: State) -> None:
        """Resume from the states of the servers of all ranks, without memory of earlier gradients."""
        self.server.load_state_dict(*servers)
        self.sender.memory = self.sender.no_memory()
        self.handshake.ids = []
        self.begin()

    def _identity(self) -> State:
        return {
            "kind": "vote",
            "version": VERSION,
            "layout": self.layout.digest.hex(),
        }
