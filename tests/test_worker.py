from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from signvote import BallotError, ConfigError, Layout, LayoutError, Server, StateError, Worker, checkpoint
from signvote.core.ballot import parse
from signvote.core.bits import Zeros, coin_for, pack_signs, unpack_signs
from signvote.core.encoding import encode
from signvote.core.header import Kind
from signvote.core.update import step_


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}


def give_gradients(named: dict[str, torch.Tensor], scale: float = 1.0) -> None:
    for p in named.values():
        p.grad = torch.randn_like(p) * scale


def sent_signs(worker: Worker, round: int) -> torch.Tensor:
    parsed = parse(worker.ballot(round), layout=worker.layout, run=0, round=round)
    return unpack_signs(parsed.planes(), worker.layout.size)


def test_a_ballot_holds_the_signs_of_the_gradients_and_changes_nothing() -> None:
    named = tensors((3, 5), (7,), ())
    give_gradients(named)
    before = {k: (p.clone(), p.grad.clone()) for k, p in named.items() if p.grad is not None}
    worker = Worker(named, 4)
    flat = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None])
    assert torch.equal(sent_signs(worker, 1), torch.sign(flat).to(torch.int8))
    for k, (value, gradient) in before.items():
        assert torch.equal(named[k], value)
        assert torch.equal(named[k].grad, gradient)  # type: ignore[arg-type]


