"""One-bit training over torch.distributed: every rank is a worker, and decides a share of the coordinates.

    gradients -> encode -> signs        as they arrive, chunk by chunk
    all-to-all                          each rank gets everybody's votes on its pieces      N / 8 bytes
    vote                                by the rule, on the pieces; evidence is counted
    all-gather                          decisions, and the evidence that goes with them     N / 8 bytes
    learn                               everybody the same, from all of it

`VoteState` is what a round is; `exchange.py` moves the bytes, `gradients.py` collects the gradients. Signs, votes and
trust come from `core`, so the result equals the simulator's bit for bit. A rank whose gradient is not finite is found
out before any vote and abstains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.ballot import NON_FINITE, REASONS
from signvote.core.bits import Zeros, coin_for
from signvote.core.encoder import Encoded, Encoding, Memory, encode
from signvote.core.layout import Layout, trainable
from signvote.core.rule import Rule
from signvote.core.server import RoundReport, Server, vote_in_chunks
from signvote.core.trust import Evidence, State
from signvote.core.vote import Votes
from signvote.engines.ddp.balance import Balancer, Stopwatch
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.gradients import Gradients
from signvote.engines.ddp.handshake import Handshake, check_model
from signvote.engines.ddp.meeting import Meeting
from signvote.engines.ddp.shares import Shares
from signvote.errors import EngineError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import WORD, Planes, words_for

VERSION = 1
CHUNK = 2**21  # coordinates that travel together
COUNTS = ("mismatches", "cast", "differ", "common")  # of Evidence, as they are sent


class Bucket(NamedTuple):
    """A bucket of DDP's that waits for the decision."""

    buffer: Tensor
    parameters: list[Tensor]
    views: list[Tensor]  # of the buffer, shaped like the parameters
    future: torch.futures.Future[Tensor]


