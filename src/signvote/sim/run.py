"""A run: every round uses the real core, from encoder to decision."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from signvote.core.bits import unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.groups import Factors, factors
from signvote.core.layout import Layout
from signvote.core.outer import Outer
from signvote.core.server import Server
from signvote.core.vote import ONE, Voters
from signvote.kernels import Planes
from signvote.sim.config import Config
from signvote.sim.descent import Descent
from signvote.sim.gradients import Gradients, sign_error
from signvote.sim.history import empty_history, note, note_bytes, note_machine, result_of
from signvote.sim.machine import Machine
from signvote.sim.phases import Phases
from signvote.sim.setup import Workshop, make_assignment, make_server, make_workers
from signvote.sim.state import load_state, state_of
from signvote.sim.warmup import warm_up
from signvote.sim.yardsticks import AGGREGATES, adam_of, messages, traffic
from signvote.tasks import Task
from signvote.tasks.trial import tried

log = logging.getLogger("signvote")


class Run:
    """A simulated training: `step()` does one round; `state_dict()` holds everything that it depends on.

    On the CPU workers compute one after the other and every vote is bytes. On a GPU, where the model
    allows it, they compute together and votes stay on the device; the same core decides.

    Args:
        config: the run.
        task: its data, model and loss.
        machine: the machine to compute on; default: the CPU.
        workshop: a cache of captured graphs, which the caller keeps for the next run of the same kind. Starting that
            run ends this one.

    """

    def __init__(
        self,
        config: Config,
        task: Task,
        machine: Machine | None = None,
        workshop: Workshop | None = None,
    ) -> None:
        self.config = config
        self.machine = machine or Machine()
        self.phases = Phases()
        work = make_assignment(config, task)
        cache = {} if workshop is None else workshop
        self.workers = make_workers(work, task, self.machine, cache, self.phases)
        self.encoder = Encoder(self.layout, 0, work.encoding, run=config.seed)  # the oracle's
        self.server = make_server(work, self.layout)  # None: a yardstick
        self.adam = adam_of(config, self.gradients.x)
        self.outer: Outer | None = None  # of local steps
        if config.local_steps is not None:
            self.outer = Outer(step=config.outer_step, momentum=config.outer_momentum)
        self.descent = Descent(self.gradients.x, self.layout, self._factors())
        self.round = 0
        self.machines: list[dict[str, Any]] = []  # that computed the rounds
        self.history = empty_history(task)
        tried(self.gradients.task, self.model)
        self.last_decision: Planes | None = None  # kept for attackers
        self._logged = 0  # notices
        self._steps = 0  # rounds of this process

    def _factors(self) -> dict[str, Factors]:
        return factors(self.model, decays=self.config.decays, steps=self.config.steps)

    @property
    def gradients(self) -> Gradients:
        """The model, its parameters as one vector, and gradients of them."""
        return self.workers.gradients

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.workers.layout

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        return self.gradients.model

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        return self.phases.seconds

    # ---- one round -------------------------------------------------------------------------------

    def step(self) -> None:
        """Do the next round; evaluate before the first, at every `evaluate_every`-th and at the last."""
        note_machine(self.machines, self.machine, self.round + 1)
        self._warm_up()
        with self._clock(), self.phases.timed("total"):
            if self.round == 0:
                self._evaluate()
            t = self.round + 1
            voters = self.workers.work.present(t)
            if self.server is not None:
                self._vote(t, voters, self.server)
            elif len(voters) < self.config.min_voters:
                self._note_floats(voters)  # too few: nothing moves
            elif self.config.rule == "oracle":
                self._oracle(t, voters)
            else:
                self._average(t, voters)
            self.round = t
            self.history["voters"].append(len(voters))
            if self._is_watched(t):
                self._evaluate()

    def _warm_up(self) -> None:
        """Compile kernels before the clock of the first round starts. On a GPU they depend on sizes: not there."""
        if self._steps == 0 and not self.machine.on_gpu:
            warm_up(self.workers.work)

    def _clock(self) -> AbstractContextManager[None]:
        """How a round is timed. On a GPU the first one of a process compiles, so the second counts for both."""
        self._steps += 1
        compiles = self.machine.on_gpu and self.config.rounds > 1
        if not compiles or self._steps > 2:
            return nullcontext()
        return self.phases.untimed() if self._steps == 1 else self.phases.twice()

    def _is_watched(self, t: int) -> bool:
        return t % self.config.evaluate_every == 0 or t == self.config.rounds

    def _vote(self, t: int, voters: list[int], server: Server) -> None:
        votes = self.workers.votes(t, voters)
        sent = self.workers.work.attacked(votes, t, self.last_decision)
        self.settle()
        decision = self.workers.decide(t, sent, server)
        if not self.workers.bytes_arrive_later:
            note_bytes(self.history, *self.workers.bytes_sent())
        self._record_trust(t, server)
        self._apply(t, decision)

    def settle(self) -> None:
        """Note the bytes of the last round, if that is not done yet: on a GPU the numbers arrive later."""
        if len(self.history["bytes_up"]) < self.round:
            note_bytes(self.history, *self.workers.bytes_sent())
        if self.server is not None:
            self._log_notices(self.server.watch.notices)

    def _log_notices(self, notices: list[str]) -> None:
        """Log what was noticed since the last call."""
        for notice in notices[self._logged :]:
            log.warning("signvote: %s, seed %d: %s", self.config.rule, self.config.seed, notice)
        self._logged = len(notices)

    def _apply(self, t: int, decision: Planes) -> None:
        """Step x <- (1 - step * decay) x - step * decision (paper, eq. 5)."""
        if self.config.sign_error and self._is_watched(t):
            decided = unpack_signs(decision, self.layout.size)
            error = sign_error(decided, self.gradients.true())
            note(self.history, "sign_error", round=t, error=error)
        if self.workers.work.hostility is not None:
            self.last_decision = decision
        with self.phases.timed("apply"):
            if self.outer is not None:
                self.workers.move_(self.outer, decision)
                return
            step = self.config.step_at(t)
            self.descent.decay_(step, self.config.decay, decision.support)
            self.descent.step_(decision, step)

    def _oracle(self, t: int, voters: list[int]) -> None:
        """Step by the sign of the mean over all samples."""
        self._note_floats(voters)
        mean = self.workers.mean(t, voters)
        with self.phases.timed("encode"):
            planes = self.encoder.encode(t, mean)
        if planes is not None:
            self._apply(t, planes)

    def _average(self, t: int, voters: list[int]) -> None:
        """Step by a mean or median of floats, or by what Adam makes of it."""
        self._note_floats(voters)
        votes = self.workers.votes(t, voters)
        sent = self.workers.work.attacked(votes, t, self.last_decision)
        received, sizes = messages(self.workers.signals(), sent)
        if len(received) >= self.config.min_voters:
            with self.phases.timed("apply"):
                move = AGGREGATES[self.config.rule](received, sizes)
                if self.outer is not None:
                    self.outer.move_(self.gradients.x, move)
                    return
                if self.adam is not None:
                    move = self.adam.scaled(move)
                step = self.config.step_at(t)
                self.descent.decay_(step, self.config.decay)
                self.descent.move_(move, step)

    def _note_floats(self, voters: list[int]) -> None:
        note_bytes(self.history, *traffic(self.config.rule, self.layout.size, len(voters)))

    # ---- measurements ----------------------------------------------------------------------------

    def reading(self) -> str:
        """The first metric at the last evaluation, as text; empty before the first one."""
        metric = self.gradients.task.metrics[0]
        values = self.history["evaluations"][metric.name]
        return metric.text(values[-1]) if values else ""

    def _evaluate(self) -> None:
        with self.phases.timed("evaluate"):
            measured = self.workers.evaluate()
        note(self.history, "evaluations", round=self.round, **measured)

    def _record_trust(self, t: int, server: Server) -> None:
        """Note each worker's mean weight in the next vote, and the share of its votes that was overruled."""
        if not self._is_watched(t):
            return
        server.settle()
        workers = tuple(range(self.config.workers))
        everybody = Voters(workers=workers, batch_sizes=self.config.batch_sizes)
        weights = server.rule.weights(everybody)
        weight = (weights.double().mean(1) / ONE).tolist()
        overruled = [server.report.disagreement.get(m) for m in workers]
        note(self.history, "trust", round=t, weight=weight, overruled=overruled)

    def result(self, status: str) -> dict[str, Any]:
        """What results.json holds of this run."""
        if self.server is not None:
            self.server.settle()
        self.settle()
        return result_of(self, status)

    # ---- stopping and continuing -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit."""
        self.settle()
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same configuration."""
        load_state(self, state)
        if self.server is not None:
            self._logged = len(self.server.watch.notices)
