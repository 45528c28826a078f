"""Workers that come and go as processes, for the tests of `Vote(members=...)`, and what they must come to."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from signvote import Members, Server, Vote, Worker, checkpoint
from signvote.core.encoding import Memory
from signvote.core.layout import Layout
from signvote.engines.ddp import modules
from signvote.sim import Config
from tests.ranks import PATIENCE, Batches, checksum, config, fresh, wait_for

COUNT = itertools.count()
SEEDS = Lock()  # threads share the seed of new models
NEW_NETWORK = 0x40000000  # of setns
Log = Sequence[Mapping[str, Any]]


def addresses(count: int) -> list[str]:
    """Addresses of loopback that nobody else uses, one host each."""
    chance = random.Random(f"{os.getpid()} {next(COUNT)} {time.monotonic_ns()}")
    found = []
    for _ in range(count):
        host = f"127.{chance.randrange(1, 255)}.{chance.randrange(256)}.{chance.randrange(1, 255)}"
        with socket.create_server((host, 0)) as probe:
            found.append(f"{host}:{probe.getsockname()[1]}")
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all workers share."""

    world: int  # with those that come late
    rounds: int  # unless the file `last` in the folder has another number
    peers: list[str]
    folder: str
    closer: int = 1  # a worker that stays: nobody finishes a round before it has voted
    late: dict[int, str] = field(default_factory=dict)  # addresses of those that come late
    networks: list[str] = field(
        default_factory=list
    )  # the network namespace of each; []: all in that of the test
    saves: bool = False  # whether momentum is saved after each round
    rule: str = "weighted"
    options: dict[str, Any] = field(default_factory=dict)  # of Vote
    more: dict[str, Any] = field(default_factory=dict)  # settings of Members

    @property
    def config(self) -> Config:
        return config(self.rule, self.world, self.rounds)

    @property
    def last(self) -> int:
        """The last round."""
        file = Path(self.folder, "last")
        return int(file.read_text()) if file.exists() else self.rounds

    @property
    def enough(self) -> Path:
        """A file: once it is there, `closer` ends the training."""
        return Path(self.folder, "enough")

    def close(self, rounds: int) -> None:
        """Let all workers stop after this round, which must be a later one for all."""
        new = Path(self.folder, "new")
        new.write_text(str(rounds))
        new.rename(Path(self.folder, "last"))

    def saved(self, worker: int) -> Path:
        return Path(self.folder, f"momentum-{worker}.safetensors")

    def log(self, worker: int) -> Path:
        return Path(self.folder, f"log-{worker}")


class Death(BaseException):
    """The end of a worker that is a thread."""


def fall_dead(optimizer: Vote) -> None:
    """Die in a thread: all connections break, and nobody listens."""
    company = optimizer.poll.company  # type: ignore[attr-defined]
    company.lose("death")
    company.membership.close()
    raise Death


def member(worker: int, plan: Plan, act: Callable[..., object] | None, args: tuple[Any, ...]) -> None:
    """Train to the end; a line of the log for each step."""
    if plan.networks:
        enter_network(plan.networks[worker])
    torch.set_num_threads(1)
    log = plan.log(worker)
    try:
        path = plan.saved(worker)
        loaded = checkpoint.load(path)["round"] if path.exists() else None
        note(log, start=os.getpid(), loaded=loaded)
        model, optimizer = made(worker, plan)
        train(worker, plan, model, optimizer, act, args)
        optimizer.leave()
        note(log, end=checksum(model))
    except Death:
        pass
    except BaseException as error:
        note(log, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def enter_network(name: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/var/run/netns/{name}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), NEW_NETWORK) == 0


def train(
    worker: int,
    plan: Plan,
    model: nn.Module,
    optimizer: Vote,
    act: Callable[..., object] | None,
    args: tuple[Any, ...],
) -> None:
    batches = Batches(worker, plan.config)
    while optimizer.round < plan.last:
        t = optimizer.round + 1
        if worker == plan.closer and plan.enough.exists() and not Path(plan.folder, "last").exists():
            plan.close(t + 5)
        for group in optimizer.param_groups:
            group["lr"] = plan.config.step_at(t)
        optimizer.zero_grad()
        batches.loss(model, t).backward()  # type: ignore[no-untyped-call]
        if act is not None:
            act(t, optimizer, worker, plan, *args)
        optimizer.step(batch_size=plan.config.batch_sizes[worker])
        report = optimizer.report
        has_voted = report.round == t
        voted = {"voters": report.voters} if has_voted else {}
        note(plan.log(worker), round=optimizer.round, tried=t, sum=checksum(model), time=time.time(), **voted)


