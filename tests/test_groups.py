"""Parameters that step and decay by factors of their own: the same ones, and the same bits, in every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from signvote import ConfigError, Factors, Layout, Vote, Worker, factors, parameter_groups
from signvote.core.update import step_
from signvote.kernels import Planes, words_for
from signvote.sim.descent import Descent
from signvote.sim.run import Run
from signvote.tasks import MODELS
from tests.optimized import made, trained
from tests.ranks import CLASSES, INPUTS, config, task

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HOW: dict[str, Any] = {"decays": "matrices", "steps": {"*": 0.3, "2.*": 0.7, "2.bias": 0.1}}


class Tied(nn.Module):
    """Everything that a language model has; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.tokens = nn.Embedding(9, 4)
        self.head.weight = self.tokens.weight
        self.bags = nn.EmbeddingBag(9, 4)
        self.mixing = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


# ---- which -----------------------------------------------------------------------------------------


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    decaying = [name for name, its in factors(Tied()).items() if its.decay]
    assert decaying == ["mixing.weight"]
    assert "frozen.weight" not in factors(Tied())
    assert set(factors(Tied(), decays="all").values()) == {Factors()}
    named = {"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)}
    assert factors(named) == {"matrix": Factors(), "vector": Factors(decay=0.0)}


def test_the_models_of_the_experiments() -> None:
    gpt = factors(MODELS["gpt-tiny"]())
    assert {name for name, its in gpt.items() if not its.decay} == {
        "tokens.weight", "places.weight", "norm.weight",
        *(f"blocks.{i}.norm{j}.weight" for i in (0, 1) for j in (1, 2)),
    }  # fmt: skip
    resnet = factors(MODELS["resnet20"]())
    assert all(bool(its.decay) == name.endswith(("conv.weight", "1.weight", "2.weight", "fc.weight"))
               for name, its in resnet.items() if "bn" not in name and name != "fc.bias")  # fmt: skip
    assert not any(its.decay for name, its in resnet.items() if "bn" in name or name == "fc.bias")


def test_the_last_pattern_that_fits_a_name_counts() -> None:
    steps = {"*": 0.5, "norm.*": 2, "*.bias": 0.1}
    found = {name: its.step for name, its in factors(Tied(), steps=steps).items()}
    assert found["mixing.weight"] == 0.5
    assert found["norm.weight"] == 2
    assert found["norm.bias"] == 0.1


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"decays": "none"}, "there is no value of decays 'none'"),
        (
            {"steps": {"tokens": 0.5}},
            "steps has a factor for 'tokens', and no parameter is called so: scale, head",
        ),
        ({"steps": {"*": -1}}, r"the factor of steps for '\*' is -1; it must be a number, 0 or more"),
    ],
)
def test_what_is_refused(how: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        factors(Tied(), **how)


def test_a_run_names_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(ConfigError, match="steps has a factor for 'head', and no parameter is called so"):
        Run(config("weighted", 2, 2, steps={"head": 0.5}), task())


# ---- the steps -------------------------------------------------------------------------------------

numbers = st.sampled_from([0.0, 0.1, 0.3, 1.0])
shapes = st.lists(st.tuples(st.integers(0, 90), numbers, numbers), min_size=1, max_size=8).filter(
    lambda found: any(size for size, *_ in found)
)


@pytest.mark.parametrize("device", DEVICES)
@given(shapes, st.integers(0, 9))
def test_a_vector_steps_as_its_parameters_one_by_one(
    device: str, parameters: list[tuple[int, float, float]], seed: int
) -> None:
    """By a decision, bit for bit; by floats, up to rounding. Coordinates without a vote decay as well."""
    layout = Layout([(str(i), (size,)) for i, (size, *_) in enumerate(parameters)])
    found = {str(i): Factors(step, decay) for i, (_, step, decay) in enumerate(parameters)}
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (2, words_for(layout.size)), generator=random)
    decision = Planes(words[0] & words[1], words[1]).map(lambda plane: plane.to(device))
    start = torch.randn(layout.size, generator=random).to(device)
    direction = torch.randn(layout.size, generator=random).to(device)
    together, alone, floats = start.clone(), start.clone(), start.clone()
    descent = Descent(together, layout, found)
    descent.decay_(1e-2, 0.7, decision.support)
    descent.step_(decision, 1e-2)
    Descent(floats, layout, found).move_(direction, 1e-2)
    for segment in layout.segments:
        its = found[segment.name]
        span = slice(segment.start, segment.stop)
        step_(alone[span], decision, segment.start, 1e-2 * its.step, 0.7 * its.decay)
        torch.testing.assert_close(floats[span], start[span] - 1e-2 * its.step * direction[span])
    assert torch.equal(together, alone)


def test_a_decision_of_nothing_decays_nothing() -> None:
    x = torch.ones(5)
    descent = Descent(x, Layout([("a", (2,)), ("b", (3,))]), {"a": Factors(decay=0.0)})
    descent.decay_(0.1, 1.0, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(x, torch.ones(5))
    descent.decay_(0.1, 1.0)
    assert x.tolist() == [1, 1, *[pytest.approx(0.9)] * 3]


# ---- engines ---------------------------------------------------------------------------------------


def with_zeros() -> nn.Module:
    """A unit of relu that is off has gradients of exactly 0."""
    return nn.Sequential(nn.Linear(INPUTS, 40), nn.ReLU(), nn.Linear(40, CLASSES))


@pytest.mark.parametrize("more", [{}, {"momentum": 0.0, "interpolation": 0.9}])
def test_an_optimizer_with_groups_is_the_simulator(more: dict[str, Any]) -> None:
    """Zeros get coins, which depend on coordinates: groups must not move them."""
    usual: dict[str, Any] = {"momentum": 0.0, "schedule": "constant", "ramp": 0.0, "decay": 0.5}
    case = config("weighted", 1, 8, **usual | HOW | more)
    run = Run(case, replace(task(), model=with_zeros))
    model = with_zeros()
    model.load_state_dict(run.model.state_dict())
    groups = parameter_groups(model, lr=case.step, weight_decay=case.decay, **HOW)
    assert len(groups) == 4
    optimizer = Vote(groups, momentum=case.momentum, interpolation=case.interpolation, run=case.seed)
    for t in range(1, 9):
        optimizer.zero_grad()
        batch = task().batch(task().train, run.workers.work.batch(0, t))
        task().loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.step()
        for name, mine in model.named_parameters():
            assert torch.equal(mine, run.model.get_parameter(name)), (t, name)


def test_a_state_with_groups_resumes_bit_for_bit() -> None:
    """The order of the model is part of the groups, and of their state."""

    def optimizer_of(model: nn.Module) -> Vote:
        return Vote(parameter_groups(model, weight_decay=1.0), momentum=0.99, interpolation=0.9)

    model = made()
    optimizer = optimizer_of(model)
    trained(model, optimizer, range(4))
    again = made()
    again.load_state_dict(model.state_dict())
    other = optimizer_of(again)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(trained(model, optimizer, range(4, 8)), trained(again, other, range(4, 8)))


def test_a_worker_refuses_factors_of_another_model() -> None:
    with pytest.raises(ConfigError, match="there is no parameter 'wight'; did you mean 'weight'"):
        Worker(nn.Linear(2, 2), 0, factors={"wight": Factors()})


def test_steps_need_an_lr() -> None:
    with pytest.raises(ConfigError, match="steps are factors of lr: give parameter_groups the lr"):
        parameter_groups(Tied(), weight_decay=1.0, steps={"*": 0.5})
    assert all("lr" not in group for group in parameter_groups(Tied(), weight_decay=1.0))
