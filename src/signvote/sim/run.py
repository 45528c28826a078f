"""The run loop: every round goes through the real core, from encoder to decision, in real bytes."""

from __future__ import annotations

import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signvote import __version__, checkpoint
from signvote.checkpoint import write_atomically
from signvote.core.ballot import Ballot, parse
from signvote.core.bits import SERVER, unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.server import Server
from signvote.core.vote import ONE, Votes
from signvote.core.worker import apply_decision
from signvote.errors import StateError
from signvote.kernels import Planes
from signvote.sim.attacks import parse_attack
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.gradients import Gradients, evaluate
from signvote.sim.population import Sampler, generator, parse_absences, present, split
from signvote.tasks import Task

FORMAT = 1
PHASES = ("gradients", "encode", "server", "apply", "evaluate")
SECONDS_BETWEEN_CHECKPOINTS = 30.0


class Run:
    """A simulated training: `step()` does one round; everything it depends on is in `state_dict()`."""

    def __init__(self, config: Config, task: Task) -> None:
        assert config.zeros is not None
        assert config.momentum is not None
        self.config, self.task = config, task
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(config.seed, 0).initial_seed())
            self.model = task.model()
        self.gradients = Gradients(task, self.model)
        self.layout = self.gradients.layout
        parts = split(task.train.labels, config.workers, config.split, config.seed)
        self.sampler = Sampler(parts, config.batch_sizes, config.seed)
        self.absences = parse_absences(config.absent, config.workers)
        self.hostility = parse_attack(config.attack, config.workers)
        common = {"zeros": config.zeros, "run": config.seed}
        self.encoders = [
            Encoder(self.layout, m, momentum=config.momentum, batch_size=size, **common)  # type: ignore[arg-type]
            for m, size in enumerate(config.batch_sizes)
        ]
        self.server = (
            None
            if config.rule in YARDSTICKS
            else Server(self.layout, config.rule, **common, **config.options)  # type: ignore[arg-type]
        )
        self.round = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.history: dict[str, Any] = {
            "evaluations": {"round": [], "accuracy": [], "loss": []},
            "voters": [],
            "bytes_up": [],
            "bytes_down": [],
            "trust": {"round": [], "weight": [], "crossover": []},
            "sign_error": {"round": [], "error": []},
        }

    # ---- one round -------------------------------------------------------------------------------

    def step(self) -> None:
        """Do the next round; evaluate before the first, at every `evaluate_every`-th and at the last."""
        if self.round == 0:
            self._evaluate()
        t = self.round + 1
        voters = present(t, self.config.workers, self.config.miss, self.absences, self.config.seed)
        if self.server is None:
            self._yardstick(t, voters)
        else:
            self._vote(t, voters, self.server)
        self.round = t
        self.history["voters"].append(len(voters))
        if self._is_watched(t):
            self._evaluate()

    def _is_watched(self, t: int) -> bool:
        return t % self.config.evaluate_every == 0 or t == self.config.rounds

    def _gradient(self, worker: int, t: int) -> Tensor:
        with self._timed("gradients"):
            indices = self.sampler.batch(worker, t - 1)
            return self.gradients.of(indices, (self.config.seed, 6, t, worker))

    def _vote(self, t: int, voters: list[int], server: Server) -> None:
        ballots = {}
        for m in voters:
            gradient = self._gradient(m, t)
            with self._timed("encode"):
                planes = self.encoders[m].encode(t, gradient)
                if planes is not None and self.hostility is not None:
                    where = {"n": self.layout.size, "seed": self.config.seed, "round": t, "worker": m}
                    planes = self.hostility.change(planes, **where)
                ballots[m] = self.encoders[m].ballot(t, planes)
        with self._timed("server"):
            message = server.decide(t, ballots)
        if self._is_watched(t):
            self._record_trust(t, server)
        self._apply(t, message)
        self.history["bytes_up"].append(sum(map(len, ballots.values())))
        self.history["bytes_down"].append(len(message) * len(voters))

    def _apply(self, t: int, message: bytes) -> None:
        decision = parse(message, layout=self.layout, run=self.config.seed, round=t, worker=SERVER)
        if self.config.sign_error and self._is_watched(t):
            everything = self.gradients.of(torch.arange(len(self.task.train)), (self.config.seed, 7))
            error = _sign_error(unpack_signs(decision.planes(), self.layout.size), everything)
            self._note("sign_error", round=t, error=error)
        with self._timed("apply"):
            apply_decision(self.gradients.parameters, decision, self.config.step_at(t))

    def _yardstick(self, t: int, voters: list[int]) -> None:
        """`oracle`: the sign of the batch-weighted mean gradient. `sgd`: that mean itself."""
        mean = torch.zeros(self.layout.size)
        total = sum(self.config.batch_sizes[m] for m in voters)
        for m in voters:
            mean.add_(self._gradient(m, t), alpha=self.config.batch_sizes[m] / total)
        self.history["bytes_up"].append(mean.nbytes * len(voters))
        self.history["bytes_down"].append(mean.nbytes * len(voters))
        with self._timed("encode"):
            planes = self.encoders[0].encode(t, mean)
        if planes is None:
            return
        if self.config.rule == "oracle":
            who = {"worker": SERVER, "round": t, "run": self.config.seed}
            self._apply(t, Ballot.cast(self.layout, planes, **who).to_bytes())
            return
        with self._timed("apply"), torch.no_grad():  # encode left the average in `mean`
            for segment in self.layout.segments:
                move = mean[segment.start : segment.stop].view(segment.shape)
                self.gradients.parameters[segment.name].sub_(move, alpha=self.config.step_at(t))

    # ---- what is watched -------------------------------------------------------------------------

    def _evaluate(self) -> None:
        with self._timed("evaluate"):
            accuracy, loss = evaluate(self.task, self.model, self.config.test_batch)
        self._note("evaluations", round=self.round, accuracy=accuracy, loss=loss)

    def _record_trust(self, t: int, server: Server) -> None:
        """Mean weight of each worker in the next vote, and how much of this one it was overruled in."""
        workers, n = tuple(range(self.config.workers)), self.layout.size
        nothing = Planes(torch.empty(len(workers), 0, dtype=torch.int64), None)
        everyone = Votes(workers=workers, planes=nothing, n=n, batch_sizes=self.config.batch_sizes)
        weight = (server.rule.weights(everyone).double().mean(1) / ONE).tolist()
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

    def result(self, status: str) -> dict[str, Any]:
        """What results.json holds of this run."""
        trust = {"workers": list(range(self.config.workers)), **self.history["trust"]}
        return {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "versions": {
                "signvote": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "status": status,
            "coordinates": self.layout.size,
            "rounds_done": self.round,
            "seconds": self.seconds,
            **self.history,
            "trust": trust if trust["round"] else {},
            "sign_error": self.history["sign_error"] if self.config.sign_error else {},
        }

    # ---- stopping and going on -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit."""
        return {
            "kind": "run",
            "version": FORMAT,
            "config": json.dumps(self.config.as_dict(), sort_keys=True),
            "round": self.round,
            "model": {name: p.detach() for name, p in self.model.state_dict().items()},
            "server": None if self.server is None else self.server.state_dict(),
            "averages": [encoder.average for encoder in self.encoders],
            "history": self.history,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same configuration."""
        if (state.get("kind"), state.get("version")) != ("run", FORMAT):
            raise StateError(f"not a state of a run in version {FORMAT}")
        mine, its = self.config.as_dict(), json.loads(state["config"])
        differing = [k for k in mine | its if mine.get(k) != its.get(k)]
        if differing:
            what = ", ".join(f"{k} {its.get(k)!r} instead of {mine.get(k)!r}" for k in differing)
            raise StateError(f"the checkpoint is of another run: {what}")
        self.round, self.history, self.seconds = state["round"], state["history"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for encoder, average in zip(self.encoders, state["averages"], strict=True):
            encoder.average = average
        if self.server is not None:
            self.server.load_state_dict(state["server"])


def train(
    config: Config,
    task: Task,
    out: Path,
    *,
    resume: bool = False,
    watch: Callable[[Run], bool | None] = lambda run: None,
) -> dict[str, Any]:
    """Run to the end, or to Ctrl-C: either leaves `result.json` and `checkpoint.safetensors` in `out`.

    Args:
        config: the run.
        task: what `load_task(config.task)` gives, or one's own.
        out: a folder, made if need be.
        resume: go on from the checkpoint in `out`, if there is one.
        watch: called after every round; the run stops if it says True.

    """
    path = out / "checkpoint.safetensors"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # see gradients.py
    try:
        run = Run(config, task)
        out.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            run.load_state_dict(checkpoint.load(path))
        saved = time.monotonic()
        with interruptible() as stopped:
            while run.round < config.rounds and not stopped.is_set():
                run.step()
                if watch(run):
                    stopped.set()
                if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                    checkpoint.save(path, run.state_dict())
                    saved = time.monotonic()
            checkpoint.save(path, run.state_dict())
            result = run.result("done" if run.round == config.rounds else "interrupted")
            write_atomically(out / "result.json", json.dumps(result).encode())
    finally:
        torch.set_num_threads(threads)
    return result


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a round is never cut in half; a second Ctrl-C raises."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _sign_error(decision: Tensor, truth: Tensor) -> float:
    """Share of the decided signs that differ from the true gradient's, where both have one."""
    both = (decision != 0) & (truth != 0)
    return float(((decision != torch.sign(truth)) & both).sum() / both.sum().clamp_min(1))
