"""`Server` and `Worker`: over TCP as processes, and in one process where that is enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.flower_cluster import free_port
from tests.ranks import PATIENCE
from tests.test_ballot import check_mutated_ballots

from signvote import Layout, Server, StateError, Worker, checkpoint
from soak import memory, wire
from soak.damage import damaged, rewrite
from soak.disks import small_disk
from soak.driver import Episode, Stage
from soak.links import relay_to
from soak.processes import kill, measured, start, stop_for
from soak.states import equal

RULES = ("majority", "weighted", "it-signsgd", "robust")
WORKERS = 3
ROUNDS = 60
PAUSE = 0.3  # seconds between two faults, at most


# ---- processes over TCP ------------------------------------------------------------------------------


class Crew:
    """A server and workers as processes. Any of them may be killed, stopped and started again."""

    def __init__(self, rule: str, folder: Path, port: int, workers_port: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.rule = rule
        self.port = port
        self.workers_port = workers_port  # where workers find the server: perhaps behind a relay
        self.members: dict[int, BaseProcess] = {}  # -1: the server
        for member in range(-1, WORKERS):
            self.start(member)

    def start(self, member: int) -> None:
        if member < 0:
            started = start(wire.serve, self.port, self.rule, WORKERS, str(self.folder))
        else:
            started = start(wire.work, self.workers_port, member, ROUNDS, str(self.folder))
        self.members[member] = started

    @property
    def is_done(self) -> bool:
        return len(list(self.folder.glob("worker-*.done"))) == WORKERS

    @property
    def rounds_computed(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("worker-*.rounds"))

    def check(self) -> None:
        """All hold what an undisturbed training gives, bit for bit: model, trust and counters."""
        wanted = wire.undisturbed(self.rule, WORKERS, ROUNDS)
        server = checkpoint.load(self.folder / "server.safetensors")["server"]
        assert equal(server, wanted["server"]), "the server's state differs"
        for member in range(WORKERS):
            model = checkpoint.load(self.folder / f"worker-{member}.safetensors")["model"]
            assert equal(model, wanted["model"]), f"the model of worker {member} differs"


@contextmanager
def crew(stage: Stage, port: int, workers_port: int) -> Iterator[Crew]:
    """Processes that are gone afterwards."""
    made = Crew(stage.chance.choice(RULES), stage.folder / "crew", port, workers_port)
    try:
        yield made
    finally:
        for process in made.members.values():
            kill(process)


def disturbed(stage: Stage, made: Crew, fault: Callable[[], object]) -> int:
    """Inject faults until training is done; how many."""
    faults = 0
    deadline = time.monotonic() + PATIENCE
    while not made.is_done:
        time.sleep(stage.chance.random() * PAUSE)
        if not made.is_done:
            fault()
            faults += 1
        assert time.monotonic() < deadline, "training does not end"
    made.check()
    return faults


def kills(stage: Stage) -> Episode:
    """The server or a worker is killed, and started again."""
    port = free_port()
    with crew(stage, port, port) as made:

        def fault() -> None:
            victim = stage.chance.randrange(-1, WORKERS)
            kill(made.members[victim])
            made.start(victim)

        faults = disturbed(stage, made, fault)
        lost = made.rounds_computed - WORKERS * ROUNDS
    return Episode(injected=faults, survived=faults, lost=lost)


def stops(stage: Stage) -> Episode:
    """The server or a worker is stopped for a while."""
    port = free_port()
    with crew(stage, port, port) as made:

        def fault() -> None:
            victim = stage.chance.randrange(-1, WORKERS)
            if made.members[victim].is_alive():
                stop_for(made.members[victim].pid, stage.chance.random())

        faults = disturbed(stage, made, fault)
    return Episode(injected=faults, survived=faults, lost=0)


def links(stage: Stage) -> Episode:
    """Workers reach the server through a relay that is slow, or breaks every connection."""
    port = free_port()
    with relay_to(port) as relay, crew(stage, port, relay.port) as made:

        def fault() -> None:
            seconds = stage.chance.random()
            if stage.chance.random() < 0.5:
                relay.cut(seconds)
            else:
                relay.slow(stage.chance.choice((500, 5_000, 50_000)), seconds)

        faults = disturbed(stage, made, fault)
        lost = made.rounds_computed - WORKERS * ROUNDS
    return Episode(injected=faults, survived=faults, lost=lost)


# ---- files -------------------------------------------------------------------------------------------


def damaged_checkpoints(stage: Stage) -> Episode:
    """A damaged file is a StateError that names it, and the good copy still loads."""
    rule = stage.chance.choice(RULES)
    state = wire.undisturbed(rule, WORKERS, 6)["server"]
    path = stage.folder / "server.safetensors"
    checkpoint.save(path, state)
    good = path.read_bytes()
    faults, survived = 200, 0
    for _ in range(faults):
        rewrite(path, damaged(good, stage.chance))
        survived += is_refused(path, lambda: loaded(rule, path), state)
    rewrite(path, good)
    assert equal(loaded(rule, path), state)
    return Episode(injected=faults, survived=survived)


def loaded(rule: str, path: Path) -> dict[str, Any]:
    """The state of a server that resumed from a file."""
    server = Server(Layout.of(wire.fresh()), rule)
    server.load_state_dict(checkpoint.load(path))
    return server.state_dict()


def is_refused(path: Path, load: Callable[[], object], state: object) -> bool:
    """Whether loading says which file is damaged. Damage that changes no content does no harm."""
    try:
        found = load()
    except StateError as error:
        if path.name in str(error):
            return True
        print(f"the error does not name the file: {error}")
        return False
    except Exception as error:
        print(f"damage gives {error!r}")
        return False
    if not equal(found, state):
        print("damage was loaded as another state")
        return False
    return True


def full_disks(stage: Stage) -> Episode:
    """A checkpoint that does not fit is an OSError that names the file; the one before stays whole."""
    state = wire.undisturbed("weighted", WORKERS, 3)
    faults, survived = 20, 0
    with small_disk(stage.folder / "disk", kib=256) as disk:
        path = disk.folder / "run.safetensors"
        checkpoint.save(path, state)
        for _ in range(faults):
            disk.fill(leave_kib=stage.chance.randrange(5))
            try:
                checkpoint.save(path, state | {"more": wire.fresh().state_dict()})
            except OSError as error:
                survived += path.name in str(error) and equal(checkpoint.load(path), state)
            disk.free()
        checkpoint.save(path, state)
        assert [found.name for found in disk.folder.iterdir()] == [path.name], "something is left behind"
    return Episode(injected=faults, survived=survived)


# ---- ballots -----------------------------------------------------------------------------------------


def mutated_ballots(stage: Stage) -> Episode:
    """Mutants of every kind of ballot: refused, or a ballot that encodes to the same bytes."""
    mutants = min(1_000_000, 10_000 * max(1, int(stage.seconds)))
    check_mutated_ballots(mutants)
    return Episode(injected=mutants, survived=mutants)


# ---- long runs ---------------------------------------------------------------------------------------


def long_run(stage: Stage) -> Episode:
    """Thousands of rounds while workers come and go: memory stays where it is."""
    rule = stage.chance.choice(("weighted", "robust"))
    found = measured(come_and_go, rule, stage.chance.randrange(2**31), stage.seconds)
    steady = memory.is_steady(found)
    return Episode(injected=1, survived=steady, rounds=found[-1][0], slope=memory.slope(found), lost=0)


def come_and_go(rule: str, seed: int, seconds: float, samples: Any) -> None:
    """Six of sixty workers vote; every tenth round one leaves, and the next one joins or returns."""
    server = Server(Layout.of(wire.fresh()), rule, run=seed)
    workers = [Worker(wire.fresh(), m, run=seed) for m in range(60)]
    for m, worker in enumerate(workers):
        for parameter in worker.parameters.values():
            parameter.grad = parameter.detach() + 0.01 * (m + 1)
    end = time.monotonic() + seconds
    t = 0
    while time.monotonic() < end:
        t += 1
        first = t // 10
        voters = [workers[m % len(workers)] for m in range(first, first + 6)]
        server.decide(t, {voter.worker_id: voter.ballot(t) for voter in voters})
        if t % 100 == 0:
            samples.put((t, memory.resident()))