def made(worker: int, plan: Plan) -> tuple[nn.Module, Vote]:
    settings = plan.config
    with SEEDS:
        model = fresh(settings)
    usual = {"timeout": PATIENCE, "answer": 60.0, "patience": PATIENCE}
    saving = {"save": plan.saved(worker), "save_every": 1} if plan.saves else {}
    members = Members(
        peers=plan.peers,
        worker_id=worker,
        address=plan.late.get(worker, ""),
        **{**usual, **saving, **plan.more},
    )
    optimizer = Vote(
        model.parameters(),
        momentum=settings.momentum,
        rule=settings.rule,
        run=settings.seed,
        chunk=1280,
        members=members,
        **plan.options,
    )
    return model, optimizer


def note(log: Path, **content: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps(content) + "\n")


class Crew:
    """Workers, each in a thread of this process, which costs little, or in a process of its own."""

    def __init__(self, plan: Plan, *, threads: bool = False) -> None:
        self.plan = plan
        self.starts: Counter[int] = Counter()
        self._threads = threads
        self._all_modules = modules._all_modules
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.warm"])
        self._workers: dict[int, Any] = {}
        self._read: dict[int, tuple[int, list[dict[str, Any]]]] = {}  # bytes of each log, and its lines

    def __enter__(self) -> Crew:
        if self._threads:  # looking at all objects disturbs threads that are making some
            modules._all_modules = list
        return self

    def __exit__(self, *_: object) -> None:
        modules._all_modules = self._all_modules
        for worker in self._workers.values():
            if not self._threads:
                worker.kill()
                worker.join()

    def start(self, worker: int, act: Callable[..., object] | None = None, *args: Any) -> None:
        """Start a worker; one that is to die has died before."""
        if worker in self._workers:
            self._workers[worker].join(PATIENCE)
            assert not self._workers[worker].is_alive()
        make: Any = Thread if self._threads else self._context.Process
        started = make(target=member, args=(worker, self.plan, act, args), daemon=True)
        started.start()
        self.starts[worker] += 1
        self._workers[worker] = started

    def signal(self, worker: int, number: int) -> None:
        os.kill(self._workers[worker].pid, number)

    def log(self, worker: int) -> list[dict[str, Any]]:
        path = self.plan.log(worker)
        if not path.exists():
            return []
        offset, lines = self._read.get(worker, (0, []))
        with path.open("rb") as file:
            file.seek(offset)
            whole, end, _ = file.read().rpartition(b"\n")
        lines += [json.loads(line) for line in whole.splitlines()]
        self._read[worker] = (offset + len(whole) + len(end), lines)
        return lines

    def tail(self, worker: int, lines: int = 30) -> list[dict[str, Any]]:
        """The end of a log."""
        return self.log(worker)[-lines:]

    @property
    def logs(self) -> dict[int, list[dict[str, Any]]]:
        return {worker: self.log(worker) for worker in range(self.plan.world)}

    def round_of(self, worker: int) -> int:
        """The last round that this worker has finished since its last start."""
        if sum("start" in line for line in self.log(worker)) < self.starts[worker]:
            return 0
        for line in reversed(self.log(worker)):
            if "round" in line:
                return int(line["round"])
            if "start" in line:
                break
        return 0

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened that must happen, unless a worker fails."""

        def has_happened() -> bool:
            for worker, log in self.logs.items():
                errors = [line["trace"] for line in log[-2:] if "error" in line]
                assert not errors, f"worker {worker}: {errors[-1]}"
            return happened()

        wait_for(has_happened)

    def ends(self, *workers: int) -> set[int]:
        """The checksums that these workers end with."""
        self.wait_for(lambda: all(self.log(worker) and "end" in self.log(worker)[-1] for worker in workers))
        return {self.log(worker)[-1]["end"] for worker in workers}

    def finish(self, *workers: int) -> History:
        """Let these workers end; what happened, after a comparison with a replay."""
        self.plan.enough.touch()
        assert len(self.ends(*workers)) == 1
        return check(self.plan, self.logs, self.plan.last)


# ---- what they must come to ----------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What happened, as the logs show it."""

    voters: dict[int, list[int]]  # by round: whose votes were counted
    alone: dict[int, set[int]]  # by round: who finished it with others that were cut off, too; not counted
    returns: dict[
        int, dict[int, int | None]
    ]  # by round and worker: starts again, with the momentum of a round


