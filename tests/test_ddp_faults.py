"""What goes wrong: bad gradients, ranks that differ, hang, die, come back; real processes, really killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from signvote import StateError
from signvote.engines.ddp import VoteState, load, meeting, save, vote_gradients
from signvote.errors import EngineError
from tests.ranks import Trainer, checksum, config, simulated, together

ROOT = Path(__file__).parent.parent
KILLS = 20


# ---- a gradient that is not finite -------------------------------------------------------------------


def abstaining(rank: int, world: int, overlap: bool) -> tuple[list[int], dict[int, str]]:
    trainer = Trainer(rank, config("pooled", world, 8), overlap=overlap)
    honest = trainer.loss
    abstained: dict[int, str] = {}
    trainer.loss = lambda t: honest(t) * (torch.nan if (rank, t) == (1, 3) else 1.0)  # type: ignore[method-assign]
    sums = []
    for _ in range(8):
        sums += trainer.train(1)
        abstained |= trainer.state.report.abstained
    return sums, abstained


def test_a_rank_without_finite_gradients_abstains_and_keeps_its_momentum(tmp_path: Path) -> None:
    """As in the simulator, where worker 1 misses round 3."""
    wanted = simulated(config("pooled", 3, 8, absent=("1:3:3",)))
    for sums, abstained in together(3, abstaining, True, folder=tmp_path):
        assert sums == wanted
        assert abstained == {1: "non-finite gradient"}


# ---- ranks that do not fit together ------------------------------------------------------------------


def misfits(rank: int, world: int) -> list[str]:
    odd = rank == 1
    told = []
    for what in ("layout", "parameters", "settings", "ids", "round"):
        torch.manual_seed(odd if what == "parameters" else 0)
        model = nn.Linear(9, 3 if what == "layout" and odd else 2)
        ids = {"worker_id": 5} if what == "ids" else {}
        state = VoteState(model, "pooled" if what != "settings" or odd else "majority", timeout=30, **ids)  # type: ignore[arg-type]
        if what == "round" and odd:
            state.server.last_round = 3
        model(torch.ones(1, 9)).sum().backward()
        with pytest.raises(EngineError) as error:
            vote_gradients(state)
        told.append(str(error.value))
    return told


def test_ranks_that_differ_all_raise_the_same_error(tmp_path: Path) -> None:
    answers = together(3, misfits, folder=tmp_path)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][:3] == [
        f"rank 1 differs from rank 0 in the {what}"
        for what in ("layout of the model", "parameters", "settings")
    ]
    assert answers[0][3:] == [
        "worker ids by rank are [5, 5, 5]; they must differ",
        "rank 1 differs from rank 0 in the round",
    ]


def leaving(rank: int, world: int, how: str) -> str:
    """Rank 1 dies, or hangs, after round 2."""
    trainer = Trainer(rank, config("pooled", world, 50), timeout=4.0)
    trainer.train(2)
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(14)
        return "woke up"
    start = time.monotonic()
    with pytest.raises(EngineError) as error:
        trainer.train(1)
    assert time.monotonic() - start < 20
    return str(error.value)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_error_names_the_rank_that_did_not_come(how: str, tmp_path: Path) -> None:
    for rank, text in enumerate(together(3, leaving, how, folder=tmp_path)):
        if rank != 1:
            assert text.startswith("rank 1 did not come to round 3 within 4 s, or died in it"), text


# ---- going on ----------------------------------------------------------------------------------------


def first_part(rank: int, world: int, rules: list[str], most: int, rounds: int, folder: str) -> None:
    for rule in rules:
        trainer = Trainer(rank, config(rule, most, 2 * rounds), over_ddp=False)
        trainer.train(rounds)
        save(Path(folder, rule), trainer.state, {"model": trainer.model.state_dict()})


def second_part(
    rank: int, world: int, rules: list[str], most: int, rounds: int, folder: str
) -> list[list[int]]:
    sums = []
    for rule in rules:
        trainer = Trainer(rank, config(rule, most, 2 * rounds), over_ddp=False)
        found = load(Path(folder, rule), trainer.state)
        assert found is not None
        trainer.model.load_state_dict(found[0]["model"])
        sums.append(trainer.train(rounds))
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1)])
def test_a_world_of_another_size_goes_on(before: int, after: int, tmp_path: Path) -> None:
    """As in the simulator, where workers leave or join in that round; trust and counters are shared out anew."""
    rules, most, rounds = ["pooled", "it-signsgd", "robust"], max(before, after), 6
    args = (rules, most, rounds, str(tmp_path))
    together(before, first_part, *args, folder=tmp_path)
    away = [f"{m}:1:{rounds}" for m in range(before, most)] + [
        f"{m}:{rounds + 1}" for m in range(after, most)
    ]
    for sums in together(after, second_part, *args, folder=tmp_path):
        for rule, mine in zip(rules, sums, strict=True):
            assert mine == simulated(config(rule, most, 2 * rounds, absent=tuple(away)))[rounds:], rule


def killed_now_and_then(rank: int, world: int, attempt: int, rounds: int, folder: str) -> int | None:
    """Trains from the last checkpoint; until the last attempt one rank is killed, who and when is random."""
    meeting.GRACE = 0.5  # not to wait 20 times for who is dead
    trainer = Trainer(rank, config("it-signsgd", world, rounds), timeout=10.0)
    if found := load(folder, trainer.state):
        trainer.model.load_state_dict(found[0]["model"])
    chance = random.Random(attempt)
    victim, after = chance.randrange(world), chance.randrange(4)
    start = trainer.state.round
    while trainer.state.round < rounds:
        if attempt < KILLS and rank == victim and trainer.state.round == start + after:
            delay = chance.random() * 0.05
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            trainer.train(1)
            if trainer.state.round % 2 == 0:
                save(folder, trainer.state, {"model": trainer.model.state_dict()})
        except EngineError as error:
            assert f"rank {victim}" in str(error), error
            return None
        except (
            RuntimeError
        ):  # DDP speaks for itself once, when it rebuilds its buckets; all else must be ours
            if "_rebuild_buckets" not in traceback.format_exc():
                raise
            return None
    return checksum(trainer.model)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """All ranks start again after each, as under torchrun; in the end the simulator's parameters, bit for bit."""
    world, rounds, deaths = 3, 150, 0
    for attempt in range(KILLS + 1):
        sums = together(world, killed_now_and_then, attempt, rounds, str(tmp_path / "saved"), folder=tmp_path)
        deaths += None in sums
    assert deaths == KILLS
    assert sums == [simulated(config("it-signsgd", world, rounds))[-1]] * world
    kept = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert kept == ["latest", "round-000150"]


