"""Ranks of torch.distributed over gloo, as processes; started again as under torchrun."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tests.ranks import PATIENCE, Trainer, checksum, config, simulated, together
from tests.test_ddp_faults import heard_of

from signvote import StateError
from signvote.engines.ddp import load, process_group, save
from signvote.errors import EngineError
from soak import memory
from soak.damage import damaged, rewrite
from soak.disks import Disk, small_disk
from soak.driver import Episode, Stage
from soak.links import namespace
from soak.states import equal

WORLD = 3
RULE = "it-signsgd"  # its counters are shared out among the ranks
SAVE_EVERY = 2  # rounds
DAMAGES = 30  # of files, in an episode


def resumed(rank: int, rounds: int, folder: str, **more: Any) -> Trainer:
    """A rank, from the last checkpoint if there is one."""
    process_group.GRACE = 0.5  # not to wait each time for a rank that is dead
    trainer = Trainer(rank, config(RULE, WORLD, rounds), **more)
    if found := load(folder, trainer.state):
        trainer.model.load_state_dict(found[0]["model"])
    return trainer


def step(trainer: Trainer, folder: str) -> None:
    """A round, and every other round a checkpoint."""
    trainer.train(1)
    if trainer.state.round % SAVE_EVERY == 0:
        save(folder, trainer.state, {"model": trainer.model.state_dict()})


# ---- kills -------------------------------------------------------------------------------------------


def killed(rank: int, world: int, seed: int, rounds: int, folder: str) -> tuple[int, int | None]:
    """Rounds computed, and a checksum if this attempt reaches the end. A random rank dies at a random moment."""
    trainer = resumed(rank, rounds, folder)
    chance = random.Random(seed)
    victim = chance.randrange(world)
    start = trainer.state.round
    deadly = start + chance.randrange(4) if seed else None
    while trainer.state.round < rounds:
        if rank == victim and trainer.state.round == deadly:
            delay = chance.random() * 0.05
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            step(trainer, folder)
        except EngineError as error:
            assert victim in heard_of(str(error))[1], error
            return trainer.state.round - start, None
        except RuntimeError:  # DDP's own, once: when it rebuilds its buckets
            if "_rebuild_buckets" not in traceback.format_exc():
                raise
            return trainer.state.round - start, None
    return trainer.state.round - start, checksum(trainer.model)


def kills(stage: Stage) -> Episode:
    """Ranks are killed, all start again; in the end the simulator's parameters, bit for bit."""
    rounds, folder = 40, str(stage.folder / "saved")
    faults = computed = 0
    seed = stage.chance.randrange(1, 2**31)
    while True:
        answers = together(WORLD, killed, seed, rounds, folder, folder=stage.folder)
        computed += max((answer[0] for answer in answers if answer), default=0)
        if all(answer and answer[1] for answer in answers):
            break
        faults += 1
        seed = stage.chance.randrange(1, 2**31) if faults < 6 else 0  # 0: nobody dies
    assert [answer[1] for answer in answers] == [simulated(config(RULE, WORLD, rounds))[-1]] * WORLD
    return Episode(injected=faults, survived=faults, lost=computed - rounds)


# ---- stops -------------------------------------------------------------------------------------------


def watched(rank: int, world: int, rounds: int, folder: str, timeout: float) -> int | str:
    """Leaves its pid, trains and saves; a checksum, or the error that it got."""
    Path(folder).mkdir(exist_ok=True)
    trainer = resumed(rank, rounds, folder, timeout=timeout)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    try:
        while trainer.state.round < rounds:
            step(trainer, folder)
            time.sleep(0.02)  # as if gradients took longer
    except EngineError as error:
        return str(error)
    return checksum(trainer.model)


def stop_now_and_then(stage: Stage, folder: Path, faults: list[float], end: threading.Event) -> None:
    """Stop a random rank now and then, each for up to a second, until the training ends."""
    while not end.wait(0.3 * stage.chance.random()):
        try:
            pid = int((folder / f"pid-{stage.chance.randrange(WORLD)}").read_text())
            seconds = stage.chance.random()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            faults.append(seconds)
        except (OSError, ValueError):  # not started yet
            continue