def history(logs: Mapping[int, Log], rounds: int) -> History:
    """Read the logs of all workers."""
    told: dict[int, dict[int, list[int]]] = {t: {} for t in range(1, rounds + 1)}
    returns: dict[int, dict[int, int | None]] = {}
    for worker, log in logs.items():
        loaded: int | None = None
        is_new = False
        for line in log:
            if "start" in line:
                loaded, is_new = line["loaded"], True
            elif "round" in line:
                if is_new and ("voters" in line or line["round"] >= line["tried"]):
                    begin = line["round"] + ("voters" not in line)
                    returns.setdefault(begin, {})[worker] = loaded
                    is_new = False
                if "voters" in line:
                    told[line["round"]][worker] = line["voters"]
    voters, alone = {}, {}
    for t, by_worker in told.items():
        assert by_worker, f"nobody voted in round {t}"
        kinds = Counter(tuple(each) for each in by_worker.values())
        usual = list(kinds.most_common(1)[0][0])
        voters[t] = usual
        alone[t] = {w for w, its in by_worker.items() if its != usual and w in its and w not in usual}
    return History(voters, alone, returns)


def replayed(plan: Plan, story: History) -> dict[int, int]:
    """A checksum of the parameters after each round: `Worker` and `Server` with the same absences."""
    torch.set_num_threads(1)
    settings = plan.config
    model = fresh(settings)
    layout = Layout.of(dict(model.named_parameters()))
    server = Server(layout, settings.rule, run=settings.seed)
    crew = {w: Batches(w, settings) for w in range(plan.world)}
    workers: dict[int, Worker] = {}
    memories: dict[int, dict[int, Memory]] = {w: {} for w in range(plan.world)}
    sums = {}
    for t in sorted(story.voters):
        ballots = {}
        for w, round in story.returns.get(t, {}).items():
            workers[w] = Worker(model, w, momentum=settings.momentum, run=settings.seed)
            known = [each for each in memories[w] if round is not None and each <= round]
            if known:
                workers[w].encoder.memory = memories[w][max(known)].map(torch.Tensor.clone)
            memories[w] = {each: memory for each, memory in memories[w].items() if each in known}
        for w in sorted({*story.voters[t], *story.alone[t]}):
            model.zero_grad()
            crew[w].loss(model, t).backward()  # type: ignore[no-untyped-call]
            workers[w].batch_size = settings.batch_sizes[w]
            ballot = workers[w].ballot(t)
            memories[w][t] = workers[w].encoder.memory.map(torch.Tensor.clone)
            for old in [each for each in memories[w] if each < t - 100]:
                if len(memories[w]) > 2:
                    del memories[w][old]
            if w in story.voters[t]:
                ballots[w] = ballot
        applier = Worker(model, 0, run=settings.seed)
        applier.apply(server.decide(t, ballots), settings.step_at(t))
        sums[t] = checksum(model)
    return sums


def check(plan: Plan, logs: Mapping[int, Log], rounds: int) -> History:
    """The logs show what a replay comes to, after every round."""
    story = history(logs, rounds)
    sums = replayed(plan, story)
    for worker, log in logs.items():
        for line in log:
            is_alone = worker in story.alone.get(line.get("round", 0), ()) and "voters" in line
            if "round" in line and line["round"] and not is_alone:
                assert line["sum"] == sums[line["round"]], f"worker {worker} after round {line['round']}"
    return story
