"""Checkpoints of the engine: complete or absent, whatever died before, and refused in one sentence if damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from signvote import StateError
from signvote.engines.ddp import VoteState, load, process_group, save, saving, vote_gradients
from signvote.errors import EngineError
from tests.ranks import Trainer, alone, config, simulated, together
from tests.test_ddp_faults import arm

RULES = ("majority", "it-signsgd", "weighted", "robust")

__all__ = ["alone"]  # a fixture


def dying(rank: int, world: int, folder: str) -> int:
    """Three ranks save round 2; all have written round 4 when the first rank dies, and the others with it."""
    process_group.GRACE = 0.2
    trainer = Trainer(rank, config("it-signsgd", world, 8), over_ddp=False)
    for _ in range(2):
        trainer.train(2)
        if rank == 0 and trainer.state.round == 4:
            arm(trainer.state, "write_atomically", 1)
        try:
            save(folder, trainer.state, {"model": trainer.model.state_dict()})
        except EngineError:
            return trainer.state.round
    raise AssertionError("nobody died")


def returning(rank: int, world: int, folder: str) -> list[list[int]]:
    """Two come back, save round 4 again and continue from that."""
    sums = []
    for _ in range(2):
        trainer = Trainer(rank, config("it-signsgd", 3, 8), over_ddp=False)
        found = load(folder, trainer.state)
        assert found is not None
        trainer.model.load_state_dict(found[0]["model"])
        sums.append([trainer.state.round, *trainer.train(2)])
        save(folder, trainer.state, {"model": trainer.model.state_dict()})
    return sums


def test_the_file_of_a_dead_rank_spoils_no_later_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert together(3, dying, str(folder), folder=tmp_path) == [None, 4, 4]
    assert (folder / "latest").read_text() == "round-000002"
    left = {path.name for path in (folder / "round-000004").iterdir()}
    assert left == {"shared.safetensors", *(f"worker-{m}.safetensors" for m in range(3))}
    wanted = simulated(config("it-signsgd", 3, 8, absent=("2:3",)))
    for sums in together(2, returning, str(folder), folder=tmp_path):
        assert sums == [[2, *wanted[2:4]], [4, *wanted[4:6]]]
    assert {path.name for path in folder.iterdir()} == {"latest", "round-000006"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_before_the_first_round(rule: str, tmp_path: Path) -> None:
    """Training continues from it as from nothing, and a second checkpoint of the same round replaces it."""
    decisions = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(9, 8)
        state = VoteState(model, rule)
        if resumed:
            assert load(tmp_path, state) == ({"x": 2}, {})
        else:
            save(tmp_path, state, {"x": 1})
            save(tmp_path, state, {"x": 2})
            assert {path.name for path in tmp_path.glob("round-*")} == {"round-000000-1"}
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 9)).square().sum().backward()
            vote_gradients(state)
            assert model.weight.grad is not None
            decisions.append(model.weight.grad.clone())
    assert all(map(torch.equal, decisions[:3], decisions[3:]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is gone": (
        lambda p: (p / "r/worker-0.safetensors").unlink(),
        r"worker-0\S+ is missing or cut short",
    ),
    "a file is cut short": (lambda p: cut(p / "r/shared.safetensors"), r"shared\S+ is missing or cut short"),
    "no manifest": (
        lambda p: (p / "r/manifest.json").unlink(),
        r"manifest.json is missing: the checkpoint is not",
    ),
    "manifest cut short": (lambda p: cut(p / "r/manifest.json"), r"manifest.json is damaged"),
    "manifest of something": (
        lambda p: (p / "r/manifest.json").write_text("[]"),
        r"manifest.json is damaged",
    ),
    "manifest of nothing": (
        lambda p: (p / "r/manifest.json").write_text('{"version": 1, "files": {}}'),
        r"manifest.json is damaged: it does not list",
    ),
    "manifest from elsewhere": (
        lambda p: (p / "r/manifest.json").write_text(
            json.dumps({"version": 1, "files": {"shared.safetensors": 1, "../x": 1}})
        ),
        r"manifest.json is damaged: it does not list",
    ),
    "a later format": (
        lambda p: (p / "r/manifest.json").write_text('{"version": 2}'),
        r"manifest.json: format 2 is a later signvote's",
    ),
    "latest is not text": (lambda p: (p / "latest").write_bytes(b"\xff\xfe"), r"latest is damaged: it holds"),
    "latest is a path": (
        lambda p: (p / "latest").write_text("../other"),
        r"latest is damaged: it holds '../other'",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    state = VoteState(nn.Linear(9, 8), "weighted")
    save(tmp_path, state, {"x": 1})
    (tmp_path / "r").symlink_to("round-000000")
    damage, text = DAMAGE[what]
    damage(tmp_path)
    with pytest.raises(StateError, match=text):
        load(tmp_path, state)


@pytest.mark.usefixtures("alone")
def test_files_that_the_first_rank_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on machines without a common disk: the checkpoint before stays the latest."""
    state = VoteState(nn.Linear(9, 8), "weighted")
    save(tmp_path, state, {"x": 1})
    monkeypatch.setattr(saving, "_size", lambda path: None)
    with pytest.raises(StateError, match=r"rank 0 sees 0 of 2 files of .* must write to the same folder"):
        save(tmp_path, state, {"x": 2})
    monkeypatch.undo()
    assert load(tmp_path, state) == ({"x": 1}, {})