def stops(stage: Stage) -> Episode:
    """Ranks are stopped for less than the timeout: nothing happens but waiting."""
    rounds, folder = 30, stage.folder / "saved"
    faults: list[float] = []
    end = threading.Event()
    stopping = threading.Thread(target=stop_now_and_then, args=(stage, folder, faults, end))
    stopping.start()
    try:
        sums = together(WORLD, watched, rounds, str(folder), PATIENCE, folder=stage.folder)
    finally:
        end.set()
        stopping.join()
    assert sums == [simulated(config(RULE, WORLD, rounds))[-1]] * WORLD
    return Episode(injected=len(faults), survived=len(faults), lost=0)


def hung(rank: int, world: int, victim: int, rounds: int, folder: str) -> int | str:
    """One rank stops for good in the middle, until its operator kills it; the others give up after the timeout."""
    trainer = resumed(rank, rounds, folder, timeout=PATIENCE if victim < 0 else 3.0)
    start = trainer.state.round
    try:
        while trainer.state.round < rounds:
            if rank == victim and trainer.state.round == start + 5:
                me = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {me}"])
                os.kill(me, signal.SIGSTOP)
            step(trainer, folder)
    except EngineError as error:
        assert victim in heard_of(str(error))[1], error
        return str(error)
    return checksum(trainer.model)


def hangs(stage: Stage) -> Episode:
    """A rank hangs for longer than the timeout: an error that names it, and all start again."""
    rounds, folder = 20, str(stage.folder / "saved")
    victim = stage.chance.randrange(WORLD)
    answers = together(WORLD, hung, victim, rounds, folder, folder=stage.folder)
    told = [answer for rank, answer in enumerate(answers) if rank != victim]
    assert answers[victim] is None
    assert all(isinstance(answer, str) and "round 6 failed" in answer for answer in told), told
    sums = together(WORLD, hung, -1, rounds, folder, folder=stage.folder)
    assert sums == [simulated(config(RULE, WORLD, rounds))[-1]] * WORLD
    return Episode(injected=1, survived=1, lost=5 % SAVE_EVERY)


# ---- links -------------------------------------------------------------------------------------------


def links(stage: Stage) -> Episode:
    """Loopback of a network namespace is slow or loses everything, for less than the timeout."""
    rounds = 60
    with namespace(stage.chance) as network:
        command = network.inside(sys.executable, "-m", "soak.ddp", str(rounds), str(stage.folder))
        training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            while not list(stage.folder.glob("saved/pid-*")) and training.poll() is None:
                time.sleep(0.1)
            while training.poll() is None:
                time.sleep(0.3 * stage.chance.random())
                seconds = stage.chance.random()
                if stage.chance.random() < 0.5:
                    network.cut(seconds)
                else:
                    network.slow(stage.chance.choice((200, 1_000, 10_000)), seconds)
            printed, _ = training.communicate(timeout=PATIENCE)
        finally:
            training.kill()
    assert json.loads(printed) == [simulated(config(RULE, WORLD, rounds))[-1]] * WORLD, printed
    return Episode(injected=network.faults, survived=network.faults, lost=0)


# ---- files -------------------------------------------------------------------------------------------