def test_equation_5_on_any_stride_and_type() -> None:
    """x <- x - step * decision."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        named = tensors((3, 5), (70,), (2, 3, 4, 4), dtype=dtype)
        named["strided"] = torch.randn(9, 8).to(dtype).T
        named["p2"] = named["p2"].to(memory_format=torch.channels_last)
        give_gradients(named)
        worker = Worker(named, 0)
        server = Server(worker.layout, "majority")
        decision = server.decide(1, {0: worker.ballot(1)})
        expected = {k: p - 0.01 * torch.sign(p.grad) for k, p in named.items() if p.grad is not None}
        worker.apply(decision, step=0.01)
        for k, p in named.items():
            assert torch.equal(p, expected[k]), (k, dtype)


def test_everyone_ends_with_the_same_parameters() -> None:
    start = nn.Linear(20, 3)
    models = [nn.Linear(20, 3) for _ in range(4)]
    for model in models:
        model.load_state_dict(start.state_dict())
    workers = [Worker(model, m, momentum=0.5) for m, model in enumerate(models)]
    server = Server(workers[0].layout)
    for t in range(1, 20):
        for model in models:
            model.zero_grad()
            model(torch.randn(4, 20)).square().sum().backward()
        decision = server.decide(t, {w.worker_id: w.ballot(t) for w in workers})
        for worker in workers:
            worker.apply(decision, step=0.01)
    assert all(
        torch.equal(models[0].weight, m.weight) and torch.equal(models[0].bias, m.bias) for m in models
    )
    assert not torch.equal(models[0].weight, start.weight)


def test_momentum_is_an_exponential_average() -> None:
    named, beta = tensors((50,)), 0.9
    worker = Worker(named, 0, momentum=beta)
    average = torch.zeros(50)
    for t in range(1, 10):
        give_gradients(named)
        assert named["p0"].grad is not None
        average = beta * average + (1 - beta) * named["p0"].grad
        assert torch.equal(sent_signs(worker, t), torch.sign(average).to(torch.int8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_abstention(bad: float) -> None:
    named = tensors((50,))
    worker = Worker(named, 0, momentum=0.9)
    give_gradients(named)
    worker.ballot(1)
    past = worker.state_dict()["average"]
    assert named["p0"].grad is not None
    named["p0"].grad[17] = bad
    ballot = parse(worker.ballot(2), layout=worker.layout, run=0)
    assert (ballot.kind, ballot.count, ballot.reason) == (Kind.SPARSE, 0, 1)
    assert worker.abstained == "non-finite gradient"
    assert torch.equal(worker.state_dict()["average"], past), "momentum keeps its past"
    give_gradients(named)
    worker.ballot(3)
    assert worker.abstained == ""


def test_frozen_unused_and_tied_parameters() -> None:
    a, b, idle = (nn.Linear(4, 4) for _ in range(3))
    b.weight = a.weight
    b.bias.requires_grad_(False)
    frozen, unused = b.bias.clone(), idle.weight.clone()
    worker = Worker(nn.ModuleList([a, b, idle]), 0, zeros="abstain")
    b(a(torch.randn(2, 4))).sum().backward()
    worker.apply(Server(worker.layout, zeros="abstain").decide(1, {0: worker.ballot(1)}), step=0.1)
    assert torch.equal(b.bias, frozen)
    assert torch.equal(idle.weight, unused), "no gradient, no vote, no step"


def test_a_model_may_be_moved_to_another_type_on_the_way() -> None:
    model = nn.Linear(5, 2)
    worker = Worker(model, 0, zeros="abstain")
    for t, dtype in enumerate((torch.float32, torch.float64)):
        model.to(dtype).zero_grad()
        model(torch.randn(3, 5, dtype=dtype)).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert torch.equal(sent_signs(worker, t), torch.sign(gradients).to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["moved", "resumed"])
def test_memory_follows_the_type_of_the_model(way: str, dtype: torch.dtype) -> None:
    """A model in another type, or a state saved in another: the signs are those of memory brought to that type."""
    model = nn.Linear(6, 5)
    sending: dict[str, Any] = {"momentum": 0.5, "feedback": True}
    first = Worker(model, 0, **sending)
    model(torch.randn(3, 6)).square().sum().backward()
    first.ballot(1)
    memory = first.encoder.memory.map(lambda kept: kept.to(dtype))
    worker = first
    if way == "resumed":
        worker = Worker(model, 0, **sending)
        worker.load_state_dict(first.state_dict())
    model.to(dtype).zero_grad()
    model(torch.randn(3, 6, dtype=dtype)).square().sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    wanted = encode(gradient, memory, worker.encoder.encoding, coin_for("coin", 0, 2, 0))
    assert torch.equal(sent_signs(worker, 2), unpack_signs(wanted.planes, 35))
    for mine, its in zip(worker.encoder.memory[:2], wanted.memory[:2], strict=True):
        assert mine is not None
        assert its is not None
        assert mine.dtype == dtype
        assert torch.equal(mine, its)


@pytest.mark.parametrize("sending", [{}, {"momentum": 0.9}, {"feedback": True, "top": 0.2}], ids=str)
def test_a_retry_sends_the_same_bytes(sending: dict[str, Any]) -> None:
    """Asked again in the same round, and after a crash between ballot and decision, whatever the gradient is now."""
    named = tensors((100,))
    gradients = torch.randn(9, 100)
    steady, worker = (Worker(named, 3, zeros="abstain", **sending) for _ in range(2))
    for t in range(1, 5):
        named["p0"].grad = gradients[t]
        wanted = steady.ballot(t)
        assert worker.ballot(t) == wanted
        named["p0"].grad = gradients[t + 4]
        assert worker.ballot(t) == wanted
        crashed, worker = worker, Worker(named, 3, zeros="abstain", **sending)
        worker.load_state_dict(crashed.state_dict())
        assert worker.ballot(t) == wanted
    assert worker.ballot(5) == steady.ballot(5) != wanted


def test_a_retry_of_an_abstention_abstains() -> None:
    named = tensors((50,))
    named["p0"].grad = torch.full((50,), math.nan)
    worker, resumed = Worker(named, 0), Worker(named, 0)
    message = worker.ballot(1)
    resumed.load_state_dict(worker.state_dict())
    give_gradients(named)
    assert worker.ballot(1) == resumed.ballot(1) == message
    assert worker.abstained == resumed.abstained == "non-finite gradient"


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    named = tensors((50,))
    give_gradients(named)
    worker = Worker(named, 0, momentum=0.9)
    message = worker.ballot(1)
    state = worker.state_dict()
    damaged = state["ballot"].clone()
    damaged[-1] ^= 1
    for entry, text in [
        ({"ballot": damaged}, "its last ballot is damaged: checksum mismatch"),
        ({"ballot": torch.tensor(list(Worker(named, 1).ballot(1)), dtype=torch.uint8)}, "in the name of 1"),
        ({"average": torch.zeros(49)}, r"average is \(49,\) of torch.float32; wanted \(50,\) of floats"),
        ({"residual": torch.zeros(50, dtype=torch.int64)}, "residual is .* of torch.int64"),
    ]:
        with pytest.raises(StateError, match=text):
            worker.load_state_dict({**state, "applied_round": 9, **entry})
    assert (worker.applied_round, worker.ballot(1)) == (None, message)
    worker.load_state_dict(
        {name: entry for name, entry in state.items() if name != "ballot"}
    )  # of an earlier version
    assert torch.equal(worker.state_dict()["average"], state["average"])


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
def test_a_parameter_that_is_frozen_later_is_refused_and_does_not_move(zeros: Zeros) -> None:
    model = nn.Linear(4, 4)
    worker = Worker(model, 0, zeros=zeros, decay=0.1)
    server = Server(worker.layout, "majority", zeros=zeros)
    model(torch.randn(2, 4)).sum().backward()
    decision = server.decide(1, {0: worker.ballot(1)})
    model.bias.requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(
        LayoutError, match=r"frozen since this worker was made: bias; .* set requires_grad again"
    ):
        worker.apply(decision, step=0.1)
    with pytest.raises(LayoutError, match="frozen since this worker was made: bias"):
        worker.ballot(2)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    model.bias.requires_grad_(True)
    worker.apply(decision, step=0.1)
    worker.ballot(2)


def test_a_parameter_that_is_unfrozen_later_is_left_alone() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    worker, bias = Worker(model, 0), model.bias.clone()
    model.bias.requires_grad_(True)
    model(torch.randn(2, 4)).sum().backward()
    worker.apply(Server(worker.layout).decide(1, {0: worker.ballot(1)}), step=0.1)
    assert torch.equal(model.bias, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_that_is_lost_to_rounding_is_said_once(dtype: torch.dtype) -> None:
    """The warning comes if, and only if, the largest value stays."""
    for value in (0.1, 0.2, 0.3, 0.45, 0.5, 0.55, 0.9, 1.5, 2.5, 3.5, 4.5):
        named = {"w": torch.tensor([-value, 0.001], dtype=dtype)}
        named["w"].grad = torch.tensor([-1.0, 1.0], dtype=dtype)
        worker, before = Worker(named, 0), named["w"][0].item()
        server = Server(worker.layout, "majority")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for t in (1, 2):
                worker.apply(server.decide(t, {0: worker.ballot(t)}), step=1e-3)
        is_stuck = named["w"][0].item() == before
        assert len(caught) == is_stuck, value
        if is_stuck:
            assert "w is torch." in str(caught[0].message)
            assert "keep the parameters in float32" in str(caught[0].message)
    assert is_stuck


def test_mixed_types_are_signed_in_the_widest() -> None:
    named = {"half": torch.zeros(2, dtype=torch.float16), "double": torch.zeros(2, dtype=torch.float64)}
    named["half"].grad = torch.tensor([6e-8, -1.0]).half()
    named["double"].grad = torch.tensor([1e-300, -1e-300], dtype=torch.float64)
    assert sent_signs(Worker(named, 0, zeros="abstain"), 1).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("top", [0.001, 0.1, 1.0])
def test_top_votes_on_the_largest_share_only(top: float) -> None:
    named = tensors((500,))
    give_gradients(named)
    worker = Worker(named, 0, top=top, zeros="abstain")
    signs, gradient = sent_signs(worker, 1), named["p0"].grad
    assert gradient is not None
    k = max(1, round(top * 500))
    assert int((signs != 0).sum()) == k
    assert gradient.abs()[signs != 0].min() >= gradient.abs()[signs == 0].max() if k < 500 else True
    sent = worker.ballot(1)
    assert parse(sent, layout=worker.layout, run=0).kind is (Kind.SPARSE if k < 500 else Kind.DENSE)
    assert len(sent) <= 64 + 2 * 63, "never longer than a ballot of two planes"


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
def test_a_dead_layer_random_walks_or_stays(zeros: Zeros) -> None:
    """1,000 rounds of zero gradients from three workers: no drift beyond 4 sigma, or no move at all."""
    n, rounds = 640, 1_000
    named = [{"dead": torch.zeros(n, dtype=torch.float64)} for _ in range(3)]
    workers = [Worker(p, m, zeros=zeros) for m, p in enumerate(named)]
    for p in named:
        p["dead"].grad = torch.zeros(n, dtype=torch.float64)
    server = Server(workers[0].layout, "majority", zeros=zeros)
    for t in range(1, rounds + 1):
        decision = server.decide(t, {w.worker_id: w.ballot(t) for w in workers})
        workers[0].apply(decision, step=1.0)
    walked = named[0]["dead"]
    if zeros == "abstain":
        assert not walked.any()
    else:
        assert abs(walked.mean().item()) < 4 * math.sqrt(rounds / n)
        assert 0.75 < (walked.square().mean() / rounds).item() < 1.25, "a random walk spreads like sqrt(t)"


def test_decisions_are_applied_once_and_in_order() -> None:
    named = tensors((10,))
    give_gradients(named)
    worker = Worker(named, 0)
    server = Server(worker.layout)
    first, second, third = (server.decide(t, {0: worker.ballot(t)}) for t in (1, 2, 3))
    worker.apply(first, 0.1)
    before = named["p0"].clone()
    with pytest.raises(BallotError, match="decision of round 1 after round 1 was applied"):
        worker.apply(first, 0.1)
    with pytest.raises(BallotError, match=r"decision of round 3 .* set applied_round"):
        worker.apply(third, 0.1)
    with pytest.raises(BallotError, match="checksum"):
        worker.apply(second[:-1] + bytes([second[-1] ^ 1]), 0.1)
    with pytest.raises(BallotError, match="in the name of 0"):
        worker.apply(worker.ballot(2), 0.1)  # a worker's ballot is no decision
    with pytest.raises(BallotError, match="another model"):
        worker.apply(Server(Layout([("x", (10,))])).decide(2, {}), 0.1)
    assert torch.equal(named["p0"], before)
    worker.apply(second, 0.1)
    worker.applied_round = 7
    worker.apply(server.decide(8, {}), 0.1)


def test_a_resumed_worker_sends_what_the_uninterrupted_one_would(tmp_path) -> None:  # type: ignore[no-untyped-def]
    named = tensors((100,))
    gradients = torch.randn(10, 100)
    worker, resumed = Worker(named, 3, momentum=0.9), Worker(named, 3, momentum=0.9)
    for t in range(5):
        named["p0"].grad = gradients[t]
        worker.ballot(t)
    checkpoint.save(tmp_path / "worker", worker.state_dict())
    resumed.load_state_dict(checkpoint.load(tmp_path / "worker"))
    for t in range(5, 10):
        named["p0"].grad = gradients[t]
        assert worker.ballot(t) == resumed.ballot(t)
    fresh = Worker(named, 3)
    fresh.load_state_dict(Worker(named, 3).state_dict())
    with pytest.raises(StateError, match="state has worker 3; wanted 4"):
        Worker(named, 4).load_state_dict(worker.state_dict())
    with pytest.raises(StateError, match="state has layout"):
        Worker(tensors((99,)), 3).load_state_dict(worker.state_dict())


def test_a_batch_size_may_change_from_round_to_round() -> None:
    named = tensors((9,))
    give_gradients(named)
    worker = Worker(named, 0, batch_size=8)
    sizes = []
    for t, size in enumerate((8, 3, 0), start=1):
        worker.batch_size = size
        assert worker.batch_size == size
        sizes.append(parse(worker.ballot(t), layout=worker.layout, run=0).batch_size)
    assert sizes == [8, 3, 0]
    with pytest.raises(ConfigError, match=r"batch_size is -1; it must lie in 0..2\^32-1"):
        worker.batch_size = -1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worker_id": 2**64 - 1}, r"worker_id is 18446744073709551615; it must lie in 0..2\^64-2"),
        ({"momentum": 1.0}, r"momentum is 1.0; it must lie in \[0, 1\)"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"top": 0.0}, r"top is 0.0; it must lie in \(0, 1\]"),
        ({"zeros": "up"}, "zeros is 'up'"),
        ({"run": -1}, "run is -1"),
    ],
)
def test_settings(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Worker(tensors((3,)), **{"worker_id": 0, **options})  # type: ignore[arg-type]


def test_a_parameter_that_is_not_contiguous_steps_too() -> None:
    turned = torch.zeros(3, 2).t()
    wanted = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    planes, _ = pack_signs(wanted.flatten(), None)
    step_(turned, planes, 0, step=0.5)
    assert torch.equal(turned, -0.5 * wanted)