class VoteState:
    """What `vote_hook` and `vote_gradients` need between rounds; every rank makes one, as with DDP itself.

    Args:
        model: the module, or its DistributedDataParallel.
        rule: as for `Server`; options of the rule follow as keyword arguments.
        momentum: of the gradients whose signs are sent; leave the optimizer's at 0.
        zeros: what a zero gradient sends, and a zero tally decides.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all. As with `feedback`,
            votes then travel when all gradients are there.
        feedback: add to the next signal what this round's signs left out.
        run: the run's number, the same on all ranks.
        batch_size: this rank's, for rules that look at it. Change it whenever it changes.
        worker_id: under which trust is kept; None: the rank. Give it if ranks may change machines.
        balancer: sets batch sizes; it is shown how long each rank took.
        scaler: AMP's, if there is one: gradients are unscaled before the vote and decisions scaled.
        overlap: chunks travel while the rest of the gradients is computed; False: the same, in turn.
        timeout: seconds to wait for a rank; the error says which ranks are alive.
        chunk: coordinates that travel together.
        group: the process group of the ranks that take part; None: all.
        encoding: momentum, zeros, top and feedback as one object, instead of these.
        options: of the rule.

    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "pooled",
        *,
        momentum: float = 0.9,
        zeros: Zeros = "coin",
        top: float | None = None,
        feedback: bool = False,
        run: int = 0,
        batch_size: int = 0,
        worker_id: int | None = None,
        balancer: Balancer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        timeout: float = 300.0,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        encoding: Encoding | None = None,
        **options: object,
    ) -> None:
        check_model(model)
        if encoding is None:
            encoding = Encoding(momentum=momentum, zeros=zeros, top=top, feedback=feedback)
        self.encoding = encoding
        self.parameters = trainable(model.module if isinstance(model, DistributedDataParallel) else model)
        self.server = Server(Layout.of(self.parameters), rule, run=run, zeros=encoding.zeros, **options)
        device = next(iter(self.parameters.values())).device
        self.meeting = Meeting(group, device, timeout)
        shares = Shares.of(self.layout.size, self.meeting.world, chunk)
        self.server.rule.own(shares.owned(self.meeting.rank))
        self.gradients = Gradients(self.parameters, self.layout, shares)
        self.exchange = Exchange(
            self.meeting,
            shares,
            vote_planes=encoding.planes,
            decision_planes=1 if encoding.zeros == "coin" else 2,
            device=device,
            overlap=overlap,
        )
        settings = [self.server.rule.name, run, chunk, str(sorted(options.items())), asdict(encoding)]
        self.handshake = Handshake(
            self.meeting.rank if worker_id is None else worker_id, json.dumps(settings)
        )
        self.batch_size = batch_size
        self.balancer = balancer
        self.scaler = scaler
        self.stopwatch = Stopwatch()
        self.memory = self._no_memory()
        self.buckets: list[Bucket] = []  # of DDP's, in this round
        self._encoded: list[Encoded] = []  # of this round, by chunk or all at once

    @property
    def worker_id(self) -> int:
        """Under which trust is kept."""
        return self.handshake.worker_id

    @property
    def layout(self) -> Layout:
        """Of the trained parameters."""
        return self.server.layout

    @property
    def round(self) -> int:
        """The last round decided, from 1."""
        return self.server.last_round or 0

    @property
    def report(self) -> RoundReport:
        """What happened in the last round: the voters, the abstentions and why, how often each was overruled."""
        return self.server.report

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks in the last round."""
        return self.exchange.bytes_sent

    # ---- gradients come in -----------------------------------------------------------------------

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Take in gradients; the chunks that they complete are encoded and sent."""
        if not self.handshake.ids:
            self.handshake.run(self.meeting, self.layout, self.parameters, self.round)
        self._send(self.gradients.put(parameters, gradients))

    def _send(self, complete: list[int]) -> None:
        """Send chunks that are complete; where a sign depends on all coordinates, all chunks when all are."""
        if not self.encoding.needs_whole_vector:
            for number in complete:
                self.exchange.submit(partial(self._encode_and_send, range(number, number + 1)))
        elif complete and self.gradients.is_complete:
            self.exchange.submit(partial(self._encode_and_send, range(self.exchange.shares.chunks)))

    def _encode_and_send(self, numbers: range) -> None:
        """Encode consecutive chunks as one vector, and send each."""
        chunks = [self.exchange.shares.chunk(number) for number in numbers]
        at = slice(chunks[0].start, chunks[-1].stop)
        gradient = self.gradients.vector[at]
        if self.scaler is not None:
            gradient.mul_(1 / self.scaler.get_scale())
        coin = coin_for(self.encoding.zeros, self.server.run, self.round + 1, self.worker_id)
        memory = self.memory.map(lambda kept: kept[at])
        found = encode(gradient, memory, self.encoding, coin and coin.after(at.start), out=gradient)
        self._encoded.append(found)
        for number, chunk in zip(numbers, chunks, strict=True):
            words = slice((chunk.start - at.start) // WORD, words_for(chunk.stop - at.start))
            self.exchange.send(number, found.planes.map(lambda plane: plane[words]))  # noqa: B023

    # ---- the decision ----------------------------------------------------------------------------

    def decide(self, since: float) -> Planes:
        """Vote, when all gradients are in; the decision on all coordinates. `since`: when they were."""
        self._send(self.gradients.put_missing())
        self.exchange.wait()
        finite = all(bool(found.finite) for found in self._encoded)
        told = self._tell(finite, self.stopwatch.worked(since))
        voters = [rank for rank in self.handshake.in_order if told[rank][1]]
        evidence = vote_in_chunks(
            self.server.rule_for(len(voters)),
            self._pieces(voters, told),
            coin_for(self.server.zeros, self.server.run, self.round + 1),
        )
        decision, evidence = self._share(evidence)
        ids = self.handshake.ids
        abstained = {ids[r]: REASONS[NON_FINITE] for r in self.handshake.in_order if r not in voters}
        self.server.learn(self.round + 1, evidence, abstained)
        self.meeting.stage = f"round {self.round + 1}"
        if finite:
            self._keep_memory()
        elif self.scaler is not None:
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        if self.balancer is not None:
            self.balancer.observe([nanoseconds / 1e9 for *_, nanoseconds in told])
        self._begin()
        return decision

    def _begin(self) -> None:
        """Be ready for the next round's gradients."""
        self._encoded = []
        self.gradients.begin()
        self.exchange.forget()
        self.stopwatch.begin()

    def _tell(self, finite: bool, worked: float) -> list[list[int]]:
        """Exchange what each rank says of this round: its number, whether it is finite, batch size, nanoseconds."""
        if self.balancer is not None:
            self.batch_size = self.balancer.sizes(self.round)[self.meeting.rank]
        mine = torch.tensor([self.round + 1, finite, self.batch_size, int(1e9 * worked)])
        told: list[list[int]] = self.meeting.all_gather(mine.to(self.meeting.device)).tolist()
        if len({each[0] for each in told}) > 1:
            raise EngineError(f"ranks are in different rounds: {[each[0] for each in told]}")
        return told

    def _pieces(self, voters: list[int], told: list[list[int]]) -> Iterator[tuple[Planes, Votes]]:
        """This rank's piece of each chunk: where its decision goes, and the votes on it."""
        workers = tuple(self.handshake.ids[rank] for rank in voters)
        sizes = tuple(told[rank][2] for rank in voters)
        shares = self.exchange.shares
        for number in range(shares.chunks):
            first, n = shares.piece(number, self.meeting.rank)
            planes = self.exchange.received(number, voters, n)
            votes = Votes(workers=workers, planes=planes, n=n, first=first, batch_sizes=sizes)
            yield self.exchange.decided(number, n), votes

    def _share(self, mine: Evidence) -> tuple[Planes, Evidence]:
        """Put all ranks' decisions together, and add all ranks' evidence up."""
        counts = {name: count for name in COUNTS if (count := getattr(mine, name)) is not None}
        decision, totals = self.exchange.share(list(counts.values()))
        total: dict[str, Any] = dict(zip(counts, totals, strict=True))
        return decision, replace(mine, **total)

    def fill(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor], decision: Planes) -> None:
        """Write the decision in place of gradients, times AMP's scale, by which the optimizer's step will divide."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.gradients.fill(parameters, gradients, decision, scale)
        self.stopwatch.resume()

    # ---- memory and state ------------------------------------------------------------------------

    def _no_memory(self) -> Memory:
        vector = self.gradients.vector
        average = torch.zeros_like(vector) if self.encoding.momentum else None
        residual = torch.zeros_like(vector) if self.encoding.feedback else None
        return Memory(average, residual)

    def _keep_memory(self) -> None:
        """Keep what `encode` returned. The new average lies in the gradients' vector: the two change places."""
        average = self.memory.average
        if average is not None:
            self.gradients.vector, average = average, self.gradients.vector
        self.memory = Memory(average, self._encoded[0].memory.residual)

    def state_dict(self) -> State:
        """What this rank needs to continue besides the model; all ranks' states together make a checkpoint."""
        memory = self.memory.map(Tensor.clone)
        return {
            **self._identity(),
            "worker": self.worker_id,
            "average": memory.average,
            "residual": memory.residual,
            "server": self.server.state_dict(),
        }

    def load_state_dict(self, *states: State) -> None:
        """Continue from the states of all ranks, of a world of any size; a rank that is new has no momentum yet."""
        if not states:
            raise StateError("no state given; wanted those of all ranks")
        for state in states:
            check_state(upgraded(state, "a rank's state", VERSION), **self._identity())
        self.server.load_state_dict(*(state["server"] for state in states))
        self.memory = self._no_memory()
        for state in states:
            if state["worker"] == self.worker_id:
                self._load_memory(Memory(state["average"], state.get("residual")))
        self.handshake.ids = []
        self.stopwatch = Stopwatch()
        self._begin()

    def _load_memory(self, saved: Memory) -> None:
        for mine, its in zip(self.memory, saved, strict=True):
            if mine is not None and its is not None:
                mine.copy_(its)

    def _identity(self) -> State:
        return {"kind": "vote", "version": VERSION, "layout": self.layout.digest.hex()}
