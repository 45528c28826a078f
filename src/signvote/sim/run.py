"""A run: every round uses the real core, from encoder to decision."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from signvote.core.bits import unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.layout import Layout
from signvote.core.server import Server
from signvote.core.vote import ONE, Voters
from signvote.kernels import Planes, backend
from signvote.sim.config import Config
from signvote.sim.gradients import Gradients, sign_error
from signvote.sim.history import empty_history, note, note_bytes, note_machine, result_of
from signvote.sim.machine import Machine
from signvote.sim.phases import Phases
from signvote.sim.setup import Workshop, make_assignment, make_server, make_workers
from signvote.sim.state import load_state, state_of
from signvote.sim.warmup import warm_up
from signvote.sim.yardsticks import AGGREGATES, Adam, float_bytes, messages
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
        self.adam = Adam(self.gradients.x, config.momentum) if config.rule == "adamw" else None
        self.round = 0
        self.machines: list[dict[str, Any]] = []  # that computed the rounds
        self.history = empty_history(task)
        tried(self.gradients.task, self.model)
        self.last_decision: Planes | None = None  # kept for attackers
        self._logged = 0  # notices
        self._is_warm = False

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
        with self.phases.timed("total"):
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
        if not self._is_warm and not self.machine.on_gpu:
            warm_up(self.workers.work)
        self._is_warm = True

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
            x = self._decayed(t, decision.support)
            backend(x.device).step_(x, decision, 0, self.config.step_at(t))

    def _decayed(self, t: int, support: Tensor | None = None) -> Tensor:
        """The parameters after a step of weight decay; unchanged if a decision has no support at all."""
        x = self.gradients.x
        if not self.config.decay:
            return x
        kept = x.new_full((), 1 - self.config.step_at(t) * self.config.decay)
        if support is not None:
            kept = torch.where(support.any(), kept, 1)
        return x.mul_(kept)

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
                if self.adam is not None:
                    move = self.adam.scaled(move)
                self._decayed(t).sub_(move, alpha=self.config.step_at(t))

    def _note_floats(self, voters: list[int]) -> None:
        sent = len(voters) * float_bytes(self.layout.size)
        note_bytes(self.history, sent, sent)

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
