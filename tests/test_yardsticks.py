from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import ConfigError, StateError, checkpoint
from signvote.core.bits import Zeros
from signvote.core.vote import Votes
from signvote.kernels import Planes
from signvote.kernels.reference import pack
from signvote.sim import Config, Run
from signvote.sim.machine import Machine
from signvote.sim.yardsticks import Adam, mean, median, messages
from signvote.tasks import Task
from tests.test_attacks import finished


def small(rule: str, **settings: Any) -> Config:
    rest = {"batch_sizes": (4, 4, 4, 4, 16), "rounds": 4, "evaluate_every": 4, **settings}
    return Config(task="mnist-10k", model="mlp", rule=rule, **rest)


def test_mean_is_of_samples_and_median_of_workers() -> None:
    sent = torch.tensor([[1.0, 5.0], [2.0, 9.0], [6.0, -1.0]])
    assert mean(sent, (1, 1, 2)).tolist() == [3.75, 3.0]
    assert median(sent, (1, 1, 2)).tolist() == [2.0, 5.0]
    assert median(sent[:2], (1, 1)).tolist() == [1.5, 7.0]


def test_an_attacker_sends_its_own_magnitudes_with_the_signs_of_its_attack() -> None:
    signals = torch.tensor([[1.0, -2.0, 0.0], [3.0, 4.0, 5.0], [torch.nan, 1.0, 1.0]])
    planes = Planes(pack(torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]]) > 0), None)
    present = torch.tensor([True, True, False])
    votes = Votes(workers=(0, 1, 2), planes=planes, n=3, batch_sizes=(4, 8, 2), present=present)
    sent, sizes = messages(signals, votes)
    assert sent.tolist() == [[1, -2, 0], [-3, 4, -5]]
    assert sizes == (4, 8)


@pytest.mark.parametrize("rule", ["sgd", "median", "adamw"])
@pytest.mark.parametrize("recipe", ["paper", "tuned"])
def test_together_as_one_by_one(digits: Task, rule: str, recipe: str) -> None:
    settings: dict[str, Any] = {"interpolation": 0.5, "decays": "matrices", "steps": {"*bias": 0.5}}
    config = small(rule, recipe=recipe, miss=0.2, attack="invert:2", decay=0.01, **settings)
    one, all_ = (finished(config, digits, together=way) for way in (False, True))
    torch.testing.assert_close(one.gradients.x, all_.gradients.x)
    assert one.history["bytes_up"] == all_.history["bytes_up"]


def test_one_attacker_turns_the_mean_and_not_the_median(digits: Task) -> None:
    """Four workers with a batch of 4 are honest, the strong one inverts: 16 of 32 samples."""
    truth = finished(small("sgd", rounds=1), digits).gradients.x
    start = Run(small("sgd"), digits).gradients.x

    def along(rule: str) -> float:
        x = finished(small(rule, rounds=1, attack="invert:1"), digits).gradients.x
        return float(torch.nn.functional.cosine_similarity(x - start, truth - start, dim=0))

    assert along("sgd") < 0.3 < along("median")


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_adamw_is_that_of_torch(beta2: float) -> None:
    x = torch.randn(50)
    ours, theirs = x.clone(), x.clone()
    adam = Adam(ours, 0.9, beta2)
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, beta2), weight_decay=0.5)
    for _ in range(20):
        theirs.grad = torch.randn(50)
        ours.mul_(1 - 0.01 * 0.5).sub_(adam.scaled(theirs.grad), alpha=0.01)
        optimizer.step()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_yardstick_goes_on_bit_for_bit(digits: Task, rule: str, tmp_path: Path) -> None:
    config = small(rule, miss=0.2)
    whole, part, rest = (Run(config, digits) for _ in range(3))
    for _ in range(4):
        whole.step()
    for _ in range(2):
        part.step()
    checkpoint.save(tmp_path / "run", part.state_dict())
    rest.load_state_dict(checkpoint.load(tmp_path / "run"))
    for _ in range(2):
        rest.step()
    assert torch.equal(rest.gradients.x, whole.gradients.x)


@pytest.mark.parametrize("wrong", [torch.zeros(1), torch.zeros(3, dtype=torch.int64)])
def test_averages_of_another_shape_are_refused(digits: Task, wrong: Tensor) -> None:
    run = Run(small("adamw"), digits)
    run.step()
    state = run.state_dict()
    state["adam"]["v"] = wrong
    with pytest.raises(StateError, match="the checkpoint is damaged: a memory is"):
        Run(small("adamw"), digits).load_state_dict(state)


def test_nobody_there(digits: Task) -> None:
    run = finished(small("median", miss=1.0), digits)
    assert torch.equal(run.gradients.x, Run(small("median"), digits).gradients.x)


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
@pytest.mark.parametrize(
    "settings",
    [
        {"feedback": True},
        {"top": 0.1},
        {"top": 0.02, "feedback": True, "miss": 0.3},
        {"clip": 0.1, "decay": 0.1, "decays": "matrices", "steps": {"*bias": 0.5}, "interpolation": 0.5},
    ],
)
def test_options_of_the_encoder_go_on_bit_for_bit(
    digits: Task, settings: dict[str, Any], zeros: Zeros
) -> None:
    """One by one or together, in one go or stopped half way: the same parameters and the same bytes."""
    config = small("weighted", attack="flip=0.2:1", zeros=zeros, **settings)
    whole = finished(config, digits, together=True)
    machines = [Machine(), Machine(together=True)]
    for first, second in ((machines[0], machines[1]), (machines[1], machines[0])):
        part, rest = Run(config, digits, first), Run(config, digits, second)
        for _ in range(2):
            part.step()
        rest.load_state_dict(part.state_dict())
        for _ in range(2):
            rest.step()
        assert torch.equal(rest.gradients.x, whole.gradients.x)
        for name in ("bytes_up", "bytes_down"):
            assert rest.result("done")[name] == whole.result("done")[name]
    plain = finished(small("weighted", attack="flip=0.2:1", zeros=zeros), digits)
    assert not torch.equal(plain.gradients.x, whole.gradients.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beta2": 1.0}, "beta2 is 1.0; it must lie in"), ({"beta": 0.9}, "there is no option of adamw 'beta'")],
)
def test_wrong_options_of_adamw(digits: Task, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(small("adamw", options=options), digits)


def test_the_option_of_adamw_counts(digits: Task) -> None:
    runs = [Run(small("adamw", options=options), digits) for options in ({}, {"beta2": 0.5})]
    for run in runs:
        run.step()
        run.step()
    assert not torch.equal(runs[0].gradients.x, runs[1].gradients.x)
