"""What goes wrong: bad gradients, ranks that differ, hang, die, come back; real processes, really killed."""

from __future__ import annotations

import gc
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from signvote import Layout, StateError, Vote
from signvote.core.layout import trainable
from signvote.core.rule import Rule
from signvote.core.rules import make_rule
from signvote.engines.ddp import VoteState, load, process_group, save, saving, vote_gradients
from signvote.engines.ddp.handshake import ADVICE
from signvote.errors import EngineError
from tests.ranks import PATIENCE, Trainer, checksum, config, simulated, together, wait_for
from tests.test_optimizer_ranks import Script

ROOT = Path(__file__).parent.parent


# ---- a gradient that is not finite -------------------------------------------------------------------


def abstaining(rank: int, world: int, overlap: bool) -> tuple[list[int], dict[int, str]]:
    trainer = Trainer(rank, config("weighted", world, 8), overlap=overlap)
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
    wanted = simulated(config("weighted", 3, 8, absent=("1:3:3",)))
    for sums, abstained in together(3, abstaining, True, folder=tmp_path):
        assert sums == wanted
        assert abstained == {1: "non-finite gradient"}


def forgetful(rank: int, world: int) -> list[float]:
    weights = nn.Parameter(torch.zeros(8))
    kept, moved = [], []
    for _ in range(3):
        optimizer = Vote([weights], lr=1e-2, group=dist.new_group([0, 1]))
        if rank == 0:
            kept.append(optimizer)
        weights.grad = torch.ones(8)
        optimizer.step()
        del optimizer
        gc.collect()
        moved.append(round(weights[0].item(), 6))
    return moved


def test_a_rank_may_forget_an_optimizer_that_another_keeps(tmp_path: Path) -> None:
    """The next one of the same ranks finds the others at their new addresses."""
    assert together(2, forgetful, folder=tmp_path) == [[-0.01, -0.02, -0.03]] * 2


# ---- ranks that do not fit together ------------------------------------------------------------------


def misfit(what: str, odd: bool) -> VoteState:
    """A state that differs from the others in one thing if it is odd."""
    torch.manual_seed(odd if what == "parameters" else 0)
    model = nn.Linear(9, 3 if what == "layout" and odd else 2)
    rule: str | Rule = "weighted"
    settings: dict[str, Any] = {"timeout": 30}
    if what == "rule" and odd:
        rule = "majority"
    if what == "option" and odd:
        settings["forgetting"] = 0.5
    if what == "rule object":
        rule = make_rule("robust", Layout.of(trainable(model)), memory=0.8 if odd else 0.9)
    if what in ("momentum", "check_every") and odd:
        settings |= {"momentum": 0.5} if what == "momentum" else {"check_every": 7}
    if what == "min_voters" and odd:
        settings["min_voters"] = 2
    if what == "ids":
        settings["worker_id"] = 5
    state = VoteState(model, rule, **settings)
    if what == "round" and odd:
        state.poll.server.last_round = 3
    model(torch.ones(1, 9)).sum().backward()
    return state


MISFITS = {
    "layout": "layout of the model",
    "rule": "settings: rule",
    "option": "settings: options of the rule",
    "rule object": "settings: options of the rule",
    "momentum": "settings: encoding",
    "check_every": "settings: check_every",
    "min_voters": "settings: min_voters",
    "parameters": "parameters",
    "round": "round",
}  # what differs, and what the error calls it


def misfits(rank: int, world: int) -> list[str]:
    told = []
    for what in (*MISFITS, "ids"):
        state = misfit(what, rank == 1)
        with pytest.raises(EngineError) as error:
            vote_gradients(state)
        told.append(str(error.value))
    return told


def test_ranks_that_differ_all_raise_the_same_error(tmp_path: Path) -> None:
    *differ, ids = zip(*together(3, misfits, folder=tmp_path), strict=True)
    for told, what in zip(differ, MISFITS.values(), strict=True):
        advice = ADVICE if what == "parameters" else ""
        assert told == (f"rank 1 differs from rank 0 in the {what}{advice}",) * 3
    assert ids == ("worker ids by rank are [5, 5, 5]; they must differ",) * 3


