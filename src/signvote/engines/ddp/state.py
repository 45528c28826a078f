"""One-bit training over torch.distributed: every rank is a worker, and decides a share of the coordinates.

    gradients -> momentum -> signs      as they arrive, chunk by chunk
    all-to-all                          each rank gets everybody's votes on its pieces      N / 8 bytes
    vote                                by the rule, on the pieces; evidence is counted
    all-gather                          decisions, and the evidence that goes with them     N / 8 bytes
    learn                               everybody the same, from all of it

The engine moves bytes. What is voted, decided and learnt comes from `core`, so the result is the
simulator's, bit for bit. A rank whose gradient is not finite is found out before any vote and abstains.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from signvote.core.ballot import NON_FINITE, REASONS
from signvote.core.bits import Zeros, coin_for, pack_signs
from signvote.core.encoder import averaged_, check_momentum
from signvote.core.layout import Layout, trainable
from signvote.core.rule import Rule
from signvote.core.server import RoundReport, Server
from signvote.core.trust import Evidence, State
from signvote.core.vote import Votes
from signvote.engines.ddp.balance import Balancer
from signvote.engines.ddp.meeting import Meeting
from signvote.engines.ddp.shares import Shares
from signvote.errors import ConfigError, EngineError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes, backend, words_for

VERSION = 1
CHUNK = 2**21  # coordinates that travel together
COUNTS = ("mismatches", "cast", "differ", "common")  # of Evidence, as they are sent


class VoteState:
    """What `vote_hook` and `vote_gradients` need between rounds; every rank makes one, as with DDP itself.

    Args:
        model: the module, or its DistributedDataParallel.
        rule: as for `Server`; options of the rule follow as keyword arguments.
        momentum: of the gradients whose signs are sent; leave the optimizer's at 0.
        zeros: what a zero gradient sends, and a zero tally decides.
        run: the run's number, the same on all ranks.
        batch_size: this rank's, for rules that look at it. Change it whenever it changes.
        worker_id: under which trust is kept; None: the rank. Give it if ranks may change machines.
        balancer: sets batch sizes; it is shown how long each rank took.
        scaler: AMP's, if there is one: gradients are unscaled before the vote and decisions scaled.
        overlap: chunks travel while the rest of the gradients is computed; False: the same, in turn.
        timeout: seconds that a rank is waited for; the error says which.
        chunk: coordinates that travel together.
        group: whose ranks take part; None: all.
        options: of the rule.

    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "pooled",
        *,
        momentum: float = 0.9,
        zeros: Zeros = "coin",
        run: int = 0,
        batch_size: int = 0,
        worker_id: int | None = None,
        balancer: Balancer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        timeout: float = 300.0,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> None:
        check_model(model)
        check_momentum(momentum)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self.parameters = trainable(module)
        self.layout = Layout.of(self.parameters)
        self.server = Server(self.layout, rule, run=run, zeros=zeros, **options)
        self.momentum, self.batch_size, self.balancer, self.scaler = momentum, batch_size, balancer, scaler
        tensors = list(self.parameters.values())
        self.meeting = Meeting(group, tensors[0].device, timeout)
        self.worker_id = self.meeting.rank if worker_id is None else worker_id
        self.shares = Shares.of(self.layout.size, self.meeting.world, chunk)
        self.server.rule.own(self.shares.owned(self.meeting.rank))
        self._settings = json.dumps([self.server.rule.name, zeros, run, chunk, str(sorted(options.items()))])
        self._ids: list[int] = []  # worker ids by rank, once they are known

        dtype = reduce(torch.promote_types, (p.dtype for p in tensors))
        self._segments = {id(self.parameters[s.name]): s for s in self.layout.segments}
        self._signal = torch.zeros(self.layout.size, dtype=dtype, device=tensors[0].device)
        self.average: Tensor | None = torch.zeros_like(self._signal) if momentum else None
        planes = 1 if zeros == "coin" else 2
        shape = self.shares.chunks, self.meeting.world, planes, self.shares.words
        self._sent, self._received = (
            torch.zeros(shape, dtype=torch.int64, device=self.meeting.device) for _ in range(2)
        )
        self._decided = torch.zeros(shape[0], *shape[2:], dtype=torch.int64, device=self.meeting.device)
        self._thread = ThreadPoolExecutor(1, "signvote") if overlap else None
        self._stream = torch.cuda.Stream() if overlap and self._signal.is_cuda else None  # type: ignore[no-untyped-call]
        self.bytes_sent = 0  # to other ranks, in the last round
        self._buckets: list[tuple[Tensor, list[Tensor], list[Tensor], torch.futures.Future[Tensor]]] = []
        self._resumed: float | None = None  # when the last round was over
        self._begin()

    @property
    def round(self) -> int:
        """The last round decided, from 1."""
        return self.server.last_round or 0

    @property
    def report(self) -> RoundReport:
        """What happened in the last round: who voted, who abstained and why, who was overruled how often."""
        return self.server.report

    # ---- gradients come in -----------------------------------------------------------------------

    def _begin(self) -> None:
        """Be ready for the next round's gradients."""
        self._absent = dict(self._segments)  # parameters whose gradients have not come
        self._left = [s.stop - s.start for s in map(self.shares.chunk, range(self.shares.chunks))]
        self._finite: list[bool | Tensor] = []
        self._travelling: list[Future[None]] = []
        self._inside = 0.0  # seconds spent in here, waiting for others among them

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """What `vote_hook` does: take in a bucket; with the last one, decide and fill all of them."""
        if bucket.is_last() and self.balancer is not None and self._signal.is_cuda:
            torch.cuda.current_stream().synchronize()  # or the time until here would be the host's
        entered = time.perf_counter()
        future = unset(bucket.buffer())
        parameters = bucket.parameters()
        views = [_like(p, g) for p, g in zip(parameters, bucket.gradients(), strict=True)]
        self._buckets.append((bucket.buffer(), parameters, views, future))
        try:
            self.put(parameters, views)
            if bucket.is_last():
                decision = self.decide(entered)
                for buffer, its_parameters, its_views, its_future in self._buckets:
                    self.fill(its_parameters, its_views, decision)
                    its_future.set_result(buffer)
        finally:
            if bucket.is_last():
                self._buckets = []
        if not bucket.is_last():
            self._inside += time.perf_counter() - entered
        return future

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Take in gradients; whatever chunk they complete goes on its way."""
        if not self._ids:
            self._introduce()
        done: list[int] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            segment = self._absent.pop(id(parameter), None)
            if segment is None:
                continue  # ignored by the user, or not trained
            here = self._signal[segment.start : segment.stop].view(segment.shape)
            here.zero_() if gradient is None else here.copy_(gradient)
            for number in self.shares.touched(segment.start, segment.stop):
                chunk = self.shares.chunk(number)
                self._left[number] -= min(chunk.stop, segment.stop) - max(chunk.start, segment.start)
                if self._left[number] == 0:
                    done.append(number)
        ready = torch.cuda.current_stream().record_event() if self._stream else None
        for number in sorted(done):
            if self._thread is None:
                self._send(number)
            else:
                self._travelling.append(self._thread.submit(self._send, number, ready))

    def _send(self, number: int, ready: torch.cuda.Event | None = None) -> None:
        """Momentum and signs of a chunk, and each rank's piece of it to that rank."""
        if ready is not None:
            assert self._stream is not None
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            at = self.shares.chunk(number)
            signal = self._signal[at]
            if self.scaler is not None:
                signal.mul_(1 / self.scaler.get_scale())
            if self.average is not None:
                averaged_(signal, self.average[at], self.momentum)
            coin = coin_for(self.server.zeros, self.server.run, self.round + 1, self.worker_id)
            planes, finite = pack_signs(signal, coin and coin.after(at.start))
            self._finite.append(finite)
            sent = self._sent[number]
            for row, plane in enumerate(p for p in planes if p is not None):
                padding = sent.shape[0] * sent.shape[2] - len(plane)
                sent[:, row] = torch.nn.functional.pad(plane, (0, padding)).view(sent.shape[0], -1)
            self.meeting.all_to_all(self._received[number], sent)

    # ---- the decision ----------------------------------------------------------------------------

    def decide(self, since: float) -> Planes:
        """Vote, when all gradients are in; the decision on all coordinates. `since`: when they were."""
        missing = [self.parameters[s.name] for s in self._absent.values()]
        self.put(missing, [None] * len(missing))
        for travelling in self._travelling:
            travelling.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        finite = all(map(bool, self._finite))
        worked = 0.0 if self._resumed is None else since - self._resumed - self._inside
        told = self._tell(finite, worked)
        voters = [rank for rank in self._order if told[rank][1]]
        evidence = self._vote(voters, told)
        decision, evidence = self._share(evidence)
        abstained = {self._ids[r]: REASONS[NON_FINITE] for r in self._order if r not in voters}
        self.server.learn(self.round + 1, evidence, abstained)
        self.meeting.stage = f"round {self.round + 1}"
        if finite and self.average is not None:
            self.average, self._signal = self._signal, self.average
        elif self.scaler is not None and not finite:
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        if self.balancer is not None:
            self.balancer.observe([nanoseconds / 1e9 for *_, nanoseconds in told])
        self._begin()
        return decision

    @property
    def _order(self) -> list[int]:
        """Ranks by worker id, as a server sorts its ballots."""
        return sorted(range(len(self._ids)), key=self._ids.__getitem__)

    def _tell(self, finite: bool, worked: float) -> list[list[int]]:
        """What everybody says of this round: its number, whether gradients are finite, batch size, nanoseconds."""
        if self.balancer is not None:
            self.batch_size = self.balancer.sizes(self.round)[self.meeting.rank]
        mine = torch.tensor([self.round + 1, finite, self.batch_size, int(1e9 * worked)])
        told: list[list[int]] = self.meeting.all_gather(mine.to(self.meeting.device)).tolist()
        if len({each[0] for each in told}) > 1:
            raise EngineError(f"ranks are in different rounds: {[each[0] for each in told]}")
        return told

    def _vote(self, voters: list[int], told: list[list[int]]) -> Evidence:
        """Decide this rank's pieces."""
        rule = self.server.rule_for(len(voters))
        coin = coin_for(self.server.zeros, self.server.run, self.round + 1)
        total: Evidence | None = None
        for number in range(self.shares.chunks):
            first, n = self.shares.piece(number, self.meeting.rank)
            words = slice(words_for(n))
            rows = self._received[number][voters, :, words]
            votes = Votes(
                workers=tuple(self._ids[r] for r in voters),
                planes=_planes(rows.transpose(0, 1).contiguous()),
                n=n,
                first=first,
                batch_sizes=tuple(told[r][2] for r in voters),
            )
            seen = rule.vote(_planes(self._decided[number][:, words]), votes, coin and coin.after(first))
            total = seen if total is None else total + seen
        assert total is not None  # a layout has at least one coordinate
        return total

    def _share(self, mine: Evidence) -> tuple[Planes, Evidence]:
        """Everybody's decisions put together, and everybody's evidence added up."""
        counts = {name: count for name in COUNTS if (count := getattr(mine, name)) is not None}
        told = torch.cat([self._decided.view(-1), *(count.reshape(-1) for count in counts.values())])
        everybody = self.meeting.all_gather(told)
        pieces, numbers = everybody[:, : self._decided.numel()], everybody[:, self._decided.numel() :]
        chunks, planes, words = self._decided.shape
        whole = pieces.reshape(-1, chunks, planes, words).permute(2, 1, 0, 3).reshape(planes, -1)
        decision = _planes(whole[:, : words_for(self.layout.size)].to(self._signal.device))
        sums = torch.split(numbers.sum(0).cpu(), [count.numel() for count in counts.values()])
        total: dict[str, Any] = {
            name: numbers.view(counts[name].shape) for name, numbers in zip(counts, sums, strict=True)
        }
        others = self.meeting.world - 1
        self.bytes_sent = 8 * others * (self._sent[:, 0].numel() + told.numel())
        return decision, replace(mine, **total)

    def fill(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor], decision: Planes) -> None:
        """Write the decision, +1, -1 or 0, in place of gradients; times AMP's scale, which will be divided by."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            segment = self._segments.get(id(parameter))
            if segment is not None:
                strided = not gradient.is_contiguous()
                flat = gradient.new_zeros(segment.shape) if strided else gradient.zero_()
                backend(flat.device).step_(flat.view(-1), decision, segment.start, -scale)
                if strided:
                    gradient.copy_(flat)
        self._resumed = time.perf_counter()

    # ---- who takes part --------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Before the first round: all ranks must train the same model by the same settings."""
        crc = 0
        for parameter in self.parameters.values():
            raw = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            crc = zlib.crc32(raw.data, crc)
        told = [self.worker_id - 2**63, *_two(self.layout.digest), *_digest(self._settings), crc, self.round]
        everybody = self.meeting.all_gather(torch.tensor(told, device=self.meeting.device)).tolist()
        same = {"layout of the model": (1, 3), "settings": (3, 5), "parameters": (5, 6), "round": (6, 7)}
        for what, (start, stop) in same.items():
            differing = [r for r, its in enumerate(everybody) if its[start:stop] != everybody[0][start:stop]]
            if differing:
                ranks = ", ".join(str(self.meeting.ranks[r]) for r in differing)
                raise EngineError(f"rank {ranks} differs from rank {self.meeting.ranks[0]} in the {what}")
        ids = [its[0] + 2**63 for its in everybody]
        if len(set(ids)) < len(ids):
            raise EngineError(f"worker ids by rank are {ids}; they must differ")
        self._ids = ids

    def state_dict(self) -> State:
        """What this rank needs to go on besides the model; all ranks' states together make a checkpoint."""
        return {
            **self._identity(),
            "worker": self.worker_id,
            "average": self.average,
            "server": self.server.state_dict(),
        }

    def load_state_dict(self, *states: State) -> None:
        """Go on from the states of all ranks, of a world of any size; a rank that is new has no momentum yet."""
        if not states:
            raise StateError("no state given; wanted those of all ranks")
        for state in states:
            check_state(upgraded(state, "a rank's state", VERSION), **self._identity())
        self.server.load_state_dict(*(state["server"] for state in states))
        mine = next((s["average"] for s in states if s["worker"] == self.worker_id), None)
        if self.average is not None:
            self.average.zero_() if mine is None else self.average.copy_(mine)
        self._ids, self._resumed = [], None
        self._begin()

    def _identity(self) -> State:
        return {"kind": "vote", "version": VERSION, "layout": self.layout.digest.hex()}


def check_model(model: nn.Module) -> None:
    """Raise for what cannot be trained this way, before training starts."""
    for module in model.modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
            raise ConfigError(
                f"{type(module).__name__} is not supported: every rank must hold the whole model"
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(f"the model lies on {len(devices)} devices; one per rank is supported")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ConfigError(
            "FSDP and tensor parallelism are not supported: every rank must hold the whole model"
        )
    if isinstance(model, DistributedDataParallel) and getattr(model, "mixed_precision", None) is not None:
        raise ConfigError(
            "DDP's own mixed_precision is not supported; use torch.autocast and VoteState(scaler=...)"
        )


def _planes(rows: Tensor) -> Planes:
    """(planes, ...) as Planes."""
    return Planes(rows[0], rows[1] if len(rows) > 1 else None)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A bucket's slice as DDP means it: with the strides of its parameter, if that is dense."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.is_contiguous() or span != parameter.numel():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def unset(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future of a bucket's buffer."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def _two(digest: bytes) -> list[int]:
    """16 bytes as two numbers."""
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]


def _digest(text: str) -> list[int]:
    return _two(hashlib.blake2b(text.encode(), digest_size=16).digest())
