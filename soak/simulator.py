"""The simulator, by its command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ranks import PATIENCE

from signvote import checkpoint
from signvote.sim import Config, train
from signvote.sim.run import Run
from signvote.tasks import load_task
from soak import memory
from soak.core import is_refused
from soak.damage import damaged, rewrite
from soak.disks import small_disk
from soak.driver import Episode, Stage
from soak.processes import stop_for
from soak.states import equal

ROUNDS = 250
SAVE_EVERY = 0.3  # seconds
SAME = (
    "round",
    "model",
    "server",
    "averages",
    "residuals",
    "history",
)  # of a checkpoint: all but time and machine
MODEL = ("--model", "mlp")
SIZES = (4, 16, 64)


class Runs:
    """A run that is started again and again with --resume, until it is done."""

    def __init__(self, stage: Stage, out: Path) -> None:
        self.rule = stage.chance.choice(("weighted", "it-signsgd", "robust"))
        self.seed = stage.chance.randrange(1000)
        self.out = out
        self.counter = stage.folder / "rounds"
        self.errors = stage.folder / "errors"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def flags(self) -> list[str]:
        flags = ["--rule", self.rule, "--seed", str(self.seed), "--rounds", str(ROUNDS), *MODEL]
        return [*flags, "--batch-sizes", *map(str, SIZES), "--out", str(self.out), "--resume"]

    def start(self) -> subprocess.Popen[bytes]:
        """Start or resume it."""
        command = [sys.executable, "-m", "soak.command", str(self.counter), str(SAVE_EVERY), "train"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        return self.process

    def kill(self) -> None:
        """As by `kill -9`."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @property
    def rounds(self) -> int:
        """Rounds computed so far, some of them twice."""
        return self.counter.stat().st_size if self.counter.exists() else 0

    def wait_for_round(self) -> bool:
        """Wait until another round is done; False: the run ended before."""
        assert self.process is not None
        before = self.rounds
        deadline = time.monotonic() + PATIENCE
        while self.rounds == before and self.process.poll() is None:
            assert time.monotonic() < deadline, "no round is done"
            time.sleep(0.01)
        return self.process.poll() is None

    def finish(self) -> None:
        """Let it end, and compare it with a run in this process that nobody disturbs."""
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        assert code == 0, self.errors.read_text()
        config = Config(
            task="mnist-10k", model="mlp", rule=self.rule, seed=self.seed, rounds=ROUNDS, batch_sizes=SIZES
        )
        whole = self.out.parent.parent / "whole"
        result = train(config, load_task("mnist-10k", model="mlp"), whole)
        for name in SAME:
            wanted, got = (
                checkpoint.load(folder / "checkpoint.safetensors")[name] for folder in (whole, self.out)
            )
            assert equal(got, wanted), f"{name} differs"
        got = json.loads((self.out / "result.json").read_text())
        assert got["evaluations"] == result["evaluations"]


@contextmanager
def runs(stage: Stage, out: Path | None = None) -> Iterator[Runs]:
    """A run whose process is gone afterwards."""
    made = Runs(stage, out or stage.folder / "here" / "run")
    try:
        yield made
    finally:
        if made.process is not None:
            made.kill()


def kills(stage: Stage) -> Episode:
    """Killed at random moments, among them while it starts and while it writes; resumed each time."""
    with runs(stage) as made:
        faults = 0
        made.start()
        for _ in range(4):
            if stage.chance.random() < 0.8 and not made.wait_for_round():
                break
            time.sleep(stage.chance.random())
            made.kill()
            faults += 1
            made.start()
        made.finish()
        return Episode(injected=faults, survived=faults, lost=made.rounds - ROUNDS)


def stops(stage: Stage) -> Episode:
    """Stopped and continued."""
    with runs(stage) as made:
        faults = 0
        process = made.start()
        while made.wait_for_round() and faults < 6:
            stop_for(process.pid, stage.chance.random())
            time.sleep(0.2 * stage.chance.random())
            faults += 1
        made.finish()
        return Episode(injected=faults, survived=faults, lost=made.rounds - ROUNDS)


