"""One-bit training over torch.distributed: every rank is a worker, and decides a share of the coordinates.

    gradients -> encode -> signs        as they arrive, chunk by chunk
    all-to-all                          each rank gets all votes on its pieces              N / 8 bytes
    vote                                by the rule, on the pieces; evidence is counted
    all-gather                          the decisions and their evidence                    N / 8 bytes
    learn                               from all evidence, the same on every rank

`VoteState` does the round; `exchange.py` moves the bytes, `gradients.py` collects the gradients. Signs, votes and
trust come from `core`, so the result equals the simulator's bit for bit. A rank whose gradient is not finite abstains;
all ranks know that before the vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.ballot import NON_FINITE, REASONS
from signvote.core.bits import Zeros, coin_for
from signvote.core.encoder import Encoded, Encoding, Memory, check_batch_size, encode
from signvote.core.layout import Layout, trainable
from signvote.core.rule import Rule
from signvote.core.samples import SampleCount
from signvote.core.server import RoundReport, Server, vote_in_chunks
from signvote.core.trust import NOTHING, Evidence, State
from signvote.core.vote import Votes, empty_decision
from signvote.engines.ddp import drift
from signvote.engines.ddp.balance import Balancer, Stopwatch
from signvote.engines.ddp.evidence import Packings, in_a_row, with_counts
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.gradients import Bucket, Gradients
from signvote.engines.ddp.handshake import Handshake, check_model, settings_of
from signvote.engines.ddp.process_group import ProcessGroup
from signvote.engines.ddp.shares import Shares
from signvote.engines.ddp.status import Status, gathered
from signvote.engines.ddp.steps import StepWatch
from signvote.errors import ConfigError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import WORD, Planes, words_for

VERSION = 1
CHUNK = 2**21  # coordinates that travel together
CHECK_EVERY = 100  # rounds


class VoteState:
    """The state of `vote_hook` and `vote_gradients` between rounds. Every rank makes one, as with DDP itself.

    Args:
        model: the module, or its DistributedDataParallel.
        rule: as for `Server`; options of the rule follow as keyword arguments.
        momentum: of the gradients whose signs are sent; leave the optimizer's at 0.
        zeros: what a zero gradient sends, and a zero tally decides.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all. As with `feedback`,
            votes then travel after all gradients are computed.
        feedback: add the residual, the part that this round's signs left out, to the next signal.
        run: the run's number, the same on all ranks.
        batch_size: samples of this rank in a round, for rules that use it; 0: not declared. None: the balancer's, or
            else the first dimension of the batches that pass through the model, evaluation aside.
        worker_id: the key of this rank's trust; None: the rank. Give it if ranks may change machines.
        min_voters: a round with fewer voters decides nothing, and no parameter moves, not even by weight decay:
            gradients become None, which an optimizer skips, or infinite, with which AMP's scaler skips the step.
        balancer: sets batch sizes from the time that each rank took.
        scaler: AMP's scaler, if there is one: gradients are unscaled before the vote and decisions scaled.
        overlap: chunks travel while the rest of the gradients is computed; False: the same, one after the other.
        timeout: seconds to wait for a rank; the error names the ranks that are alive.
        check_every: rounds between two looks whether ranks have equal parameters and step by decisions; 0: never.
        chunk: coordinates that travel together.
        group: the process group of the ranks that vote; None: all.
        encoding: momentum, zeros, top and feedback as one object, instead of these.
        options: keyword arguments of the rule.

    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "weighted",
        *,
        momentum: float = 0.9,
        zeros: Zeros = "coin",
        top: float | None = None,
        feedback: bool = False,
        run: int = 0,
        batch_size: int | None = None,
        worker_id: int | None = None,
        min_voters: int = 1,
        balancer: Balancer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        timeout: float = 300.0,
        check_every: int = CHECK_EVERY,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        encoding: Encoding | None = None,
        **options: Any,
    ) -> None:
        check_model(model)
        if batch_size is not None:
            check_batch_size(batch_size)
        if check_every < 0:
            raise ConfigError(f"check_every is {check_every}; it must be 0 or more rounds")
        if encoding is None:
            encoding = Encoding(momentum=momentum, zeros=zeros, top=top, feedback=feedback)
        self.encoding = encoding
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self.parameters = trainable(module)
        self.server = Server(
            Layout.of(self.parameters),
            rule,
            run=run,
            zeros=encoding.zeros,
            min_voters=min_voters,
            **options,
        )
        settings = settings_of(self.server, encoding, chunk=chunk, check_every=check_every)
        device = next(iter(self.parameters.values())).device
        self.group = ProcessGroup(group, device, timeout)
        shares = Shares.of(self.layout.size, self.group.world, chunk)
        self.server.rule.own(shares.owned(self.group.rank))
        self.gradients = Gradients(self.parameters, self.layout, shares)
        self.exchange = Exchange(
            self.group,
            shares,
            vote_planes=encoding.planes,
            decision_planes=1 if encoding.zeros == "coin" else 2,
            device=device,
            overlap=overlap,
        )
        self.packings = Packings(
            getattr(self.server.rule, "groups", [(0, self.layout.size)]),
            shares,
            dense=encoding.planes == 1,
        )
        worker = self.group.rank if worker_id is None else worker_id
        self.handshake = Handshake(worker, settings)
        self.check_every = check_every
        self.batch_size = batch_size
        self.batch_sizes: tuple[int, ...] = ()  # that the ranks declared in the last round; 0: not declared
        self.samples = SampleCount(module)  # since the last vote
        self.balancer = balancer
        self.scaler = scaler
        self.stopwatch = Stopwatch()
        self.steps = StepWatch(self.parameters.values(), check_every)
        self.memory = self._no_memory()
        self.buckets: list[Bucket] = []  # of DDP, in this round
        self._encoded: list[Encoded] = []  # in this round, by chunk or all at once

    @property
    def worker_id(self) -> int:
        """The key of this rank's trust."""
        return self.handshake.worker_id

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters."""
        return self.server.layout

    @property
    def round(self) -> int:
        """The last round decided, from 1."""
        return self.server.last_round or 0

    @property
    def report(self) -> RoundReport:
        """The last round: the voters, the abstentions and their reasons, how often each voter was overruled."""
        return self.server.report

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks in the last round."""
        return self.exchange.bytes_sent

    # ---- gradients come in -----------------------------------------------------------------------

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Copy gradients; encode and send the chunks that are complete."""
        if not self.handshake.ids:
            self.handshake.run(self.group, self.layout, self.parameters, self.round)
        self._send(self.gradients.put(parameters, gradients))

    def _send(self, complete: list[int]) -> None:
        """Send complete chunks. Where a sign depends on all coordinates, send all chunks after the last gradient."""
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
        first_coin = None if coin is None else coin.after(at.start)
        encoded = encode(gradient, memory, self.encoding, first_coin, out=gradient)
        self._encoded.append(encoded)
        for number, chunk in zip(numbers, chunks, strict=True):
            first = (chunk.start - at.start) // WORD
            last = words_for(chunk.stop - at.start)
            words = slice(first, last)
            planes = encoded.planes.map(lambda plane: plane[words])  # noqa: B023
            self.exchange.send(number, planes)

    # ---- the decision ----------------------------------------------------------------------------

    def decide(self, since: float) -> Planes:
        """Hold the vote and return the decision on all coordinates.

        Args:
            since: when the last gradient was computed.

        """
        self._send(self.gradients.put_missing())
        self.exchange.wait()
        finite = all(bool(encoded.finite) for encoded in self._encoded)
        statuses = self._exchange_status(finite, self.stopwatch.worked(since))
        voters = [rank for rank in self.handshake.by_worker if statuses[rank].finite]
        if len(voters) >= self.server.min_voters:
            decision, evidence = self._vote(voters)
        else:  # nothing moves, as all ranks know
            decision = empty_decision(self.layout.size, None, self.gradients.vector.device)
            evidence = NOTHING
        sizes = {self.handshake.ids[rank]: statuses[rank].batch_size for rank in voters}
        self.server.learn(self.round + 1, evidence, self._abstained(voters), sizes)
        self.group.stage = f"round {self.round + 1}"
        if finite:
            self._keep_memory()
        elif self.report.is_decided:  # otherwise the scaler sees that the step is skipped
            self._back_off()
        if self.balancer is not None:
            self.balancer.observe([status.nanoseconds / 1e9 for status in statuses])
        self._begin()
        return decision

    def _vote(self, voters: list[int]) -> tuple[Planes, Evidence]:
        """Decide this rank's pieces; share the decisions and the evidence of all ranks."""
        mine = vote_in_chunks(
            self.server.rule,
            self._pieces(voters),
            coin_for(self.server.zeros, self.server.run, self.round + 1),
        )
        packing = self.packings.of(mine)
        counts = in_a_row(mine)
        message = packing.pack(counts, self.group.rank)
        decision, messages = self.exchange.share(message)
        total = packing.total(messages)
        if total is None:  # a rule that counts something else
            total = self.exchange.gather(counts).sum(0).cpu()
        return decision, with_counts(mine, total)

    def _abstained(self, voters: list[int]) -> dict[int, str]:
        """The worker ids of the ranks that do not vote, and the reason."""
        ids = self.handshake.ids
        silent = [rank for rank in self.handshake.by_worker if rank not in voters]
        return {ids[rank]: REASONS[NON_FINITE] for rank in silent}

    def _back_off(self) -> None:
        """Lower AMP's scale, with which the gradients were not finite."""
        if self.scaler is not None:
            scale = self.scaler.get_scale() * self.scaler.get_backoff_factor()
            self.scaler.update(scale)

    def _begin(self) -> None:
        """Prepare for the next round's gradients."""
        self._encoded = []
        self.samples.total = 0
        self.gradients.begin()
        self.exchange.begin()
        self.stopwatch.begin()

    def _exchange_status(self, finite: bool, worked: float) -> list[Status]:
        """The status of every rank, by rank."""
        is_checked = self.check_every and (self.round + 1) % self.check_every == 0
        mine = Status(
            round=self.round + 1,
            finite=finite,
            batch_size=self._declared(),
            nanoseconds=int(1e9 * worked),
            digest=drift.digest(self.parameters.values()) if is_checked else 0,
        )
        statuses = gathered(mine, self.exchange)
        self.batch_sizes = tuple(status.batch_size for status in statuses)
        digests = [status.digest for status in statuses]
        if len(set(digests)) > 1:
            self._begin()  # the step may be repeated
            drift.check(digests, self.group.ranks, f"round {self.round + 1}")
        return statuses

    def _declared(self) -> int:
        """The batch size of this rank in this round."""
        counted = self.samples.total
        if self.balancer is not None:
            planned = self.balancer.sizes_after(self.round)
            counted = planned[self.group.rank]
        return counted if self.batch_size is None else self.batch_size

    def digests(self) -> list[int]:
        """A digest of the parameters of every rank. Every rank calls this."""
        mine = torch.tensor([drift.digest(self.parameters.values())], device=self.group.device)
        by_rank: list[int] = self.group.all_gather(mine)[:, 0].tolist()
        return by_rank

    def _pieces(self, voters: list[int]) -> Iterator[tuple[Planes, Votes]]:
        """This rank's piece of each chunk: the buffer for its decision, and the votes on it."""
        workers = tuple(self.handshake.ids[rank] for rank in voters)
        sizes = tuple(self.batch_sizes[rank] for rank in voters)
        shares = self.exchange.shares
        for number in range(shares.chunks):
            first, n = shares.piece(number, self.group.rank)
            votes = Votes(
                workers=workers,
                planes=self.exchange.received(number, voters, n),
                n=n,
                first=first,
                batch_sizes=sizes,
            )
            yield self.exchange.decided(number, n), votes

    def fill(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor], decision: Planes) -> None:
        """Write the decision in place of gradients, times AMP's scale: the optimizer's step divides by it.

        If nothing was decided, AMP gets infinities, with which it skips the step.
        """
        if self.scaler is None:
            self.gradients.fill(parameters, gradients, decision, 1.0)
        elif self.report.is_decided:
            self.gradients.fill(parameters, gradients, decision, self.scaler.get_scale())
        else:
            for gradient in gradients:
                gradient.fill_(torch.inf)
        self.stopwatch.resume()

    # ---- memory and state ------------------------------------------------------------------------

    def _no_memory(self) -> Memory:
        vector = self.gradients.vector
        average = torch.zeros_like(vector) if self.encoding.momentum else None
        residual = torch.zeros_like(vector) if self.encoding.feedback else None
        return Memory(average, residual)

    def _keep_memory(self) -> None:
        """Keep the memory that `encode` returned. The new average is in the gradients' vector: swap the two."""
        average = self.memory.average
        if average is not None:
            self.gradients.vector, average = average, self.gradients.vector
        residual = self._encoded[0].memory.residual
        self.memory = Memory(average, residual)

    def state_dict(self) -> State:
        """This rank's state, besides the model. The states of all ranks together make a checkpoint."""
        memory = self.memory.map(Tensor.clone)
        return {
            **self._identity(),
            "worker": self.worker_id,
            "average": memory.average,
            "residual": memory.residual,
            "server": self.server.state_dict(),
        }

    def load_state_dict(self, *states: State) -> None:
        """Resume from the states of all ranks. Their number may differ from now; a new rank starts without momentum."""
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
        for tensor, its_value in zip(self.memory, saved, strict=True):
            if tensor is not None and its_value is not None:
                tensor.copy_(its_value)

    def _identity(self) -> State:
        return {"kind": "vote", "version": VERSION, "layout": self.layout.digest.hex()}
