"""Local steps over torch.distributed: the simulator's parameters, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from signvote.engines.ddp import load, save
from signvote.errors import EngineError
from tests.local import ROUNDS, LocalScript, settings
from tests.ranks import simulated, together

CASES: list[tuple[str, dict[str, Any]]] = [
    ("weighted", {}),
    ("majority", {"inner": "sgd", "step": 0.1}),
    ("weighted", {"options": {"per": "tensor"}, "outer_momentum": 0.0}),
    ("robust", {"outer_step": 1.0}),
]


def by_cases(rank: int, world: int) -> list[list[int]]:
    return [LocalScript(rank, settings(rule, world, **more)).train(ROUNDS) for rule, more in CASES]


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_have_the_parameters_of_the_simulator(world: int, tmp_path: Path) -> None:
    wanted = [simulated(settings(rule, world, **more)) for rule, more in CASES]
    for found in together(world, by_cases, folder=tmp_path):
        assert found == wanted


def unequal(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 votes after one step, the others after three; rank 1 has a bad change in the second vote."""
    script = LocalScript(rank, settings("weighted", world), every=1 if rank == 0 else 3)
    sums = [script.round()]
    sizes = script.optimizer.batch_sizes
    if rank == 1:
        script.step()
        with torch.no_grad():
            next(script.model.parameters()).fill_(torch.inf)
    sums += script.train(2)
    return {"sums": sums, "sizes": sizes, "abstained": script.optimizer.report.abstained}


def over_ddp(rank: int, world: int) -> int:
    """DistributedDataParallel averages nothing."""
    script = LocalScript(rank, settings("weighted", world))
    script.net = DistributedDataParallel(script.model)
    return script.train(2)[-1]


def saved_and_loaded(rank: int, world: int, folder: str) -> bool:
    """A checkpoint after a vote; between two votes there is none."""
    script = LocalScript(rank, settings("weighted", world))
    script.train(2)
    save(folder, script.optimizer, {"model": script.model.state_dict()})
    number = script.number
    wanted = script.train(2)
    resumed = LocalScript(rank, settings("weighted", world))
    found = load(folder, resumed.optimizer)
    assert found is not None
    resumed.model.load_state_dict(found[0]["model"])
    resumed.number = number
    same = resumed.train(2) == wanted
    script.step()
    with pytest.raises(EngineError, match="differ"):
        save(folder, script.optimizer, {})
    return same


def other_settings(rank: int, world: int) -> str:
    script = LocalScript(rank, settings("weighted", world), step=0.5 + rank)
    with pytest.raises(EngineError) as error:
        script.round()
    return str(error.value)


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {
        "unequal": unequal(rank, world),
        "ddp": over_ddp(rank, world),
        "saved": saved_and_loaded(rank, world, folder),
        "other": other_settings(rank, world),
    }


def test_scripts_on_two_ranks(tmp_path: Path) -> None:
    """In one pair of processes: starting them takes longer than all of it."""
    first, second = together(2, everything, str(tmp_path / "saved"), folder=tmp_path)
    assert first["unequal"]["sums"] == second["unequal"]["sums"]
    assert len(set(first["unequal"]["sums"])) == 3
    case = settings("weighted", 2)
    assert first["unequal"]["sizes"] == (case.batch_sizes[0], 3 * case.batch_sizes[1])
    assert first["ddp"] == second["ddp"] == simulated(case)[1]
    assert first["saved"]
    assert second["saved"]
    assert "settings: outer step" in first["other"]