def incomplete(rank: int, world: int, folder: str) -> None:
    trainer = Trainer(rank, config("pooled", world, 4), over_ddp=False)
    assert load(folder, trainer.state) is None
    trainer.train(1)
    save(folder, trainer.state, {"model": trainer.model.state_dict()}, {"mine": rank})
    found = load(folder, trainer.state)
    assert found is not None
    assert found[1] == {"mine": rank}
    trainer.train(1)
    with pytest.raises(StateError, match="no state given"):
        trainer.state.load_state_dict()
    if rank == 0:
        Path(folder, "round-000001", "worker-1.safetensors").unlink()
        with pytest.raises(StateError, match="has the states of 1 workers; 2 were saved"):
            load(folder, trainer.state)


def test_a_checkpoint_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    together(2, incomplete, str(tmp_path / "saved"), folder=tmp_path)


# ---- torchrun ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again_and_the_example_goes_on(tmp_path: Path) -> None:
    """The example, undisturbed and with two ranks killed from outside: the same parameters in the end."""
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    _torchrun(undisturbed)
    run = _started(disturbed)
    killed = 0
    deadline = time.monotonic() + 200
    while run.poll() is None and killed < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        if (disturbed / "latest").exists() and _round(disturbed) >= 20 * (killed + 1):
            victims = _ranks_of(run.pid)
            if victims:
                os.kill(victims[killed % len(victims)], signal.SIGKILL)
                killed += 1
                time.sleep(1)
    assert run.wait(timeout=200) == 0, disturbed.with_suffix(".log").read_text()
    assert killed == 2
    for name in ("shared.safetensors", "worker-0.safetensors", "worker-1.safetensors"):
        files = [folder / "round-000100" / name for folder in (undisturbed, disturbed)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def _command(folder: Path) -> list[str]:
    flags = [
        "--model",
        "mlp",
        "--rounds",
        "100",
        "--save-every",
        "20",
        "--fixed",
        "--checkpoints",
        str(folder),
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "4"]
    return [sys.executable, *launch, "examples/ddp_mnist.py", *flags]


def _started(folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder.with_suffix(".log"), "w") as log:
        return subprocess.Popen(_command(folder), cwd=ROOT, env=environment, stdout=log, stderr=log)


def _torchrun(folder: Path) -> None:
    run = _started(folder)
    assert run.wait(timeout=200) == 0, folder.with_suffix(".log").read_text()


def _round(folder: Path) -> int:
    return int((folder / "latest").read_text().removeprefix("round-"))


def _ranks_of(parent: int) -> list[int]:
    """The processes that torchrun started and that run the example."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = []
    for child in map(int, children):
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"ddp_mnist" in line:
            found.append(child)
    return found