def full_disks(stage: Stage) -> Episode:
    """The disk is full: one sentence that names a file, exit code 2. With room again the run resumes."""
    (stage.folder / "here").mkdir()
    with (
        small_disk(stage.folder / "here" / "disk", kib=8192) as disk,
        runs(stage, disk.folder / "run") as made,
    ):
        faults, survived = 2, 0
        for _ in range(faults):
            process = made.start()
            made.wait_for_round()
            disk.fill(leave_kib=stage.chance.randrange(500))
            code = process.wait(PATIENCE)
            told = made.errors.read_text()
            survived += code == 2 and told.startswith("signvote: ") and str(disk.folder) in told
            disk.free()
        made.start()
        made.finish()
        return Episode(injected=faults, survived=survived, lost=made.rounds - ROUNDS)


def damaged_checkpoints(stage: Stage) -> Episode:
    """A damaged checkpoint is refused; the command says so in a sentence; with the good one it resumes."""
    with runs(stage) as made:
        made.start()
        made.wait_for_round()
        path = made.out / "checkpoint.safetensors"
        while not path.exists() and made.wait_for_round():
            pass
        assert made.process is not None
        made.process.send_signal(signal.SIGINT)
        made.process.wait(PATIENCE)
        good = path.read_bytes()
        state = checkpoint.load(path)
        task = load_task("mnist-10k", model="mlp")
        config = Config.from_dict(json.loads(state["config"]))

        def load() -> dict[str, Any]:
            run = Run(config, task)
            run.load_state_dict(checkpoint.load(path))
            return run.state_dict()

        faults, survived = 41, 0
        for _ in range(faults - 1):
            rewrite(path, damaged(good, stage.chance))
            survived += is_refused(path, load, state)
        rewrite(path, good[: len(good) // 2])
        code = made.start().wait(PATIENCE)
        told = made.errors.read_text()
        survived += code == 2 and told.startswith("signvote: ") and path.name in told
        rewrite(path, good)
        made.start()
        made.finish()
    return Episode(injected=faults, survived=survived)


def compare_kills(stage: Stage) -> Episode:
    """The main process of `compare` is killed: its workers end, and the same command finishes the rest."""
    grid = [
        "compare",
        *MODEL,
        "--rules",
        "majority",
        "weighted",
        "--modes",
        "4",
        "--rounds",
        "80",
        "--jobs",
        "2",
    ]
    results = []
    for name in ("disturbed", "whole"):
        out = stage.folder / name
        command = [sys.executable, "-c", "from signvote.cli import main; main()", *grid, "--out", str(out)]
        if name == "disturbed":
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            while not list(out.glob("runs/*")) and process.poll() is None:
                time.sleep(0.05)
            time.sleep(2 * stage.chance.random())
            process.kill()
            process.communicate(timeout=PATIENCE)  # returns when no process has its output open any more
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
        runs = json.loads((out / "results.json").read_text())["runs"]
        results.append([(run["config"]["rule"], run["status"], run["evaluations"]) for run in runs])
    assert results[0] == results[1]
    return Episode(injected=1, survived=1)


def long_run(stage: Stage) -> Episode:
    """Rounds without end, until Ctrl-C: memory stays where it is, and the result is valid."""
    out = stage.folder / "run"
    counter = stage.folder / "rounds"
    flags = [*MODEL, "--rule", stage.chance.choice(("weighted", "robust")), "--batch-sizes", "4", "4", "4"]
    flags += ["--rounds", "10000000", "--evaluate-every", "2000", "--out", str(out)]
    command = [sys.executable, "-m", "soak.command", str(counter), "30", "train", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    samples: list[memory.Sample] = []
    end = time.monotonic() + stage.seconds
    try:
        while time.monotonic() < end or len(samples) < 30:
            assert process.poll() is None, "the run ended"
            if counter.exists() and counter.stat().st_size:
                samples.append((counter.stat().st_size, memory.resident(process.pid)))
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert result["rounds_done"] == os.path.getsize(counter)
    steady = memory.is_steady(samples)
    return Episode(injected=1, survived=steady, rounds=samples[-1][0], slope=memory.slope(samples), lost=0)