def leaving(rank: int, world: int, how: str, folder: str) -> str:
    """Rank 1 dies after round 2, or hangs before the first until the others have given up."""
    process_group.GRACE = 0.2  # a survivor that takes longer is not heard of, which the error may say
    trainer = Trainer(rank, config("weighted", world, 50), timeout=2.0 if how == "hangs" else PATIENCE)
    if how == "dies":
        trainer.train(2)
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait_for(lambda: len(list(Path(folder).glob("gave-up-*"))) == world - 1)
        return "woke up"
    with pytest.raises(EngineError) as error:
        trainer.train(1)
    Path(folder, f"gave-up-{rank}").touch()
    return str(error.value)


def heard_of(error: str) -> tuple[set[int], set[int]]:
    """The ranks that an error calls alive, and those that it has not heard of."""
    alive = {int(rank) for rank in re.findall(r"rank (\d+) is alive", error)}
    silent = re.search(r"no report from rank ([\d, ]+): dead, cut off, or still computing$", error)
    return alive, set(map(int, silent[1].split(", "))) if silent else set()


@pytest.mark.parametrize(("how", "stage"), [("dies", "round 3"), ("hangs", "the first round")])
def test_the_error_says_who_is_alive_and_who_was_not_heard_of(how: str, stage: str, tmp_path: Path) -> None:
    for rank, text in enumerate(together(3, leaving, how, str(tmp_path), folder=tmp_path)):
        if rank != 1:
            alive, silent = heard_of(text)
            assert text.startswith(f"{stage} failed on rank {rank}: "), text
            assert 1 in silent, text
            assert alive | silent == {0, 1, 2} - {rank}, text


def reported(rank: int, world: int, folder: str) -> str:
    """Both get an error although both are alive, as when a link is cut; rank 1 takes its time to report."""
    process_group.GRACE = PATIENCE  # ends as soon as both have reported
    state = VoteState(nn.Linear(2, 2), "majority")
    voters = state.poll.team.voters
    assert isinstance(voters, process_group.ProcessGroup)
    voters.stage = "round 9"
    if rank == 1:
        wait_for(Path(folder, "waits").exists)
    else:
        Path(folder, "waits").touch()
    with pytest.raises(EngineError) as error, voters._named():
        raise RuntimeError(f"link {rank} is cut")
    return str(error.value)


def test_a_slow_survivor_is_not_called_dead(tmp_path: Path) -> None:
    answers = together(2, reported, str(tmp_path), folder=tmp_path)
    for rank, text in enumerate(answers):
        assert text == (
            f"round 9 failed on rank {rank}: link {rank} is cut."
            f" rank {1 - rank} is alive and reports: link {1 - rank} is cut"
        )


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
    rules, most, rounds = ["weighted", "it-signsgd", "robust"], max(before, after), 6
    args = (rules, most, rounds, str(tmp_path))
    together(before, first_part, *args, folder=tmp_path)
    away = [f"{m}:1:{rounds}" for m in range(before, most)] + [
        f"{m}:{rounds + 1}" for m in range(after, most)
    ]
    for sums in together(after, second_part, *args, folder=tmp_path):
        for rule, mine in zip(rules, sums, strict=True):
            assert mine == simulated(config(rule, most, 2 * rounds, absent=tuple(away)))[rounds:], rule


# A rank may die at any of these points: (victim, what is replaced by its death, at which call from now).
POINTS = {
    "before its votes are sent": (1, "all_to_all", 1),
    "after the votes, before it says that it is finite": (2, "all_gather", 1),
    "before the decisions are put together": (0, "all_gather", 2),
    "while it writes its own file": (1, "save_file", 1),
    "while the shared file is written": (0, "save_file", 2),
    "before the manifest is written": (0, "write_atomically", 1),
    "before its checkpoint is the latest": (0, "write_atomically", 2),
    "before the checkpoint before it is removed": (0, "rmtree", 1),
}


def arm(state: VoteState, name: str, call: int) -> None:
    """Let this process die, as by `kill -9`, when the exchange or the checkpoint gets to that call."""
    owner = {"save_file": saving, "write_atomically": saving, "rmtree": shutil}.get(
        name, state.poll.team.voters
    )
    usual, calls = getattr(owner, name), count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args, **kwargs)

    setattr(owner, name, deadly)


