"""The workers of a run: their gradients, memories and votes. One interface, two ways to compute.

`OneByOne` computes one worker after the other, and every vote is bytes. `joint.together.Together` computes all in one
pass, and votes stay on the device. Both use the same core and send the same votes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from signvote.core.ballot import Ballot, parse
from signvote.core.bits import SERVER
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding, Memory
from signvote.core.layout import Layout
from signvote.core.outer import Outer
from signvote.core.server import Server
from signvote.core.vote import Votes
from signvote.kernels import Planes, words_for
from signvote.sim.config import Config
from signvote.sim.gradients import Gradients, evaluate
from signvote.sim.hostility import Hostility, stacked
from signvote.sim.phases import Phases
from signvote.sim.population import Absence, Sampler, present
from signvote.sim.yardsticks import AGGREGATES


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The work of a run: who votes in a round, with which samples, and what attackers change."""

    config: Config
    encoding: Encoding
    sampler: Sampler
    absences: Sequence[Absence]
    hostility: Hostility | None

    def present(self, t: int) -> list[int]:
        """The workers that vote in round t."""
        return present(
            t,
            self.config.workers,
            self.config.miss,
            self.absences,
            self.config.seed,
        )

    def batch(self, worker: int, t: int) -> Tensor:
        """Indices of a worker's samples in round t, from 1."""
        return self.sampler.batch(worker, t - 1)

    def seed(self, worker: int, t: int) -> tuple[int, ...]:
        """The seed of everything random in a worker's gradient."""
        return self.config.seed, 6, t, worker

    def relabels(self, worker: int, t: int) -> bool:
        """Whether a worker's labels are wrong. The oracle is not attacked."""
        if self.hostility is None or self.config.rule == "oracle":
            return False
        return self.hostility.relabels(worker, t)

    def attacked(self, votes: Votes, t: int, last_decision: Planes | None) -> Votes:
        """The votes that are really sent: attackers change theirs, and know the last decision."""
        if self.hostility is None or not votes.workers:
            return votes
        device = votes.planes.signs.device
        last = None
        if last_decision is not None:
            last = last_decision.map(lambda plane: plane.to(device))
        return self.hostility.change(
            votes,
            seed=self.config.seed,
            round=t,
            last=last,
        )


