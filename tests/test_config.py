"""The configuration of a run: recipes, ranges, modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signvote import ConfigError
from signvote.sim import Config
from tests.test_sim import small


def test_recipes() -> None:
    paper, tuned = small(recipe="paper"), small(recipe="tuned")
    assert (paper.step, paper.momentum, paper.schedule, paper.zeros) == (1e-3, 0.0, "constant", "abstain")
    assert (tuned.step, tuned.momentum, tuned.schedule, tuned.zeros) == (3e-3, 0.9, "cosine", "coin")
    assert (paper.ramp, paper.decay, tuned.ramp, tuned.decay) == (0.0, 0.0, 0.05, 1.0)
    assert (paper.decays, tuned.decays, small("sgd").decays) == ("all", "matrices", "matrices")
    assert small(recipe="paper", step=0.5).step == 0.5
    assert small("sgd", recipe="paper").step == 0.1
    assert small("adamw").step != small("sgd").step != tuned.step


def test_a_constant_step_is_that_of_the_paper() -> None:
    paper = small(recipe="paper", rounds=3000)
    assert {paper.step_at(t) for t in range(1, 3001)} == {1e-3}


@given(st.floats(1e-6, 10), st.floats(0, 1), st.integers(1, 200), st.sampled_from(["constant", "cosine"]))
def test_the_step_rises_then_falls_and_never_exceeds_its_size(
    step: float, ramp: float, rounds: int, schedule: Any
) -> None:
    config = small(step=step, ramp=ramp, rounds=rounds, schedule=schedule)
    plain = replace(config, ramp=0.0)
    steps = [config.step_at(t) for t in range(1, rounds + 1)]
    for t, size in enumerate(steps, start=1):
        assert 0 < size <= plain.step_at(t) <= step
        if t >= ramp * rounds:
            assert size == plain.step_at(t), "after the ramp nothing differs"
    rising = [t for t in range(1, rounds + 1) if t <= ramp * rounds]
    for t in rising:
        assert steps[t - 1] == pytest.approx(plain.step_at(t) * t / (ramp * rounds))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rule": "weightedd"}, "there is no rule 'weightedd'; did you mean 'weighted'"),
        ({"rule": "zz"}, r"there is no rule 'zz'\. All: majority"),
        ({"recipe": "papr"}, "there is no recipe 'papr'; did you mean 'paper'"),
        ({"mode": 2}, "give a mode or batch_sizes, not both"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"interpolation": 1.0}, r"interpolation is 1.0; it must be in \[0, 1\)"),
        ({"decays": "norms"}, "there is no value of decays 'norms'"),
        (
            {"steps": {"fc*": "big"}},
            "the factor of steps for 'fc\\*' is 'big'; it must be a number, 0 or more",
        ),
        ({"steps": {"fc*": True}}, "the factor of steps for 'fc\\*' is True"),
        ({"steps": {"fc*": -1}}, "the factor of steps for 'fc\\*' is -1"),
        ({"clip": 0.0}, "clip is 0.0; it must be above 0"),
        ({"ramp": 1.5}, r"ramp is 1.5; it must be in \[0, 1\]"),
        ({"decay": -1.0}, "decay is -1.0; it must be 0 or more"),
        ({"miss": 1.5}, "miss is 1.5"),
        ({"min_voters": 0}, "min_voters is 0; it must be in 1..4, the workers"),
        ({"min_voters": 5}, "min_voters is 5; it must be in 1..4, the workers"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"test_batch": 0}, "test_batch is 0"),
        ({"schedule": "linear"}, "schedule is linear"),
        ({"zeros": "up"}, "zeros is 'up'"),
        ({"attack": "bribe:1"}, "there is no attack 'bribe'"),
        ({"absent": ("7:1",)}, "absent is '7:1'"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        small(**changes)


def test_a_mode_is_kept_and_fills_the_batch_sizes() -> None:
    config = Config(task="mnist-10k", rule="weighted", mode=4)
    assert config.batch_sizes == (4,) * 14 + (904,)
    assert Config(task="mnist-10k", rule="weighted").mode == 1
    assert Config.from_dict(config.as_dict()) == config
