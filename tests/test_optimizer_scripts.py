"""The optimizer in one process: what scripts do to it, what it refuses, and gradients that leave early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import signvote
from signvote import ConfigError, EngineError, LocalVote, Vote
from tests.optimized import backward, clipped_to, flat, loss, made, trained
from tests.ranks import INPUTS

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


@pytest.mark.parametrize("local", [True, False])
def test_a_compiled_step(local: bool) -> None:
    """torch.compile(optimizer.step): the vote runs as it is, and the parameters are those without a compiler."""
    torch.compiler.reset()
    results = []
    for compiled in (True, False):
        model = made()
        optimizer: Any = Vote(model.parameters())
        if local:
            optimizer = LocalVote(SGD(model.parameters(), lr=0.1), every=2)
        step: Any = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for t in range(4):
            optimizer.zero_grad()
            backward(model, t)
            step()
        results.append(flat(model))
    assert torch.equal(*results)
    assert not torch.equal(results[0], flat(made()))


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


def test_a_wrapper_found_between_two_accumulated_batches_declares_both() -> None:
    model = made()
    optimizer = Vote(model.parameters())
    wrapper = nn.Sequential(model)
    for _ in range(2):
        for _ in range(3):
            wrapper(torch.randn(8, INPUTS)).sum().backward()
        optimizer.step()
        assert optimizer.batch_sizes == (24,)


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


def test_one_of_several_processes_that_nothing_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = made()
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2, but torch.distributed is not initialized"):
        trained(model, Vote(model.parameters()), range(1))


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Vote(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ConfigError, match="the gradient of 0 is sparse; make its embedding with sparse=False"
    ):
        optimizer.step()


def test_parameters_on_two_devices() -> None:
    parameters = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(ConfigError, match="the parameters lie on 2 devices; one per rank is supported"):
        _ = Vote(parameters).poll


# ---- overlap -------------------------------------------------------------------------------------


def test_overlap_gives_the_same_bits() -> None:
    model, plain = made(), made()
    optimizer = Vote(model.parameters(), lr=3e-3, weight_decay=0.5, overlap=True, chunk=640)
    assert torch.equal(
        trained(model, optimizer, range(8)),
        trained(plain, Vote(plain.parameters(), lr=3e-3, weight_decay=0.5), range(8)),
    )


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