def killed(rank: int, world: int, point: str | None, rounds: int, folder: str) -> int | None:
    """Trains from the last checkpoint, a checkpoint every other round; the victim dies in the fourth round."""
    process_group.GRACE = 0.2
    trainer = Trainer(rank, config("it-signsgd", world, rounds))
    if found := load(folder, trainer.state):
        trainer.model.load_state_dict(found[0]["model"])
    victim, *deadly = POINTS[point] if point else (None,)
    start = trainer.state.round
    try:
        while trainer.state.round < rounds:
            if rank == victim and trainer.state.round == start + 3:
                arm(trainer.state, *deadly)  # type: ignore[arg-type]
            trainer.train(1)
            if trainer.state.round % 2 == 0:
                save(folder, trainer.state, {"model": trainer.model.state_dict()})
    except EngineError as error:
        assert victim in heard_of(str(error))[1], error
        return None
    return checksum(trainer.model)


@pytest.mark.slow
def test_a_rank_killed_at_any_point_changes_nothing(tmp_path: Path) -> None:
    """All ranks start again after each death, as under torchrun; in the end the simulator's parameters."""
    world, rounds = 3, 20
    for point in POINTS:
        sums = together(world, killed, point, rounds, str(tmp_path / "saved"), folder=tmp_path)
        assert sums == [None] * world, point
    sums = together(world, killed, None, rounds, str(tmp_path / "saved"), folder=tmp_path)
    assert sums == [simulated(config("it-signsgd", world, rounds))[-1]] * world
    kept = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert kept == ["latest", "round-000020"]


def incomplete(rank: int, world: int, folder: str) -> None:
    trainer = Trainer(rank, config("weighted", world, 4), over_ddp=False)
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
        with pytest.raises(StateError, match=r"worker-1\S+ is missing or cut short: \d+ bytes were saved"):
            load(folder, trainer.state)


def test_a_checkpoint_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    together(2, incomplete, str(tmp_path / "saved"), folder=tmp_path)


# ---- torchrun ----------------------------------------------------------------------------------------


DYING = """
import os, runpy, signal, sys
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from signvote.engines import ddp

def deadly(*script):
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    save = ddp.save

    def save_and_die(folder, state, *states):
        save(folder, state, *states)
        if attempt == rank and state.round == 20 * (attempt + 1):
            os.kill(os.getpid(), signal.SIGKILL)

    ddp.save = save_and_die
    sys.argv = list(script)
    runpy.run_path(script[0], run_name="__main__")

flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2", "--max-restarts", "4"]
config, *_ = config_from_args(parse_args([*flags, *sys.argv[1:]]))
config.start_method = "fork"  # a rank need not load torch again
elastic_launch(config, deadly)(*sys.argv[1:])
"""  # torchrun on a script; rank 0 dies after round 20 and, in the next attempt, rank 1 after round 40


EXAMPLE = "examples/ddp_mnist.py"
FLAGS = ("--model", "mlp", "--rounds", "60", "--save-every", "20", "--fixed")


def undisturbed(rank: int, world: int, folder: str) -> None:
    """The example in a process that is a rank already."""
    os.chdir(ROOT)
    sys.argv = [EXAMPLE, *FLAGS, "--checkpoints", folder]
    dist.init_process_group = lambda backend: None  # type: ignore[assignment, misc]
    runpy.run_path(EXAMPLE, run_name="__main__")


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again_and_the_example_goes_on(tmp_path: Path) -> None:
    """The example, undisturbed and with two ranks killed: the same parameters in the end."""
    (tmp_path / "dying.py").write_text(DYING)
    one, other = tmp_path / "undisturbed", tmp_path / "disturbed"
    together(2, undisturbed, str(one), folder=tmp_path)
    log = printed(str(tmp_path / "dying.py"), EXAMPLE, *FLAGS, "--checkpoints", str(other))
    assert log.count("failed (exitcode: -9)") == 2, log
    for name in ("shared.safetensors", "worker-0.safetensors", "worker-1.safetensors"):
        files = [folder / "round-000060" / name for folder in (one, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def printed(*script: str) -> str:
    """Run a script; what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.run(
        [sys.executable, *script],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    return run.stdout


# ---- a rank that stops -------------------------------------------------------------------------------


def stopping(rank: int, world: int) -> list[str]:
    """Rank 1 skips its third batch, and stops one step early."""
    script = Script(rank, config("majority", world, 10), wrapped="never", timeout=2.0)
    script.train(3 if rank == 1 else 4)
    return []


def test_a_rank_that_stops_early_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"round 4 failed on rank 0"):
        together(2, stopping, folder=tmp_path)
