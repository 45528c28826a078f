from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signvote import ConfigError
from signvote.engines.ddp import Balancer, UnequalSampler
from signvote.engines.ddp.balance import shared_out
from signvote.engines.ddp.shares import Shares


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(64, 700))
def test_every_coordinate_is_decided_once_and_in_whole_words(size: int, world: int, chunk: int) -> None:
    shares = Shares.of(size, world, chunk)
    pieces = [shares.piece(c, r) for c in range(shares.chunks) for r in range(world)]
    owned = sorted(i for first, n in pieces for i in range(first, first + n))
    assert owned == list(range(size))
    assert all(first % 64 == 0 for first, _ in pieces)
    for number in range(shares.chunks):
        at = shares.chunk(number)
        assert at.start < at.stop
        assert all(number in shares.touched(i, i + 1) for i in (at.start, at.stop - 1))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 500))
def test_a_total_is_shared_out_by_weight(weights: list[float], more: int) -> None:
    total = len(weights) + more
    parts = shared_out(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - 1 - more * weight / sum(weights)) < 1


@given(
    st.integers(1, 400),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_in_an_epoch_every_sample_comes_once(samples: int, sizes: list[int], seed: int, epochs: int) -> None:
    """Also while sizes change; everybody has at least one in every round."""
    world, total = len(sizes), sum(sizes)
    if samples < world:
        return
    balancers = [Balancer(total, world, every=2, sizes=sizes) for _ in sizes]
    samplers = [UnequalSampler(samples, b, rank, seed=seed) for rank, b in enumerate(balancers)]
    orders = []
    for _ in range(epochs):
        drawn: list[int] = []
        assert len(samplers[0]) == samplers[0].rounds
        for batches in zip(*samplers, strict=True):
            assert min(map(len, batches)) >= 1
            drawn += [i for batch in batches for i in batch]
            for rank, balancer in enumerate(balancers):
                del rank
                balancer.observe([1.0 + (r * balancer.rounds) % 3 for r in range(world)])
        assert sorted(drawn) == list(range(samples))
        orders.append(drawn)
    if samples > 50 and epochs > 1:
        assert orders[0] != orders[1]


def rounds_until_balanced(balancer: Balancer, seconds_a_sample: list[float], fixed: float) -> int:
    """Rounds until the slowest takes at most 1.2 times the mean."""
    for t in range(balancer.rounds, balancer.rounds + 200):
        sizes = balancer.sizes(balancer.rounds)
        took = [fixed + n * s for n, s in zip(sizes, seconds_a_sample, strict=True)]
        if max(took) <= 1.2 * sum(took) / len(took):
            return t
        balancer.observe(took)
    raise AssertionError(f"never balanced: {sizes}, {took}")


@pytest.mark.parametrize("fixed", [0.0, 0.01])
def test_a_slow_rank_gets_less_and_one_that_slows_down_is_noticed(fixed: float) -> None:
    balancer = Balancer(256, 4)
    assert balancer.sizes(0) == (64, 64, 64, 64)
    assert rounds_until_balanced(balancer, [1e-3, 1e-3, 1e-3, 8e-3], fixed) <= 30
    assert balancer.sizes(balancer.rounds)[3] < 16
    before = balancer.rounds
    assert rounds_until_balanced(balancer, [8e-3, 1e-3, 1e-3, 1e-3], fixed) - before <= 60
    assert balancer.sizes(balancer.rounds)[0] < 16


def test_noise_changes_nothing() -> None:
    balancer = Balancer(100, 2, every=3)
    for t in range(60):
        balancer.observe(
            [
                1.0 + 0.02 * (t % 2),
                1.0,
            ]
        )
    assert balancer.sizes(60) == (50, 50)
    for seconds in ([9.0, 1.0], [1.0, 1.0], [1.0, 1.0]):  # a hiccup is no slow machine
        balancer.observe(seconds)
    assert balancer.sizes(63) == (50, 50)


def test_a_loader_that_draws_ahead() -> None:
    balancer = Balancer(20, 2, every=1, lag=3)
    sampler = UnequalSampler(100, balancer, 0)
    for t in range(4):
        sampler.batch(t)
    with pytest.raises(
        ConfigError, match=r"round 4 is 4 ahead of what was observed; give Balancer\(lag=...\)"
    ):
        sampler.batch(4)
    balancer.observe([1.0, 9.0])
    assert balancer.sizes(3) == (10, 10)  # drawn already
    assert balancer.sizes(4) == (17, 3)


def test_going_on() -> None:
    balancer = Balancer(20, 2, every=1)
    balancer.observe([1.0, 9.0])
    state = balancer.state_dict()
    again = Balancer(20, 2)
    again.load_state_dict(state)
    assert again.sizes(1) == balancer.sizes(1) == (17, 3)
    fewer = Balancer(20, 1)
    fewer.load_state_dict(state)
    assert fewer.sizes(1) == (20,)
    rest = UnequalSampler(70, again, 1)
    rest.round = 1
    assert len(rest) == 3
    assert next(iter(rest)) == UnequalSampler(70, balancer, 1).batch(1)


@pytest.mark.parametrize("lag", [0, 3])
def test_resuming_without_the_balancers_state_is_said_to_be_that(lag: int) -> None:
    """It is not the DataLoader that draws ahead: nobody asked for the rounds before."""
    balancer = Balancer(20, 2, lag=lag)
    sampler = UnequalSampler(100, balancer, 0)
    for resumed in (lag + 1, 120):
        sampler.round = resumed
        with pytest.raises(
            ConfigError, match=rf"round {resumed} was asked for, and 0 .* load the balancer's state"
        ):
            next(iter(sampler))
    with pytest.raises(
        ConfigError, match="120 rounds are decided, and the balancer has observed 0; to resume, load"
    ):
        balancer.sizes_after(120)
    saved = Balancer(20, 2, lag=lag)
    for t in range(120):
        saved.sizes(t)
        saved.observe([1.0, 1.0])
    balancer.load_state_dict(saved.state_dict())
    assert len(next(iter(sampler))) == balancer.sizes_after(120)[0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"total": 2}, "total is 2; it must be 3 or more"),
        ({"every": -1}, "every is -1"),
        ({"sizes": [5, 5]}, "wanted 3"),
        ({"sizes": [12, 0, 0]}, "each 1 or more"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Balancer(**{"total": 12, "world": 3, **settings})  # type: ignore[arg-type]


def test_too_few_samples() -> None:
    with pytest.raises(ConfigError, match="2 samples are too few for 3 ranks"):
        UnequalSampler(2, Balancer(12, 3), 0)
