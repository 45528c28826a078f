"""A run: every round goes through the real core, from encoder to decision."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signvote.core.ballot import parse
from signvote.core.bits import SERVER, unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.server import Server
from signvote.core.vote import ONE, Voters, Votes
from signvote.errors import StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes, backend
from signvote.sim import lengths
from signvote.sim.attacks import parse_attack, stacked
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.gradients import Gradients, by_class, evaluate, sign_error
from signvote.sim.machine import Machine, versions
from signvote.sim.population import Sampler, generator, parse_absences, present, split
from signvote.sim.results import FORMAT
from signvote.sim.together import Together, bytes_sent
from signvote.sim.yardsticks import AGGREGATES, messages
from signvote.tasks import Task

VERSION = 2  # of the state
PHASES = ("gradients", "encode", "server", "apply", "evaluate", "total")  # on a GPU: to launch them
PER_ROUND = ("voters", "bytes_up", "bytes_down")


class Run:
    """A simulated training: `step()` does one round; everything it depends on is in `state_dict()`.

    On the CPU workers compute one after the other and every vote is bytes. On a GPU, where the model
    allows it, they compute together and votes stay on the device; the same core decides.

    Args:
        config: the run.
        task: what it trains.
        machine: where.
        workshop: kept by the caller between runs, so that the next one of the same kind need not capture
            its graphs again; the run before is then over.

    """

    def __init__(
        self,
        config: Config,
        task: Task,
        machine: Machine | None = None,
        workshop: dict[Any, Together] | None = None,
    ) -> None:
        assert config.zeros is not None
        assert config.momentum is not None
        self.config, self.machine = config, machine or Machine()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(config.seed, 0).initial_seed())
            model = task.model()
        parts = split(task.train.labels, config.workers, config.split, config.seed)
        self.sampler = Sampler(parts, config.batch_sizes, config.seed)
        self.absences = parse_absences(config.absent, config.workers)
        self.hostility = parse_attack(config.attack, config.workers)
        self.gradients, self.together = self._prepared(task, model, {} if workshop is None else workshop)
        self.layout = self.gradients.layout
        common = {"zeros": config.zeros, "run": config.seed}
        sending = {"momentum": config.momentum, "top": config.top, "feedback": config.feedback}
        self.encoders = [
            Encoder(self.layout, m, batch_size=size, **sending, **common)  # type: ignore[arg-type]
            for m, size in enumerate(config.batch_sizes)
        ]
        self.server = (
            None
            if config.rule in YARDSTICKS
            else Server(self.layout, config.rule, **common, **config.options)  # type: ignore[arg-type]
        )
        self.round = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.machines: list[dict[str, Any]] = []  # what the rounds were computed on
        self._unsent: Callable[[], tuple[int, int]] | None = None  # bytes of the last round, arriving
        self._last: Planes | None = None  # the last decision, kept for attackers
        self.history: dict[str, Any] = {
            "evaluations": {"round": [], "accuracy": [], "loss": []},
            **{name: [] for name in PER_ROUND},
            "trust": {"round": [], "weight": [], "crossover": []},
            "sign_error": {"round": [], "error": []},
        }

    def _prepared(
        self, task: Task, model: nn.Module, workshop: dict[Any, Together]
    ) -> tuple[Gradients, Together | None]:
        """Gradients one by one and, on a GPU, all together; those of the workshop if they fit.

        Feedback and top are written for one worker at a time.
        """
        config, device = self.config, self.machine.torch_device
        if not self.machine.is_together or config.feedback or config.top is not None:
            return Gradients(task.to(device), model.to(device)), None
        key = id(task), config.batch_sizes, config.test_batch, self.machine
        if key not in workshop:
            workshop.clear()
            gradients = Gradients(task.to(device), model.to(device))
            together = Together(gradients, config.batch_sizes, self.machine, config.test_batch)
            if together.model is None:
                return gradients, None
            workshop[key] = together
        together = workshop[key]
        together.restart(model.to(device))
        return together.gradients_by_one, together

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        return self.gradients.model

    # ---- one round -------------------------------------------------------------------------------

    def step(self) -> None:
        """Do the next round; evaluate before the first, at every `evaluate_every`-th and at the last."""
        self._say_where()
        with self._timed("total"):
            if self.round == 0:
                self._evaluate()
            t = self.round + 1
            voters = present(t, self.config.workers, self.config.miss, self.absences, self.config.seed)
            if self.server is None:
                self._yardstick(t, voters)
            elif self.together is None:
                self._vote(t, voters, self.server)
            else:
                self._vote_together(t, voters, self.server, self.together)
            self.round = t
            self.history["voters"].append(len(voters))
            if self._is_watched(t):
                self._evaluate()

    def _is_watched(self, t: int) -> bool:
        return t % self.config.evaluate_every == 0 or t == self.config.rounds

    def _seed(self, worker: int, t: int) -> tuple[int, ...]:
        """Of all that is random in a worker's gradient."""
        return self.config.seed, 6, t, worker

    def _gradient(self, worker: int, t: int) -> Tensor:
        with self._timed("gradients"):
            wrong = self._relabels(worker, t)
            return self.gradients.of(self.sampler.batch(worker, t - 1), self._seed(worker, t), wrong)

    def _gradients(self, t: int, together: Together) -> None:
        """Of all workers, those away included: what they would have computed changes nothing."""
        with self._timed("gradients"):
            everybody = range(self.config.workers)
            batches = [self.sampler.batch(m, t - 1) for m in everybody]
            seeds = [(*self._seed(m, t), 1) for m in everybody]
            together.gradients(batches, seeds, [self._relabels(m, t) for m in everybody])

    def _relabels(self, worker: int, t: int) -> bool:
        """Whether its labels are wrong; nobody attacks the oracle."""
        attacked = self.hostility is not None and self.config.rule != "oracle"
        return attacked and self.hostility.relabels(worker, t)  # type: ignore[union-attr]

    def _vote(self, t: int, voters: list[int], server: Server) -> None:
        planes = []
        for m in voters:
            gradient = self._gradient(m, t)
            with self._timed("encode"):
                planes.append(self.encoders[m].encode(t, gradient))
        with self._timed("encode"):
            if self.hostility is not None and voters:
                planes = self._all_attacked(planes, t, voters)
            ballots = {m: self.encoders[m].ballot(t, mine) for m, mine in zip(voters, planes, strict=True)}
        with self._timed("server"):
            message = server.decide(t, ballots)
        self._record_trust(t, server)
        decision = parse(message, layout=self.layout, run=self.config.seed, round=t, worker=SERVER)
        self._apply(t, decision.planes())
        self.history["bytes_up"].append(sum(map(len, ballots.values())))
        self.history["bytes_down"].append(len(message) * len(voters))

    def _votes(self, t: int, voters: list[int], together: Together) -> Votes:
        settings = {"momentum": self.config.momentum, "zeros": self.config.zeros}
        return together.votes(t, voters, run=self.config.seed, **settings)  # type: ignore[arg-type]

    def _vote_together(self, t: int, voters: list[int], server: Server, together: Together) -> None:
        self._gradients(t, together)
        with self._timed("encode"):
            votes = self._attacked(self._votes(t, voters, together), t)
        with self._timed("server"):
            decision = server.decide_planes(t, votes)
        self.settle()
        self._unsent = bytes_sent(votes, decision)
        self._record_trust(t, server)
        self._apply(t, decision)

    def _attacked(self, votes: Votes, t: int) -> Votes:
        """What is really sent."""
        if self.hostility is None:
            return votes
        last = None if self._last is None else self._last.map(lambda p: p.to(votes.planes.signs.device))
        return self.hostility.change(votes, seed=self.config.seed, round=t, last=last)

    def _all_attacked(self, planes: list[Planes | None], t: int, voters: list[int]) -> list[Planes | None]:
        """The same for votes one by one; what is declared goes to the encoders, which write the ballots."""
        votes = self._attacked(stacked(planes, voters, self.layout.size, self.config.batch_sizes), t)
        for m, size in zip(voters, votes.batch_sizes, strict=True):
            self.encoders[m].batch_size = size
        rows = [Planes(*(None if p is None else p[i] for p in votes.planes)) for i in range(len(voters))]  # type: ignore[arg-type]
        return [None if mine is None else row for mine, row in zip(planes, rows, strict=True)]

    def settle(self) -> None:
        """Note what the last round sent."""
        if self._unsent is not None:
            up, down = self._unsent()
            self.history["bytes_up"].append(up)
            self.history["bytes_down"].append(down)
            self._unsent = None

    def _apply(self, t: int, decision: Planes) -> None:
        """Step x <- (1 - step * decay) x - step * decision (paper, eq. 5)."""
        if self.config.sign_error and self._is_watched(t):
            decided = unpack_signs(decision, self.layout.size)
            self._note("sign_error", round=t, error=sign_error(decided, self.gradients.true()))
        if self.hostility is not None:
            self._last = decision
        with self._timed("apply"):
            x = self._decayed(t)
            backend(x.device).step_(x, decision, 0, self.config.step_at(t))

    def _decayed(self, t: int) -> Tensor:
        """The parameters after a step of weight decay."""
        x, step = self.gradients.x, self.config.step_at(t)
        return x.mul_(1 - step * self.config.decay) if self.config.decay else x

    def _yardstick(self, t: int, voters: list[int]) -> None:
        sent = 4 * self.layout.size * len(voters)
        self.history["bytes_up"].append(sent)
        self.history["bytes_down"].append(sent)
        if self.config.rule == "oracle":
            self._oracle(t, voters)
            return
        received, sizes = messages(*self._signals(t, voters)) if voters else ((), ())
        if len(received):
            with self._timed("apply"):
                move = AGGREGATES[self.config.rule](received, sizes)  # type: ignore[arg-type]
                self._decayed(t).sub_(move, alpha=self.config.step_at(t))

    def _signals(self, t: int, voters: list[int]) -> tuple[Tensor, Votes]:
        """What each voter would send as floats, and the signs that it sends."""
        if self.together is not None:
            self._gradients(t, self.together)
            votes = self._votes(t, voters, self.together)
            return self.together.signals(voters, bool(self.config.momentum)), self._attacked(votes, t)
        signals, planes = [], []
        for m in voters:
            gradient = self._gradient(m, t)
            planes.append(self.encoders[m].encode(t, gradient))
            signals.append(gradient.clone())
        votes = stacked(planes, voters, self.layout.size, self.config.batch_sizes)
        return torch.stack(signals), self._attacked(votes, t)

    def _oracle(self, t: int, voters: list[int]) -> None:
        """The sign of the mean over all samples."""
        mean = self._mean(t, voters)
        with self._timed("encode"):
            planes = self.encoders[0].encode(t, mean)
        if planes is not None:
            self._apply(t, planes)

    def _mean(self, t: int, voters: list[int]) -> Tensor:
        if self.together is not None:
            self._gradients(t, self.together)
            return self.together.mean(voters)
        mean = torch.zeros_like(self.gradients.flat)
        total = sum(self.config.batch_sizes[m] for m in voters)
        for m in voters:
            mean.add_(self._gradient(m, t), alpha=self.config.batch_sizes[m] / total)
        return mean

    # ---- what is watched -------------------------------------------------------------------------

    def _evaluate(self) -> None:
        with self._timed("evaluate"):
            accuracy, loss = (
                evaluate(self.gradients.task, self.model, self.config.test_batch)
                if self.together is None
                else self.together.evaluate()
            )
        self._note("evaluations", round=self.round, accuracy=accuracy, loss=loss)

    def _record_trust(self, t: int, server: Server) -> None:
        """Mean weight of each worker in the next vote, and how much of this one it was overruled in."""
        if not self._is_watched(t):
            return
        server.settle()
        workers = tuple(range(self.config.workers))
        everybody = Voters(workers=workers, batch_sizes=self.config.batch_sizes)
        weight = (server.rule.weights(everybody).double().mean(1) / ONE).tolist()
        overruled = [server.report.disagreement.get(m) for m in workers]
        self._note("trust", round=t, weight=weight, crossover=overruled)

    def _note(self, what: str, **values: object) -> None:
        for name, value in values.items():
            self.history[what][name].append(value)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def _say_where(self) -> None:
        """Note where the rounds from here on are computed, if that is new."""
        here = self.machine.named()
        if not self.machines or {k: self.machines[-1][k] for k in here} != here:
            self.machines.append({"from_round": self.round + 1, **here})

    def result(self, status: str) -> dict[str, Any]:
        """What results.json holds of this run."""
        self.settle()
        trust = {"workers": list(range(self.config.workers)), **self.history["trust"]}
        return {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "versions": versions(),
            "status": status,
            "coordinates": self.layout.size,
            "rounds_done": self.round,
            "machine": self.machines,
            "seconds": self.seconds,
            **self.history,
            "accuracy_by_class": by_class(self.gradients.task, self.model, self.config.test_batch)
            if status == "done"
            else [],
            **{name: lengths.pack(self.history[name]) for name in PER_ROUND},
            "trust": lengths.short(trust) if trust["round"] else {},
            "sign_error": lengths.short(self.history["sign_error"]) if self.config.sign_error else {},
        }

    # ---- stopping and going on -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit."""
        self.settle()
        averages: list[Tensor | None] = [encoder.average for encoder in self.encoders]
        if self.together is not None and self.config.momentum and self.config.rule != "oracle":
            averages = [average.cpu() for average in self.together.averages]
        return {
            "kind": "run",
            "version": VERSION,
            "config": json.dumps(self.config.as_dict(), sort_keys=True),
            "round": self.round,
            "model": {name: p.detach() for name, p in self.model.state_dict().items()},
            "server": None if self.server is None else self.server.state_dict(),
            "averages": averages,
            "residuals": [encoder.residual for encoder in self.encoders],
            "decision": None if self._last is None else list(self._last),
            "history": self.history,
            "seconds": self.seconds,
            "machines": self.machines,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same configuration."""
        check_state(state, kind="run")
        state = upgraded(state, "the checkpoint", VERSION, {1: _said_in_full})
        mine, its = self.config.as_dict(), json.loads(state["config"])
        differing = [k for k in mine | its if mine.get(k) != its.get(k)]
        if differing:
            what = ", ".join(f"{k} {its.get(k)!r} instead of {mine.get(k)!r}" for k in differing)
            raise StateError(f"the checkpoint is of another run: {what}")
        self.round, self.history, self.seconds = state["round"], state["history"], state["seconds"]
        self.machines, self._unsent = state["machines"], None
        self._last = None if state["decision"] is None else Planes(*state["decision"])
        self.model.load_state_dict(state["model"])
        device, kept = self.gradients.x.device, (state["averages"], state["residuals"])
        for encoder, average, residual in zip(self.encoders, *kept, strict=True):
            encoder.average = None if average is None else average.to(device)
            encoder.residual = None if residual is None else residual.to(device)
        if self.together is not None:
            self.together.load_averages(state["averages"])
        if self.server is not None:
            self.server.load_state_dict(state["server"])


def _said_in_full(state: dict[str, Any]) -> dict[str, Any]:
    """From format 1, in which what did not exist yet could be missing."""
    nothing = {"decision": None, "machines": [], "residuals": [None] * len(state["averages"])}
    config = Config.from_dict(json.loads(state["config"])).as_dict()
    seconds = dict.fromkeys(PHASES, 0.0) | state["seconds"]
    return nothing | state | {"config": json.dumps(config, sort_keys=True), "seconds": seconds}
