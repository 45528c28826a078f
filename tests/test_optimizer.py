"""The optimizer in one process: what any optimizer of PyTorch does, and what scripts do to it."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote import Server, StateError, Vote, Worker
from signvote.core.layout import Layout
from signvote.engines.ddp.placement import Placement
from signvote.engines.ddp.stepping import Setting, Stepping
from signvote.kernels import Planes, words_for
from tests.optimized import backward, clipped_to, flat, loss, made, trained

RULES = ("majority", "it-signsgd", "weighted", "robust")


def by_one(rule: str, rounds: int, step: float, decay: float, clipped: bool = False) -> Tensor:
    """The same by `Worker` and `Server`."""
    model = made()
    worker = Worker(model, 0, momentum=0.9, batch_size=8, decay=decay)
    server = Server(worker.layout, rule)
    for t in range(rounds):
        model.zero_grad()
        backward(model, t)
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        worker.apply(server.decide(t + 1, {0: worker.ballot(t + 1)}), step)
    return flat(model)


# ---- the same answer -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_without_torch_distributed_as_by_worker_and_server(rule: str) -> None:
    model = made()
    optimizer = Vote(model.parameters(), lr=3e-3, weight_decay=0.5, rule=rule)
    assert torch.equal(trained(model, optimizer, range(8)), by_one(rule, 8, 3e-3, 0.5))
    assert optimizer.round == 8
    assert optimizer.batch_sizes == (8,)


def test_clipping_is_what_the_momentum_averages() -> None:
    model = made()
    optimizer = Vote(model.parameters(), lr=3e-3)
    found = trained(model, optimizer, range(8), clipped_to(0.1))
    assert torch.equal(found, by_one("weighted", 8, 3e-3, 0.0, clipped=True))


def test_in_few_launches_as_one_by_one() -> None:
    """The way of a GPU, on a CPU."""
    shapes = [(70, 3), (5,), (1,), (64,)]
    layout = Layout([(str(shape), shape) for shape in shapes])
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    ones = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    others = [one.clone() for one in ones]
    words = torch.randint(-(2**62), 2**62, (2, words_for(layout.size)))
    decision = Planes(words[0] & words[1], words[1])
    settings = [Setting(1e-3, 0.1), Setting(1e-2, 0.0), Setting(1e-3, 0.1), Setting(1e-3, 0.1)]
    by_one, at_once = (Stepping(each, Placement.of(layout).parts) for each in (ones, others))
    by_one.step(decision, [True] * 4, settings)
    at_once._step_at_once(decision, [True] * 4, settings)
    others[2].copy_(at_once.masters[2])
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def test_without_momentum_clipping_changes_nothing() -> None:
    """A sign has no scale."""
    answers = []
    for norm in (1e-3, math.inf):
        model = made()
        optimizer = Vote(model.parameters(), momentum=0.0)
        answers.append(trained(model, optimizer, range(5), clipped_to(norm)))
    assert torch.equal(*answers)


def test_groups_have_their_own_lr_momentum_and_decay() -> None:
    """Each group as an optimizer of its own, alone: the votes of one do not touch the other."""
    first: dict[str, Any] = {"lr": 1e-3, "momentum": 0.5, "weight_decay": 0.7}
    second: dict[str, Any] = {"lr": 2e-3, "momentum": 0.0, "weight_decay": 0.0}
    together, apart = made(), made()
    half = len(list(together.parameters())) // 2
    params = list(together.parameters())
    one = Vote([{"params": params[:half], **first}, {"params": params[half:], **second}], rule="majority")
    params = list(apart.parameters())
    two = [Vote(params[:half], **first, rule="majority"), Vote(params[half:], **second, rule="majority")]
    for t in range(5):
        for model, optimizers in ((together, [one]), (apart, two)):
            model.zero_grad()
            backward(model, t)
            for optimizer in optimizers:
                optimizer.step()
    assert torch.equal(flat(together), flat(apart))


def test_schedulers_and_an_lr_that_is_a_tensor() -> None:
    answers = []
    for lr in (4e-3, torch.tensor(4e-3, dtype=torch.float64)):
        model = made()
        optimizer = Vote(model.parameters(), lr=lr)  # type: ignore[arg-type]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for t in range(4):
            before = flat(model)
            trained(model, optimizer, range(t, t + 1))
            moved = (flat(model) - before).abs().max()
            assert math.isclose(moved, 4e-3 * 0.5 ** (t // 2), rel_tol=1e-3)
            schedule.step()
        answers.append(flat(model))
    assert torch.equal(*answers)


def test_onecycle_turns_the_momentum() -> None:
    model = made()
    optimizer = Vote(model.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=6, cycle_momentum=True)
    trained(model, optimizer, range(1))
    first = optimizer.poll.sender.momentum
    schedule.step()
    trained(model, optimizer, range(1, 2))
    assert optimizer.poll.sender.momentum != first


def test_a_closure() -> None:
    model, other = made(), made()
    plain, closed = Vote(model.parameters()), Vote(other.parameters())
    wanted = trained(model, plain, range(3))
    for t in range(3):

        def again() -> float:
            closed.zero_grad()
            value = loss(other, t)  # noqa: B023
            value.backward()  # type: ignore[no-untyped-call]
            return float(value.detach())

        found = closed.step(again)
        assert t or found == float(loss(made(), 0).detach())
    assert torch.equal(flat(other), wanted)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [{"rule": "it-signsgd"}, {"feedback": True, "interpolation": 0.5}, {"momentum": 0.0}], ids=str
)
def test_a_state_resumes_bit_for_bit(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Through a file, into a fresh optimizer before its first step and into one that has trained."""
    model = made(dtype)
    optimizer = Vote(model.parameters(), **how)
    trained(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = trained(model, optimizer, range(5, 10))
    for rounds, model_first in itertools.product((0, 3), (True, False)):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = made(dtype)
        resumed = Vote(other.parameters(), **how)
        trained(other, resumed, range(20, 20 + rounds))
        loads: list[Callable[[], object]] = [
            lambda: other.load_state_dict(saved["model"]),  # noqa: B023
            lambda: resumed.load_state_dict(saved["optimizer"]),  # noqa: B023
        ]
        for load in loads if model_first else reversed(loads):
            load()
        assert resumed.round == 5
        assert torch.equal(trained(other, resumed, range(5, 10)), wanted), (rounds, model_first)


@pytest.mark.parametrize("rounds", [0, 3])
def test_schedules_turn_lr_and_momentum_after_a_state_was_loaded(rounds: int) -> None:
    """Loading replaces the groups, as Accelerate does before the first step."""
    model = made()
    optimizer = Vote(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trained(model, optimizer, range(rounds))
    optimizer.load_state_dict(optimizer.state_dict())
    for t in range(3):
        optimizer.param_groups[0]["momentum"] = 0.1 * t
        before = flat(model)
        trained(model, optimizer, range(rounds + t, rounds + t + 1))
        moved = (flat(model) - before).abs().max()
        assert math.isclose(moved, 4e-3 * 0.5**t, rel_tol=1e-3)
        assert optimizer.poll.sender.momentum == 0.1 * t
        schedule.step()


def test_the_state_is_that_of_any_optimizer_and_a_copy() -> None:
    model = made()
    optimizer = Vote(model.parameters(), momentum=0.5)
    backward(model, 0)
    gradients = [0.5 * p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    state = optimizer.state_dict()
    for place, gradient in enumerate(gradients):
        assert torch.equal(state["state"][place]["momentum_buffer"], gradient)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], gradient)
    before = copy.deepcopy(state)
    trained(model, optimizer, range(1, 4))
    assert torch.equal(before["state"][0]["momentum_buffer"], state["state"][0]["momentum_buffer"])


def test_a_state_from_before_the_first_step_begins_anew() -> None:
    """Nothing is settled by it: Accelerate saves and loads such a state when it wraps an optimizer."""
    model = made()
    optimizer = Vote(model.parameters())
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.load_state_dict(start[1])
    assert start[1]["votes"] is None
    optimizer.param_groups[0]["lr"] = 5e-3
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(StateError, match="the state is of 26 parameters, and the optimizer has 27"):
        optimizer.load_state_dict(start[1])

    again = Vote(model.parameters())
    wanted = trained(model, again, range(3))
    model.load_state_dict(start[0])
    again.load_state_dict(start[1])
    assert not again.state
    assert torch.equal(trained(model, again, range(3)), wanted)
    assert again.round == 3


def test_a_wrapper_that_delegates_attributes_shares_the_votes() -> None:
    """Like that of Lightning: of the optimizer's class, without its attributes."""

    class Wrapper(Vote):
        def __init__(self, inner: Vote) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    model = made()
    optimizer = Vote(model.parameters())
    wrapper = Wrapper(optimizer)
    assert wrapper.round == 0
    trained(model, optimizer, range(2))
    assert wrapper.round == 2
    assert wrapper.batch_sizes == (8,)


def test_the_state_of_another_worker_brings_trust_but_no_momentum() -> None:
    model, other = made(), made()
    saved = Vote(model.parameters(), worker_id=3)
    trained(model, saved, range(4))
    optimizer = Vote(other.parameters(), worker_id=7)
    with pytest.warns(UserWarning, match="of worker 3, so worker 7 starts without momentum"):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.round == 4
    assert not any(state["momentum_buffer"].any() for state in optimizer.state_dict()["state"].values())


def test_states_that_do_not_fit_change_nothing() -> None:
    model = made()
    optimizer = Vote(model.parameters())
    trained(model, optimizer, range(3))
    before = optimizer.state_dict()
    others = Vote([nn.Parameter(torch.zeros(3)) for _ in range(26)])
    others.step()
    with pytest.raises(StateError, match="no entry 'votes': another optimizer wrote it"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(StateError, match=r"the state is of 2 parameters, and the optimizer has 26"):
        optimizer.load_state_dict(Vote(nn.Linear(2, 2).parameters()).state_dict())
    with pytest.raises(StateError, match="layout"):
        optimizer.load_state_dict(others.state_dict())
    after = optimizer.state_dict()
    assert after["votes"]["server"]["last_round"] == before["votes"]["server"]["last_round"] == 3
    for place, state in before["state"].items():
        assert torch.equal(state["momentum_buffer"], after["state"][place]["momentum_buffer"])


# ---- precision -----------------------------------------------------------------------------------


def test_steps_too_small_for_bfloat16_add_up_in_its_master() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Vote([p], lr=1e-3)
    for _ in range(16):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), 1 - 16e-3, dtype=torch.bfloat16))
    assert optimizer.state[p]["master"].dtype == torch.float32


def test_a_master_follows_a_parameter_that_somebody_else_changes() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Vote([p], lr=0.25 / 16)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(8.0)
    for _ in range(16):
        optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), 7.75, dtype=torch.bfloat16))


@pytest.mark.parametrize("unscaled", [True, False])
def test_gradscaler_takes_part_in_every_step_and_an_overflow_is_an_abstention(unscaled: bool) -> None:
    model, plain = made(), made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, wanted = Vote(model.parameters(), min_voters=1), Vote(plain.parameters())
    scales = []
    for t in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(model, t) * (math.inf if t == 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if t == 1:
            assert optimizer.report.abstained == {0: "non-finite gradient"}
            assert torch.equal(flat(model), flat(plain))
        else:
            trained(plain, wanted, range(t, t + 1))
    assert optimizer.round == 4
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    moved = (flat(model) != flat(plain)).float().mean()
    assert moved < 0.5  # the coins of zeros are those of another round; all else is equal