def filled(rank: int, world: int, rounds: int, folder: str, disk: Disk | None) -> int | str:
    """The first rank fills the disk after some rounds: it cannot write its checkpoint."""
    trainer = resumed(rank, rounds, folder, timeout=3.0 if disk else PATIENCE)
    start = trainer.state.round
    try:
        while trainer.state.round < rounds:
            if disk and rank == 0 and trainer.state.round == start + 5:
                disk.fill(leave_kib=4)
            step(trainer, folder)
    except (EngineError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return checksum(trainer.model)


def full_disks(stage: Stage) -> Episode:
    """A checkpoint that does not fit: an error, the one before stays whole, and all resume from it."""
    rounds = 20
    with small_disk(stage.folder / "disk", kib=1024) as disk:
        folder = str(disk.folder / "saved")
        told = together(WORLD, filled, rounds, folder, disk, folder=stage.folder)
        assert str(told[0]).startswith("OSError"), told
        assert folder in str(told[0]), "the error does not name the file"
        disk.free()
        sums = together(WORLD, filled, rounds, folder, None, folder=stage.folder)
    assert sums == [simulated(config(RULE, WORLD, rounds))[-1]] * WORLD
    return Episode(injected=1, survived=1, lost=2)


def half(rank: int, world: int, rounds: int, folder: str) -> None:
    """The first half of a training."""
    trainer = resumed(rank, rounds, folder)
    while trainer.state.round < rounds // 2:
        step(trainer, folder)


def refused(rank: int, world: int, seed: int, rounds: int, folder: str) -> tuple[int, int]:
    """Rank 0 damages files of a checkpoint, which must be noticed; then all resume from the good one."""
    survived = 0
    trainer = resumed(rank, rounds, folder)
    torch.distributed.barrier()  # all have loaded it
    if rank == 0:
        chance = random.Random(seed)
        for _ in range(DAMAGES):
            survived += damage_is_noticed(Path(folder), trainer, chance)
    torch.distributed.barrier()
    trainer = resumed(rank, rounds, folder)
    trainer.train(rounds - trainer.state.round)
    return survived, checksum(trainer.model)


def damage_is_noticed(folder: Path, trainer: Trainer, chance: random.Random) -> bool:
    """Damage one file for as long as loading takes. Damage that changes no content does no harm."""

    def found() -> Any:
        return copy.deepcopy((load(folder, trainer.state), trainer.state.state_dict()))

    wanted = found()
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    good = path.read_bytes()
    rewrite(path, damaged(good, chance))
    try:
        if equal(found(), wanted):
            return True
        print(f"{path.name}, damaged, was loaded as another state", flush=True)
    except StateError as error:
        return str(folder) in str(error)
    except Exception as error:
        print(f"{path.name}, damaged: {error!r}", flush=True)
    finally:
        rewrite(path, good)
    return False


def damaged_checkpoints(stage: Stage) -> Episode:
    """Any file of a checkpoint may be damaged; what is loaded is the good one or nothing."""
    rounds, folder = 12, str(stage.folder / "saved")
    together(WORLD, half, rounds, folder, folder=stage.folder)
    seed = stage.chance.randrange(2**31)
    answers = together(WORLD, refused, seed, rounds, folder, folder=stage.folder)
    wanted = simulated(config(RULE, WORLD, rounds))[-1]
    assert [answer[1] for answer in answers] == [wanted] * WORLD
    return Episode(injected=DAMAGES, survived=answers[0][0])


# ---- gradients ---------------------------------------------------------------------------------------


def poisoned(rank: int, world: int, rounds: int, bad: list[list[int]]) -> int:
    """A loss of NaN or infinity in some rounds."""
    trainer = Trainer(rank, config("weighted", world, rounds))
    honest = trainer.loss

    def loss(t: int) -> torch.Tensor:
        factor = (torch.nan, torch.inf)[t % 2] if [rank, t] in bad else 1.0
        return honest(t) * factor

    trainer.loss = loss  # type: ignore[method-assign]
    return trainer.train(rounds)[-1]


def non_finite(stage: Stage) -> Episode:
    """A rank whose gradient is not finite abstains: as in the simulator, where it is absent."""
    rounds = 30
    bad = [[stage.chance.randrange(WORLD), t] for t in range(1, rounds + 1) if stage.chance.random() < 0.5]
    absent = tuple(f"{rank}:{t}:{t}" for rank, t in bad)
    sums = together(WORLD, poisoned, rounds, bad, folder=stage.folder)
    assert sums == [simulated(config("weighted", WORLD, rounds, absent=absent))[-1]] * WORLD
    return Episode(injected=len(bad), survived=len(bad), lost=0)


# ---- long runs ---------------------------------------------------------------------------------------


def endless(rank: int, world: int, rule: str, seconds: float) -> list[memory.Sample]:
    """Rounds until the first rank's time is over; its memory."""
    trainer = Trainer(rank, config(rule, world, 10**9))
    end = time.monotonic() + seconds
    samples = []
    is_over = torch.zeros(1)
    while not is_over:
        for _ in range(100):
            trainer.step()
        samples.append((trainer.state.round, memory.resident()))
        is_over.fill_(rank == 0 and time.monotonic() > end)
        torch.distributed.broadcast(is_over, 0)
    return samples


def long_run(stage: Stage) -> Episode:
    """Thousands of rounds: memory stays where it is, on every rank."""
    rule = stage.chance.choice(("weighted", RULE, "robust"))
    ranks = together(WORLD, endless, rule, stage.seconds, folder=stage.folder)
    steady = all(map(memory.is_steady, ranks))
    steepest = max(map(memory.slope, ranks))
    return Episode(injected=1, survived=steady, rounds=ranks[0][-1][0], slope=steepest, lost=0)


if __name__ == "__main__":  # the training of `links`, inside the network namespace
    home = Path(sys.argv[2])
    print(json.dumps(together(WORLD, watched, int(sys.argv[1]), str(home / "saved"), PATIENCE, folder=home)))