class Workers(ABC):
    """All workers of a run."""

    bytes_arrive_later: ClassVar = False  # if True, calling `bytes_sent` at once would wait for the device

    def __init__(self, work: Assignment, gradients: Gradients, phases: Phases) -> None:
        self.work = work
        self.gradients = gradients
        self.phases = phases

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.gradients.layout

    @abstractmethod
    def votes(self, t: int, voters: Sequence[int]) -> Votes:
        """Compute the votes of these workers, in this order, in round t."""

    @abstractmethod
    def signals(self) -> Tensor:
        """The signals of the last votes, (voters, N), without feedback: the votes are their signs."""

    @abstractmethod
    def decide(self, t: int, votes: Votes, server: Server) -> Planes:
        """Send votes to the server and return its decision."""

    @abstractmethod
    def bytes_sent(self) -> tuple[int, int]:
        """Bytes up and down in the last decided round, of all workers together."""

    @abstractmethod
    def mean(self, t: int, voters: Sequence[int]) -> Tensor:
        """The mean gradient over all samples of these workers."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The metrics on the test data, by name."""

    @abstractmethod
    def memories(self) -> list[Memory]:
        """The memory of each worker."""

    @abstractmethod
    def load_memories(self, memories: Sequence[Memory]) -> None:
        """Resume from the memory of each worker."""

    def move_(self, outer: Outer, decision: Planes) -> None:
        """Move the parameters by the last decision, after local steps."""
        raise NotImplementedError

    def local_state(self) -> dict[str, Any] | None:
        """What workers keep for their local steps; None: they take none."""
        return None

    def load_local_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Resume from it."""


class OneByOne(Workers):
    """One worker after the other, each with its own encoder; ballots and decisions are bytes."""

    def __init__(self, work: Assignment, gradients: Gradients, phases: Phases) -> None:
        super().__init__(work, gradients, phases)
        self.encoders = [
            Encoder(self.layout, m, work.encoding, run=work.config.seed, batch_size=size)
            for m, size in enumerate(work.config.batch_sizes)
        ]
        self._signals: list[Tensor] = []
        self._sent = (0, 0)

    def votes(self, t: int, voters: Sequence[int]) -> Votes:
        """See Workers."""
        planes = []
        self._signals = []
        for m in voters:
            gradient = self._gradient(m, t)
            with self.phases.timed("encode"):
                planes.append(self.encoders[m].encode(t, gradient, top=self.work.config.top_at(t)))
            if self.work.config.rule in AGGREGATES:
                self._signals.append(gradient.clone())
        if not planes:
            nothing = torch.zeros(0, words_for(self.layout.size), dtype=torch.int64)
            return Votes(workers=(), planes=Planes(nothing, None), n=self.layout.size)
        return stacked(planes, voters, self.layout.size, self.work.config.batch_sizes)

    def _gradient(self, worker: int, t: int) -> Tensor:
        """A view, valid until the next call."""
        with self.phases.timed("gradients"):
            return self.gradients.of(
                self.work.batch(worker, t),
                self.work.seed(worker, t),
                self.work.relabels(worker, t),
            )

    def signals(self) -> Tensor:
        """See Workers."""
        return torch.stack(self._signals)

    def decide(self, t: int, votes: Votes, server: Server) -> Planes:
        """See Workers."""
        with self.phases.timed("encode"):
            ballots = {m: self._ballot(t, votes, row) for row, m in enumerate(votes.workers)}
        with self.phases.timed("server"):
            message = server.decide(t, ballots)
        bytes_up = sum(map(len, ballots.values()))
        bytes_down = len(message) * len(ballots)
        self._sent = (bytes_up, bytes_down)
        decision = parse(
            message,
            layout=self.layout,
            run=self.work.config.seed,
            round=t,
            worker=SERVER,
        )
        self._follow(votes, decision)
        device = self.gradients.x.device
        return decision.planes().map(lambda plane: plane.to(device))

    def _follow(self, votes: Votes, decision: Ballot) -> None:
        """Have workers keep in memory what a decision with claims says about their votes."""
        if decision.claims is not None:
            self._correct(votes, decision.counted, torch.from_numpy(decision.claims.copy()))

    def _correct(self, votes: Votes, counted: Sequence[int], exponents: Tensor) -> None:
        """Have all workers follow what the server believes of them, those that are absent included."""
        rows = {m: row for row, m in enumerate(votes.workers) if m in counted}
        for m, encoder in enumerate(self.encoders):
            row = rows.get(m)
            planes = None if row is None else votes.planes.map(lambda plane: plane[row])  # noqa: B023
            encoder.correct(planes, exponents)

    def _ballot(self, t: int, votes: Votes, row: int) -> bytes:
        """The message of one voter; an attacker may declare another batch size."""
        encoder = self.encoders[votes.workers[row]]
        encoder.batch_size = votes.batch_sizes[row]
        if votes.present is not None and not votes.present[row]:
            return encoder.ballot(t, None)
        planes = votes.planes.map(lambda plane: plane[row])
        return encoder.ballot(t, planes)

    def bytes_sent(self) -> tuple[int, int]:
        """See Workers."""
        return self._sent

    def mean(self, t: int, voters: Sequence[int]) -> Tensor:
        """See Workers."""
        sizes = self.work.config.batch_sizes
        total = sum(sizes[m] for m in voters)
        mean = torch.zeros_like(self.gradients.flat)
        for m in voters:
            mean.add_(self._gradient(m, t), alpha=sizes[m] / total)
        return mean

    def evaluate(self) -> dict[str, float]:
        """See Workers."""
        return evaluate(self.gradients.task, self.gradients.model, self.work.config.test_batch)

    def memories(self) -> list[Memory]:
        """See Workers."""
        return [encoder.memory for encoder in self.encoders]

    def load_memories(self, memories: Sequence[Memory]) -> None:
        """See Workers."""
        for encoder, memory in zip(self.encoders, memories, strict=True):
            encoder.memory = memory.map(lambda kept: kept.to(self.gradients.x.device))
