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

import signvote
from signvote import ConfigError, EngineError, Server, StateError, Vote, Worker
from signvote.core.worker import apply_decision  # noqa: F401  (the step that Vote must equal)
from tests.ranks import INPUTS, deep

RULES = ("majority", "it-signsgd", "weighted", "robust")


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return deep().to(dtype)


def loss(model: nn.Module, t: int, samples: int = 8) -> Tensor:
    random = torch.Generator().manual_seed(t)
    inputs = torch.randn(samples, INPUTS, generator=random)
    labels = torch.randint(3, (samples,), generator=random)
    outputs = model(inputs.to(next(model.parameters()).dtype))
    return nn.functional.cross_entropy(outputs.float(), labels)


def backward(model: nn.Module, t: int) -> None:
    loss(model, t).backward()  # type: ignore[no-untyped-call]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def trained(
    model: nn.Module,
    optimizer: Vote,
    rounds: range,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> Tensor:
    for t in rounds:
        optimizer.zero_grad()
        backward(model, t)
        between(model)
        optimizer.step()
    return flat(model)


def clipped_to(norm: float) -> Callable[[nn.Module], object]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


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
@pytest.mark.parametrize("how", [{"rule": "it-signsgd"}, {"feedback": True}, {"momentum": 0.0}], ids=str)
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
    with pytest.raises(StateError, match="no entry 'votes': another optimizer wrote it"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(StateError, match=r"the state is of 2 parameters, and the optimizer has 26"):
        optimizer.load_state_dict(Vote(nn.Linear(2, 2).parameters()).state_dict())
    with pytest.raises(StateError, match="layout"):
        optimizer.load_state_dict(Vote([nn.Parameter(torch.zeros(3)) for _ in range(26)]).state_dict())
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


# ---- what scripts do -----------------------------------------------------------------------------


def test_evaluation_between_steps_declares_nothing() -> None:
    model = made()
    optimizer = Vote(model.parameters())
    for t in range(3):
        optimizer.zero_grad()
        backward(model, t)
        with torch.no_grad():
            loss(model, t, samples=500)
        model.eval()
        loss(model, t, samples=300)
        model.train()
        optimizer.step()
        assert optimizer.batch_sizes == (8,)


def test_accumulation_adds_up_and_sizes_can_be_given() -> None:
    model = made()
    optimizer = Vote(model.parameters())
    backward(model, 0)
    backward(model, 1)
    optimizer.step()
    assert optimizer.batch_sizes == (16,)
    optimizer.step(batch_size=5)
    assert optimizer.batch_sizes == (5,)
    optimizer.batch_size = 7
    optimizer.step()
    assert optimizer.batch_sizes == (7,)
    with pytest.raises(ConfigError, match="batch_size is -1"):
        optimizer.step(batch_size=-1)
    with pytest.raises(ConfigError, match="batch_size is -1"):
        Vote(model.parameters(), batch_size=-1)


def test_a_model_called_by_keywords_declares_its_first_batch() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made()

        def forward(self, *, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.inner(batch["inputs"])
            return out

    model = Wrapped()
    optimizer = Vote(model.parameters())
    model(batch={"inputs": torch.randn(6, INPUTS)}).sum().backward()
    optimizer.step()
    assert optimizer.batch_sizes == (6,)


def test_no_gradient_is_an_abstention() -> None:
    model = made()
    optimizer = Vote(model.parameters(), weight_decay=0.5)
    before = flat(model)
    optimizer.step()
    assert optimizer.report.abstained == {0: "no gradient"}
    assert not optimizer.report.is_decided
    assert torch.equal(flat(model), before)


def test_a_layer_that_is_frozen_and_unfrozen_stays_where_it_is_meanwhile() -> None:
    model = made()
    optimizer = Vote(model.parameters(), weight_decay=0.5)
    layer = model[4]  # type: ignore[index]
    trained(model, optimizer, range(2))
    for set_to_none in (True, False):
        layer.requires_grad_(False)
        optimizer.zero_grad(set_to_none)
        frozen = flat(layer)
        for t in range(3):
            backward(model, t)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        assert torch.equal(flat(layer), frozen)
        layer.requires_grad_(True)
        trained(model, optimizer, range(2))
        assert not torch.equal(flat(layer), frozen)


def test_what_is_frozen_at_the_first_step_costs_nothing_and_must_stay_so() -> None:
    model = made()
    layer = model[4]  # type: ignore[index]
    layer.requires_grad_(False)
    optimizer = Vote(model.named_parameters())
    trained(model, optimizer, range(2))
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    assert optimizer.layout.size == sum(sizes)
    layer.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"4.weight was frozen at the first step and has a gradient now"):
        trained(model, optimizer, range(1))


def test_parameters_are_added_before_the_first_step_or_not_at_all() -> None:
    model = made()
    first, *others = model.parameters()
    optimizer = Vote([first])
    optimizer.add_param_group({"params": others, "lr": 0.0})
    trained(model, optimizer, range(1))
    with pytest.raises(ConfigError, match="cannot be added after the first vote"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_beside_another_optimizer_on_one_model() -> None:
    """The last layer by AdamW in full precision, the rest by votes."""
    model, alone = made(), made()
    names = [name for name, _ in model.named_parameters()]
    last = {name for name in names if name.startswith("24")}
    votes = Vote([p for name, p in model.named_parameters() if name not in last])
    adam = torch.optim.AdamW([p for name, p in model.named_parameters() if name in last])
    for t in range(3):
        model.zero_grad()
        backward(model, t)
        votes.step()
        adam.step()
    assert votes.batch_sizes == (8,)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    assert all(moved)


def test_below_the_quorum_nothing_moves() -> None:
    model = made()
    optimizer = Vote(model.parameters(), weight_decay=0.5, min_voters=2)
    before = flat(model)
    assert torch.equal(trained(model, optimizer, range(2)), before)
    assert not optimizer.report.is_decided


@pytest.mark.parametrize("wrapped", [True, False])
def test_torch_compile(wrapped: bool) -> None:
    """Around the model before the optimizer is made; samples are counted."""
    model = made()
    net: Any = torch.compile(model, backend="eager")
    optimizer = Vote((net if wrapped else model).parameters())
    for t in range(3):
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        assert optimizer.batch_sizes == (8,)
    plain = made()
    assert torch.equal(flat(model), trained(plain, Vote(plain.parameters()), range(3)))


def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = made()
        optimizer = Vote(model.parameters(), rule="robust")
        assert torch.isfinite(trained(model, optimizer, range(3))).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_named_parameters_and_what_is_shown() -> None:
    model = made()
    optimizer = Vote(model.named_parameters())
    assert "votes:" not in repr(optimizer)
    trained(model, optimizer, range(1))
    assert "votes: 4099 coordinates, 1 workers, rule weighted" in repr(optimizer)
    assert optimizer.layout.segments[0].name == "0.weight"
    assert [name for name, _ in optimizer.named_state()] == [name for name, _ in model.named_parameters()]


def test_hooks_that_look_for_wrappers_are_gone_after_the_first_gradient() -> None:
    model = made()
    optimizer = Vote(model.parameters())
    assert all(p._backward_hooks for p in model.parameters())
    trained(model, optimizer, range(1))
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_wrapper_made_after_the_optimizer_declares_its_samples() -> None:
    """A wrapper whose inner model sees twice as many rows as the script calls it with."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.inner(torch.cat([inputs, inputs]))
            return out

    model = made()
    optimizer = Vote(model.parameters())
    wrapper = Doubled(model)
    for declared in (16, 8):  # the wrapper is found at the first gradient, after the first batch
        wrapper(torch.randn(8, INPUTS)).sum().backward()
        optimizer.step()
        assert optimizer.batch_sizes == (declared,)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be 0 or more"),
        ({"momentum": 1.0}, r"momentum is 1.0; it must lie in \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be 0 or more"),
        ({"rule": "best"}, "rule"),
        ({"check_every": -1}, "check_every is -1"),
        ({"chunk": 3}, "chunk is 3"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = Vote(made().parameters(), **settings).poll


def test_a_learning_rate_for_gradients_is_a_warning_once() -> None:
    model = made()
    optimizer = Vote(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="an lr of 0.1 moves every weight by 0.1 in each step") as caught:
        trained(model, optimizer, range(3))
    assert len(caught) == 1


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Vote(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ConfigError, match="the gradient of 0 is sparse; make its embedding with sparse=False"
    ):
        optimizer.step()


# ---- overlap -------------------------------------------------------------------------------------


def test_overlap_gives_the_same_bits() -> None:
    model = made()
    optimizer = Vote(model.parameters(), lr=3e-3, weight_decay=0.5, overlap=True, chunk=640)
    assert torch.equal(trained(model, optimizer, range(8)), by_one("weighted", 8, 3e-3, 0.5))


def test_overlap_and_accumulation() -> None:
    answers = []
    for overlap in (True, False):
        model = made()
        optimizer = Vote(model.parameters(), overlap=overlap)
        for t in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(model, t)
            backward(model, t + 10)
            optimizer.step()
        answers.append(flat(model))
    assert torch.equal(*answers)


def test_what_overlap_cannot_do_is_an_error() -> None:
    model = made()
    optimizer = Vote(model.parameters(), overlap=True)
    trained(model, optimizer, range(2))
    with pytest.raises(
        EngineError, match="gradients were changed after they were sent, as by clip_grad_norm_"
    ):
        trained(model, optimizer, range(1), clipped_to(1e-3))
    model.zero_grad()
    backward(model, 0)
    backward(model, 1)
    with pytest.raises(EngineError, match=r"with optimizer.no_sync\(\)"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model.zero_grad()
    scaler.scale(loss(model, 0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(EngineError, match="before GradScaler's scale is known"):
        scaler.step(optimizer)


def test_it_is_where_a_user_looks() -> None:
    assert signvote.Vote is Vote
    assert "Vote" in dir(signvote)
