"""What a script may do between the vote and the step, and what it is told."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from signvote import EngineError
from signvote.engines.ddp import VoteState, vote_gradients, vote_hook
from tests.ranks import INPUTS, deep

Change = Callable[[nn.Module], object]
ways = pytest.mark.parametrize("over_ddp", [True, False])


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(
    over_ddp: bool,
    rounds: int = 2,
    *,
    between: Change = lambda model: None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=1e-3),
    **how: Any,
) -> list[str]:
    """Train, and change something between vote and step; the texts of the warnings."""
    torch.manual_seed(1)
    model = deep()
    net = DistributedDataParallel(model) if over_ddp else model
    state = VoteState(net, "majority", **how)
    if isinstance(net, DistributedDataParallel):
        net.register_comm_hook(state, vote_hook)
    steps = optimizer(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(rounds):
            steps.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.randn(8, INPUTS)), torch.randint(3, (8,)))
            loss.backward()  # type: ignore[no-untyped-call]
            if not over_ddp:
                vote_gradients(state)
            between(model)
            steps.step()
    return [
        str(warning.message)
        for warning in caught
        if "lr" in str(warning.message) or "momentum" in str(warning.message)
    ]


def clip(most: float) -> Change:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), most)


@ways
@pytest.mark.parametrize("most", [1.0, 0.01])
def test_clipping_after_the_vote_is_refused(over_ddp: bool, most: float) -> None:
    with pytest.raises(EngineError, match=r"changed between the vote and the step.*Remove clip_grad_norm_"):
        trained(over_ddp, between=clip(most))


@ways
def test_clipping_that_changes_nothing_is_harmless(over_ddp: bool) -> None:
    assert trained(over_ddp, between=clip(1e6)) == []


def test_a_parameter_of_no_elements_hides_nothing() -> None:
    model = deep()
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    state = VoteState(model, "majority")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy(model(torch.randn(8, INPUTS)), torch.randint(3, (8,)))
    loss.backward()  # type: ignore[no-untyped-call]
    vote_gradients(state)
    clip(1.0)(model)
    with pytest.raises(EngineError, match="changed between"):
        optimizer.step()


def test_noise_on_a_decision_is_refused() -> None:
    def noise(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(0.1 * torch.randn_like(p))

    with pytest.raises(EngineError, match=r"their size is 0\.\d+ to 1\.\d+, the vote left 1"):
        trained(False, between=noise)


def test_a_change_that_begins_later_is_found_by_the_next_look() -> None:
    rounds = iter(range(1, 100))

    def later(model: nn.Module) -> None:
        if next(rounds) > 5:
            clip(1.0)(model)

    assert trained(False, 9, between=later, check_every=10) == []
    rounds = iter(range(1, 100))
    with pytest.raises(EngineError, match="changed between"):
        trained(False, 10, between=later, check_every=10)
    rounds = iter(range(1, 100))
    assert trained(False, 20, between=later, check_every=0) == []


@ways
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-3), "AdamW rescales a decision"),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), "the optimizer's momentum averages decisions"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "an lr of 0.1 moves every weight by 0.1"),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5)), "an lr of 0.5 moves"),
    ],
)
def test_an_optimizer_for_gradients_is_noticed_once(
    over_ddp: bool, optimizer: Callable[[Any], torch.optim.Optimizer], said: str
) -> None:
    (text,) = trained(over_ddp, 4, optimizer=optimizer)
    assert text.startswith(said)


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1000.0, 65536.0])
def test_amp_may_scale_a_decision_and_clipping_is_found_behind_it(scale: float, unscales: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = deep()
    state = VoteState(model, "majority", scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(clipped: bool) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, INPUTS)), torch.randint(3, (8,)))
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        vote_gradients(state)
        if unscales:
            scaler.unscale_(optimizer)
        if clipped:
            clip(1.0)(model)
        scaler.step(optimizer)
        scaler.update()

    step(clipped=False)
    with pytest.raises(EngineError, match="changed between"):
        step(clipped=True)


def test_an_ordinary_script_is_told_nothing() -> None:
    def groups(parameters: Iterator[Tensor]) -> torch.optim.Optimizer:
        first, *rest = parameters
        split = [{"params": [first], "lr": 1e-2}, {"params": rest, "weight_decay": 0.1}]
        return torch.optim.SGD(split, lr=3e-3)

    assert trained(True, 5, optimizer=groups) == []


def test_other_optimizers_and_those_of_states_that_are_gone_are_left_alone() -> None:
    trained(False)
    gc.collect()
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    state = VoteState(deep(), "majority")
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(other.parameters(), lr=0.5).step()
    del state
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
