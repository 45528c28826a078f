"""Every kernel equals the slow and obvious one, and the fast kernels equal the plain ones at any size."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import signvote.kernels
from signvote.errors import ConfigError
from signvote.kernels import Backend, Coin, CoordinateWeights, Planes, backend, cpu, reference, words_for
from tests import reference as obvious
from tests.conftest import BACKENDS
from tests.strategies import FLOATS, ballots, coins, numbers, tables_for, weights

both = pytest.mark.parametrize("kernels", BACKENDS.values(), ids=BACKENDS.keys())


def empty(n: int, coin: Coin | None, fill: int = 0) -> Planes:
    plane = torch.full((words_for(n),), fill, dtype=torch.int64)
    return Planes(plane, None if coin else plane.clone())


@both
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, 6e-8, -6e-8, 3e4]), min_size=1, max_size=200),
    coin=coins,
    dtype=st.sampled_from(FLOATS),
)
def test_signs(kernels: Backend, values: list[float], coin: Coin | None, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    before = x.clone()
    planes, finite = kernels.sign_planes(x, coin)
    assert finite
    assert obvious.signs_in(planes, len(values)) == obvious.signs_of(x.tolist(), coin)
    assert torch.equal(x.view(torch.int8), before.view(torch.int8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 63, 64, 199])
def test_a_number_that_is_not_finite_is_seen_anywhere(
    kernels: Backend, dtype: torch.dtype, bad: float, at: int
) -> None:
    x = torch.randn(200).to(dtype)
    assert kernels.sign_planes(x, None)[1]
    x[at] = bad
    assert not kernels.sign_planes(x, None)[1]
    assert not kernels.sign_planes(x, Coin(1))[1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_have_signs_even_where_the_processor_flushes_them(
    kernels: Backend, dtype: torch.dtype
) -> None:
    smallest = torch.tensor([1, -1], dtype=reference.INTEGERS[dtype.itemsize])
    smallest[1] = torch.iinfo(smallest.dtype).min + 1  # sign bit and the lowest bit
    torch.set_flush_denormal(True)
    try:
        planes, finite = kernels.sign_planes(smallest.view(dtype), None)
    finally:
        torch.set_flush_denormal(False)
    assert finite
    assert obvious.signs_in(planes, 2) == [1, -1]


@both
@given(st.data(), coins, st.booleans())
def test_vote(kernels: Backend, data: st.DataObject, coin: Coin | None, ternary: bool) -> None:
    y = data.draw(ballots(ternary=ternary))
    n, m = len(y[0]), len(y)
    w = data.draw(st.lists(weights, min_size=m, max_size=m))
    out = empty(n, coin)
    wrong, cast = kernels.vote_(out, obvious.planes_of(y), torch.tensor(w, dtype=torch.int32), coin, (0, n))
    assert (obvious.signs_in(out, n), wrong.tolist(), cast.tolist()) == obvious.vote(y, w, coin)


@both
@given(st.data(), coins)
def test_a_vote_on_a_span_leaves_the_other_bits(
    kernels: Backend, data: st.DataObject, coin: Coin | None
) -> None:
    y = data.draw(ballots(ternary=True))
    n, m = len(y[0]), len(y)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    w = torch.tensor(data.draw(st.lists(weights, min_size=m, max_size=m)), dtype=torch.int32)
    planes = obvious.planes_of(y, partial=True)
    whole, part = empty(n, coin), empty(n, coin, fill=-1)
    kernels.vote_(whole, planes, w, coin, (0, n))
    inside = kernels.vote_(part, planes, w, coin, (begin, end))
    signs = obvious.signs_in(whole, n)
    assert obvious.signs_in(part, n) == [1] * begin + signs[begin:end] + [1] * (n - end)
    rest = [
        kernels.vote_(part, planes, w, coin, span) for span in ((0, begin), (end, n)) if span[0] < span[1]
    ]
    total = [sum(counts[i] for counts in [inside, *rest]) for i in (0, 1)]
    assert obvious.signs_in(part, n) == signs
    for added, at_once in zip(total, kernels.vote_(whole, planes, w, coin, (0, n)), strict=True):
        assert torch.equal(torch.as_tensor(added), at_once)


@both
@given(st.data(), coins, st.booleans(), st.booleans())
def test_vote_by_coordinate(
    kernels: Backend, data: st.DataObject, coin: Coin | None, ternary: bool, symbol: bool
) -> None:
    y = data.draw(ballots(ternary=ternary))
    n, m = len(y[0]), len(y)
    rounds = data.draw(st.lists(st.sampled_from([1, 7, 300]), min_size=m, max_size=m))
    counts = [data.draw(numbers(n, 2 * t + 1)) for t in rounds]
    slots = data.draw(st.permutations(range(m + 1)))[:m]  # one slot belongs to an absent worker
    counters = torch.zeros(words_for(n), m + 1, 64, dtype=torch.uint16)
    for slot, halves in zip(slots, counts, strict=True):
        padded = torch.tensor(halves + [0] * (-n % 64)).view(-1, 64)
        counters[:, slot] = padded.to(torch.uint16)
    out = empty(n, coin)
    weights = CoordinateWeights(counters, torch.tensor(slots), *tables_for(rounds), symbol)
    wrong, cast = kernels.vote_by_coordinate_(out, obvious.planes_of(y), weights, coin, n)
    decision, after = obvious.vote_by_coordinate(y, counts, rounds, coin, symbol)
    assert obvious.signs_in(out, n) == decision
    assert [counters[:, s].flatten()[:n].tolist() for s in slots] == after
    assert all(not counters[:, s].flatten()[n:].any() for s in slots), "padding was counted"
    assert [wrong.tolist(), cast.tolist()] == list(obvious._counts(y, decision))


@both
@given(st.data(), st.booleans())
def test_disagreements(kernels: Backend, data: st.DataObject, ternary: bool) -> None:
    y = data.draw(ballots(ternary=ternary))
    differ, common = kernels.disagreements(obvious.planes_of(y), len(y[0]))
    assert differ.tolist() == [[sum(p * q < 0 for p, q in zip(a, b, strict=True)) for b in y] for a in y]
    assert common.tolist() == [[sum(p * q != 0 for p, q in zip(a, b, strict=True)) for b in y] for a in y]
    some = data.draw(st.lists(st.sampled_from(range(len(y))), min_size=1))
    planes = obvious.planes_of(y)
    found = kernels.disagreements(planes, len(y[0]), planes.map(lambda plane: plane[some]))
    assert torch.equal(found[0], differ[:, some])
    assert torch.equal(found[1], common[:, some])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 64, 150])
@pytest.mark.parametrize("begin", [0, 5, 64, 131])
@pytest.mark.parametrize("ternary", [False, True])
def test_step(kernels: Backend, dtype: torch.dtype, n: int, begin: int, ternary: bool) -> None:
    y = torch.randint(-1, 2, (begin + n,)) if ternary else 2 * torch.randint(0, 2, (begin + n,)) - 1
    stacked = obvious.planes_of([y.tolist()])
    decision = stacked.map(lambda p: p[0])
    x = torch.randn(n).to(dtype)
    x[0] = -0.0
    want = x - (y[begin:].to(dtype) * torch.tensor(1e-3, dtype=torch.float64)).to(
        torch.promote_types(dtype, torch.float32)
    )
    kernels.step_(x, decision, begin, 1e-3)
    assert torch.equal(x, want.to(dtype))


@pytest.mark.parametrize("n", [8191, 8192, 8193, 70_001])
@pytest.mark.parametrize("m", [2, 5, 6, 15, 100])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ternary", [False, True])
def test_cpu_equals_reference_beyond_a_block(
    monkeypatch: pytest.MonkeyPatch, n: int, m: int, threads: int, ternary: bool
) -> None:
    """Sizes around a block of words, many carries, and more threads: the same bits."""
    monkeypatch.setattr(cpu, "WORDS_PER_THREAD", 64)
    torch.set_num_threads(threads)
    y = torch.randint(-1, 2, (m, n)) if ternary else 2 * torch.randint(0, 2, (m, n)) - 1
    votes = Planes(reference.pack(y > 0), reference.pack(y != 0) if ternary else None)
    w = torch.randint(-10_240, 10_241, (m,), dtype=torch.int32)
    x = torch.randn(n) * y[0]
    for coin in (None, Coin(7, 13)):
        outs = [empty(n, coin) for _ in BACKENDS]
        counts = [
            k.vote_(out, votes, w, coin, (3, n - 1)) for k, out in zip(BACKENDS.values(), outs, strict=True)
        ]
        assert _same(*outs)
        assert _same(*counts)
        packed = [k.sign_planes(x, coin) for k in BACKENDS.values()]
        assert _same(packed[0][0], packed[1][0])
        counters = torch.randint(0, 601, (words_for(n), m, 64)).to(torch.uint16)
        copies = [counters.clone() for _ in BACKENDS]
        counts = [
            k.vote_by_coordinate_(
                out, votes, CoordinateWeights(c, torch.arange(m), *tables_for([300] * m), False), coin, n
            )
            for k, out, c in zip(BACKENDS.values(), outs, copies, strict=True)
        ]
        assert _same(*outs)
        assert _same(*counts)
        assert _same(*[(c.to(torch.int32),) for c in copies])
    assert _same(*[k.disagreements(votes, n) for k in BACKENDS.values()]) if m < 100 else True
    steps = [x.clone() for _ in BACKENDS]
    for k, s in zip(BACKENDS.values(), steps, strict=True):
        k.step_(s, outs[0], 0, 0.1)
    assert torch.equal(*steps)


def _same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    return all(
        (p is None and q is None) or (p is not None and q is not None and torch.equal(p, q))
        for p, q in zip(a, b, strict=True)
    )


@pytest.mark.slow
def test_ten_thousand_workers_with_the_largest_weights() -> None:
    m, n = 10_000, 300
    positive = torch.rand(m, n) < 0.5
    w = torch.randint(0, 2, (m,), dtype=torch.int32) * 20_480 - 10_240
    out = empty(n, None)
    wrong, _ = cpu.vote_(out, Planes(reference.pack(positive), None), w, None, (0, n))
    tally = (w.long()[:, None] * (2 * positive.long() - 1)).sum(0)
    assert obvious.signs_in(out, n) == torch.sign(tally).tolist()
    assert torch.equal(wrong, (positive != (tally > 0))[:, tally != 0].sum(1))


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=30))
@settings(max_examples=300)
def test_signed_digits_add_up_and_are_sparse(values: list[int]) -> None:
    digits = cpu._signed_digits(torch.tensor(values, dtype=torch.int32))
    total = [0] * len(values)
    for k, m, flip in digits.tolist():
        total[m] += -(2**k) if flip else 2**k
    assert total == values
    by_worker = {m: sorted(k for k, who, _ in digits.tolist() if who == m) for m in range(len(values))}
    assert all(b - a > 1 for ks in by_worker.values() for a, b in itertools.pairwise(ks))


def test_the_device_chooses_and_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNVOTE_KERNELS", raising=False)
    assert backend("cpu") is cpu
    assert backend("meta") is reference
    monkeypatch.setenv("SIGNVOTE_KERNELS", "reference")
    assert backend("cpu") is reference
    monkeypatch.setenv("SIGNVOTE_KERNELS", "fast")
    with pytest.raises(
        ConfigError, match="SIGNVOTE_KERNELS is 'fast'; it must be one of cpu, cuda, reference"
    ):
        backend("cpu")


@pytest.mark.parametrize(
    ("capability", "hip", "taken"),
    [((9, 0), None, "cuda"), ((7, 5), None, "reference"), ((9, 4), "6.2", "reference")],
)
def test_old_and_other_gpus_take_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, taken: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(signvote.kernels, "has_triton", lambda: True)
    assert signvote.kernels._fastest.__wrapped__(torch.device("cuda")) == taken


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_unpacking_equals_the_reference(kernels: Backend, n: int, rows: tuple[int, ...]) -> None:
    planes = torch.randint(-(2**63), 2**63 - 1, (*rows, 5), generator=torch.Generator().manual_seed(n))
    found = kernels.unpack(planes, n)
    assert found.dtype == torch.bool
    assert torch.equal(found, reference.unpack(planes, n))


def test_a_few_bits_of_a_long_plane_are_unpacked_without_reading_the_rest() -> None:
    plane = torch.tensor([5]).expand(2**50)  # words, all in the same place
    assert reference.unpack(plane, 3).tolist() == [True, False, True]


@both
@given(
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.integers(1, 300),
    st.integers(0, 130),
    st.booleans(),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_a_step_with_weight_decay_rounds_as_torch_does(
    kernels: Backend, dtype: torch.dtype, n: int, begin: int, ternary: bool, keep: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (begin + n,), generator=generator) * 2 - 1
    if ternary:
        signs *= torch.randint(0, 2, (begin + n,), generator=generator)
    decision = obvious.planes_of([signs.tolist()]).map(lambda p: p[0])
    x = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    want = x.clone().mul_(keep).sub_(signs[begin:].to(dtype), alpha=1e-3)
    kernels.step_(x, decision, begin, 1e-3, keep)
    assert torch.equal(x, want)
