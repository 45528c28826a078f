"""The time of a run: kernels are compiled before the clock starts, and that changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from signvote.kernels import cpu
from signvote.sim import Config, train
from signvote.sim import run as of_run
from signvote.sim.setup import make_assignment
from signvote.sim.warmup import warm_up
from signvote.tasks import Task

COMPILING = 100.0  # seconds that the first call of a kernel takes, on the clock of these tests
RULES = ["majority", "it-signsgd", "weighted", "robust"]


def small(rule: str, **more: Any) -> Config:
    settings = {"rounds": 3, "evaluate_every": 3, "batch_sizes": (4, 8, 16), **more}
    return Config(task="mnist-10k", model="mlp", rule=rule, **settings)


class Clock:
    """Stands still, but for the first call of each kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        for name in ("sign_planes", "vote_", "vote_by_coordinate_", "disagreements", "step_"):
            monkeypatch.setattr(cpu, name, self.slow_at_first(getattr(cpu, name)))

    def slow_at_first(self, kernel: Any) -> Any:
        called = False

        def first(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            self.now += 0.0 if called else COMPILING
            called = True
            return kernel(*args, **kwargs)

        return first


@pytest.mark.parametrize("rule", [*RULES, "oracle"])
def test_no_round_pays_for_compilation(
    digits: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    clock = Clock(monkeypatch)
    seconds = train(small(rule), digits, tmp_path)["seconds"]
    assert clock.now >= 2 * COMPILING  # signs and a step, at least
    assert set(seconds.values()) == {0.0}


@pytest.mark.parametrize("rule", [*RULES, "oracle", "sgd"])
def test_a_result_is_the_same_without(
    digits: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    config = small(rule, zeros="abstain", top=0.1) if rule == "weighted" else small(rule)
    results = [train(config, digits, tmp_path / "with")]
    monkeypatch.setattr(of_run, "warm_up", lambda work: None)
    results.append(train(config, digits, tmp_path / "without"))
    for result in results:
        del result["seconds"]
    assert results[0] == results[1]


def test_no_random_state_is_touched(digits: Task) -> None:
    before = torch.get_rng_state()
    warm_up(make_assignment(small("robust"), digits))
    assert torch.equal(torch.get_rng_state(), before)
