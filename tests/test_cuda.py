"""The Triton kernels equal the plain ones, on a GPU or, with TRITON_INTERPRET=1, in Triton's interpreter."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signvote import Server, Worker
from signvote.kernels import Coin, Coins, CoordinateWeights, Planes, reference, words_for
from tests import reference as obvious
from tests.strategies import FLOATS, ballots, coins, tables_for, weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from signvote.kernels import cuda  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings(  # of the interpreter: loops from a number in an array
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
few = settings(max_examples=8 if INTERPRETED else 100)

numbers = st.sampled_from([0.0, -0.0, 1.5, -2.0, 6e-8, -6e-8, 3e4])


def there(planes: Planes) -> Planes:
    return planes.map(lambda p: p.to(DEVICE))


def same(a: tuple[Tensor | bool | None, ...], b: tuple[Tensor | bool | None, ...]) -> bool:
    return all(
        (p is None and q is None) or torch.equal(torch.as_tensor(p), torch.as_tensor(q))
        for p, q in zip(a, b, strict=True)
    )


def filled(n: int, coin: Coin | None) -> tuple[Planes, Planes]:
    """Two alike decisions, full of bits that a vote must leave or replace."""
    plane = torch.randint(-(2**63), 2**63 - 1, (words_for(n),), device=DEVICE)
    first, second = (Planes(plane.clone(), None if coin else plane.clone()) for _ in range(2))
    return first, second


@few
@given(st.lists(numbers, min_size=1, max_size=200), coins, st.sampled_from(FLOATS))
def test_signs(values: list[float], coin: Coin | None, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype, device=DEVICE)
    planes, finite = cuda.sign_planes(x, coin)
    assert same(planes, reference.sign_planes(x, coin)[0])
    assert finite.shape == ()
    assert finite.item()


@few
@given(st.integers(1, 5), st.integers(1, 200), coins, st.sampled_from(FLOATS))
def test_signs_of_rows_that_lie_apart(m: int, n: int, coin: Coin | None, dtype: torch.dtype) -> None:
    x = torch.randn(m, n + 3, device=DEVICE).to(dtype)[:, :n]
    x[x.abs() < 0.5] = 0
    toss = coin and Coins(torch.randint(-(2**63), 2**63 - 1, (m,), device=DEVICE), coin.first)
    planes, finite = cuda.sign_planes(x, toss)
    assert same(planes, reference.sign_planes(x.contiguous(), toss)[0])
    assert finite.tolist() == [True] * m


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_row_that_is_not_finite_is_named(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 199, device=DEVICE).to(dtype)
    x[1, 150] = bad
    assert cuda.sign_planes(x, None)[1].tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_have_signs(dtype: torch.dtype) -> None:
    smallest = torch.tensor([1, -1], dtype=reference.INTEGERS[dtype.itemsize], device=DEVICE)
    smallest[1] = torch.iinfo(smallest.dtype).min + 1  # sign bit and the lowest bit
    planes, finite = cuda.sign_planes(smallest.view(dtype), None)
    assert finite.item()
    assert obvious.signs_in(planes.map(Tensor.cpu), 2) == [1, -1]


@few
@given(st.data(), coins, st.booleans(), st.booleans())
def test_vote_on_a_span(data: st.DataObject, coin: Coin | None, ternary: bool, on_device: bool) -> None:
    y = data.draw(ballots(ternary=ternary))
    n, m = len(y[0]), len(y)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    w = torch.tensor(data.draw(st.lists(weights, min_size=m, max_size=m)), dtype=torch.int32)
    out, want = filled(n, coin)
    votes = there(obvious.planes_of(y))
    counts = cuda.vote_(out, votes, w.to(DEVICE) if on_device else w, coin, (begin, end))
    assert same(counts, reference.vote_(want, votes, w, coin, (begin, end)))
    assert same(out, want)


@pytest.mark.parametrize("w", [[0] * 15, list(range(-7, 8)), [16_383] * 14 + [-16_383], [-128] * 15])
@pytest.mark.parametrize("ternary", [False, True])
def test_vote_with_weights_at_the_bounds(w: list[int], ternary: bool) -> None:
    """All or none of the bits of a weight, and tallies as large as they get."""
    y = torch.randint(-1, 2, (15, 100)) if ternary else 2 * torch.randint(0, 2, (15, 100)) - 1
    y[:, 0], y[:, 1] = 1, torch.tensor(w).sign()
    votes = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None))
    out, want = filled(100, None)
    given_weights = torch.tensor(w, dtype=torch.int32)
    counts = cuda.vote_(out, votes, given_weights, None, (0, 100))
    assert same(counts, reference.vote_(want, votes, given_weights, None, (0, 100)))
    assert same(out, want)


@pytest.mark.parametrize("n", [32 * 64 + 5, 32 * 256, 32 * 300 + 64])
@pytest.mark.parametrize("coin", [None, Coin(7, 13)])
@pytest.mark.parametrize("given_weights", [[3, -5, 2], [2, 2, 2]])
def test_vote_beyond_a_tile(
    monkeypatch: pytest.MonkeyPatch, n: int, coin: Coin | None, given_weights: list[int]
) -> None:
    """Several tiles, a last one that is moved back, edges inside tiles, planes whose words lie oddly."""
    monkeypatch.setitem(cuda.MAJORITY, "TILE", 64)
    monkeypatch.setitem(cuda.MAJORITY, "num_warps", 1)
    monkeypatch.setitem(cuda.VOTE, "num_warps", 2)
    votes = Planes(torch.randint(-(2**63), 2**63 - 1, (3, words_for(n) + 1), device=DEVICE)[:, 1:], None)
    w = torch.tensor(given_weights, dtype=torch.int32)
    for span in ((0, n), (700, n - 33)):
        out, want = filled(n, coin)
        assert same(cuda.vote_(out, votes, w, coin, span), reference.vote_(want, votes, w, coin, span))
        assert same(out, want)


@pytest.mark.parametrize("m", [*range(1, 9), 16, 31, 32])
@pytest.mark.parametrize("coin", [None, Coin(7, 13)])
@pytest.mark.parametrize("ternary", [False, True])
def test_majority(m: int, coin: Coin | None, ternary: bool) -> None:
    y = torch.randint(-1, 2, (m, 200)) if ternary else 2 * torch.randint(0, 2, (m, 200)) - 1
    votes = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None))
    out, want = filled(200, coin)
    w = torch.full((m,), 1024, dtype=torch.int32)
    assert same(cuda.vote_(out, votes, w, coin, (3, 199)), reference.vote_(want, votes, w, coin, (3, 199)))
    assert same(out, want)


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("scaled", [0, 512])
def test_more_workers_than_are_counted_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, ternary: bool, scaled: int
) -> None:
    """In groups, the last one not full; and tallies of so many that they leave no bits to spare."""
    monkeypatch.setattr(cuda, "SCALED", scaled)
    m, n = 19, 150
    y = torch.randint(-1, 2, (m, n)) if ternary else 2 * torch.randint(0, 2, (m, n)) - 1
    votes = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None))
    w = torch.randint(-10_240, 10_241, (m,), dtype=torch.int32)
    out, want = filled(n, None)
    assert same(cuda.vote_(out, votes, w, None, (3, n)), reference.vote_(want, votes, w, None, (3, n)))
    assert same(out, want)


@few
@given(st.data(), coins, st.booleans(), st.booleans())
def test_vote_by_coordinate(data: st.DataObject, coin: Coin | None, ternary: bool, symbol: bool) -> None:
    y = data.draw(ballots(ternary=ternary))
    n, m = len(y[0]), len(y)
    rounds = data.draw(st.lists(st.sampled_from([1, 7, 300]), min_size=m, max_size=m))
    slots = torch.tensor(data.draw(st.permutations(range(m + 1)))[:m])
    absent = torch.tensor(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)))
    most = torch.tensor([0] * (m + 1))
    most[slots] = 2 * torch.tensor(rounds)
    counters = (torch.rand(words_for(n), m + 1, 64) * (most[:, None] + 1)).int().to(torch.uint16).to(DEVICE)
    made = [
        CoordinateWeights(c, torch.where(absent, -1, slots), *tables_for(rounds), symbol)
        for c in (counters, counters.clone())
    ]
    out, want = filled(n, coin)
    votes = there(obvious.planes_of(y))
    counts = cuda.vote_by_coordinate_(out, votes, made[0], coin, n)
    assert same(counts, reference.vote_by_coordinate_(want, votes, made[1], coin, n))
    assert same(out, want)
    assert torch.equal(made[0].counters.int(), made[1].counters.int())


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("symbol", [False, True])
@pytest.mark.parametrize("coin", [None, Coin(7, 13)])
def test_vote_by_coordinate_in_groups(
    monkeypatch: pytest.MonkeyPatch, ternary: bool, symbol: bool, coin: Coin | None
) -> None:
    """More workers than have their counters in registers, the last group not full, one of them absent."""
    monkeypatch.setattr(cuda, "TRUSTED", 4)
    m, n, rounds = 7, 1100, [300, 7, 300, 1, 300, 7, 7]
    y = torch.randint(-1, 2, (m, n)) if ternary else 2 * torch.randint(0, 2, (m, n)) - 1
    votes = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None))
    most = 2 * torch.tensor(rounds)
    counters = (torch.rand(words_for(n), m, 64) * (most[:, None] + 1)).int().to(torch.uint16).to(DEVICE)
    slots = torch.tensor([0, 1, -1, 3, 4, 5, 6])
    made = [CoordinateWeights(c, slots, *tables_for(rounds), symbol) for c in (counters, counters.clone())]
    out, want = filled(n, coin)
    counts = cuda.vote_by_coordinate_(out, votes, made[0], coin, n)
    assert same(counts, reference.vote_by_coordinate_(want, votes, made[1], coin, n))
    assert same(out, want)
    assert torch.equal(made[0].counters.int(), made[1].counters.int())


@few
@given(st.data(), st.booleans())
def test_disagreements(data: st.DataObject, ternary: bool) -> None:
    y = data.draw(ballots(ternary=ternary))
    votes = there(obvious.planes_of(y))
    assert same(cuda.disagreements(votes, len(y[0])), reference.disagreements(votes, len(y[0])))


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("m", [16, 19])
@pytest.mark.parametrize("n", [50, 2 * 32 * 32 * 4 + 70])
def test_disagreements_in_blocks(ternary: bool, m: int, n: int) -> None:
    """More workers than a block, more coordinates than a tile, and bits beyond n that must not count."""
    signs, support = torch.randint(-(2**63), 2**63 - 1, (2, m, words_for(n)), device=DEVICE)
    votes = Planes(signs & support, support) if ternary else Planes(signs, None)
    assert same(cuda.disagreements(votes, n), reference.disagreements(votes, n))
    others = votes.map(lambda plane: plane[: m // 3 + 1])
    assert same(cuda.disagreements(votes, n, others), reference.disagreements(votes, n, others))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 64, 4200])
@pytest.mark.parametrize("begin", [0, 5, 131])
@pytest.mark.parametrize("ternary", [False, True])
def test_step(dtype: torch.dtype, n: int, begin: int, ternary: bool) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds")
    y = torch.randint(-1, 2, (begin + n,)) if ternary else 2 * torch.randint(0, 2, (begin + n,)) - 1
    decision = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None))
    x = torch.randn(n).to(dtype)
    x[0] = -0.0
    wide = torch.promote_types(dtype, torch.float32)
    want = x.to(wide) - y[begin:].to(wide) * torch.tensor(1e-3, dtype=torch.float64).to(wide)
    moved = x.to(DEVICE)
    cuda.step_(moved, decision, begin, 1e-3)
    assert torch.equal(moved.cpu(), want.to(dtype))


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("decided", [None, True, False])
def test_many_tensors_step_in_one_launch(ternary: bool, decided: bool | None) -> None:
    """As each does by itself, also those that Triton leaves to plain torch."""
    shapes = [(70, 30), (5,), (1,), (64,), (3, 4, 5, 2)]
    begins = [0, 2100, 2105, 2110, 2176]
    xs = [torch.randn(shape, dtype=torch.float64 if shape == (64,) else torch.float32) for shape in shapes]
    xs[4] = xs[4].to(memory_format=torch.channels_last)
    ones, others = ([x.to(DEVICE) for x in xs] for _ in range(2))
    others = [x.clone() for x in others]
    y = torch.randint(-1, 2, (2400,)) if ternary else 2 * torch.randint(0, 2, (2400,)) - 1
    if decided is False:
        y.zero_()
    has_support = ternary or decided is not None
    decision = there(Planes(reference.pack(y > 0), reference.pack(y != 0) if has_support else None))
    flag = None if decided is None else torch.tensor(decided, device=DEVICE)
    cuda.step_all_(ones, begins, decision, 1e-3, 0.9993, flag)
    for x, one, other, begin in zip(xs, ones, others, begins, strict=True):
        reference.step_all_([other], [begin], decision, 1e-3, 0.9993, flag)
        assert torch.equal(one, other)
        assert decided is not False or torch.equal(one.cpu(), x)


@pytest.mark.skipif(INTERPRETED, reason="needs the memory of a GPU")
@pytest.mark.parametrize(
    "sending", [{"momentum": 0.9}, {"momentum": 0.9, "feedback": True, "top": 0.1}], ids=str
)
def test_a_worker_resumes_on_the_gpu_from_a_state_on_the_cpu(sending: dict[str, Any]) -> None:
    """As a checkpoint or a Flower node keeps it. The ballots are those of the worker that was not interrupted."""
    named = {"w": torch.zeros(1000, device=DEVICE)}
    steady = Worker(named, 3, **sending)
    server = Server(steady.layout, "majority")
    for t in range(1, 6):
        named["w"].grad = torch.randn(1000, device=DEVICE)
        resumed = Worker(named, 3, **sending)
        state = steady.state_dict()
        resumed.load_state_dict({k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()})
        message = resumed.ballot(t)
        assert message == steady.ballot(t)
        for kept in resumed.encoder.memory:
            assert kept is None or kept.device.type == "cuda"
        steady.apply(server.decide(t, {3: message}), step=0.1)


@pytest.mark.skipif(INTERPRETED, reason="needs the memory of a GPU")
def test_a_model_may_be_moved_to_the_gpu_on_the_way() -> None:
    model = torch.nn.Linear(30, 10)
    worker = Worker(model, 3, momentum=0.5)
    worker_here = Worker({name: p.detach().clone() for name, p in model.named_parameters()}, 3, momentum=0.5)
    for t, device in enumerate((torch.device("cpu"), DEVICE, torch.device("cpu"))):
        model.to(device)
        for name, p in model.named_parameters():
            whole = torch.randint(-3, 4, p.shape).float()  # exact in any order
            p.grad = whole.to(device)
            worker_here.parameters[name].grad = whole
        assert worker.ballot(t) == worker_here.ballot(t)
