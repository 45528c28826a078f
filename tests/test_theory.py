from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import ConfigError, theory
from tests.test_vote import decided

probabilities = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7)


@given(probabilities, st.data())
def test_error_probability_by_enumeration(p: list[float], data: st.DataObject) -> None:
    w = data.draw(st.lists(st.integers(-50, 50), min_size=len(p), max_size=len(p)))
    error = 0.0
    for y in itertools.product([-1, 1], repeat=len(p)):
        chance = math.prod(1 - q if s > 0 else q for q, s in zip(p, y, strict=True))
        tally = sum(a * s for a, s in zip(w, y, strict=True))
        error += chance * (0.5 if tally == 0 else tally < 0)
    assert theory.error_probability(p, w) == pytest.approx(error, abs=1e-12)


@pytest.mark.parametrize("weights", ["majority", "llr", "odd"])
def test_simulation_agrees_within_its_confidence_interval(weights: str) -> None:
    p = [0.45, 0.3, 0.4, 0.2, 0.48, 0.35]
    w = {"majority": [1] * 6, "llr": theory.llr_integers(p), "odd": [5, -3, 2, 9, 1, 4]}[weights]
    n = 200_000
    y = 1 - 2 * (torch.rand(len(p), n) < torch.tensor(p)[:, None]).long()  # the truth is +1
    decision = decided(y, w)
    measured = ((decision < 0).double() + (decision == 0).double() / 2).mean().item()
    exact = theory.error_probability(p, w)
    assert abs(measured - exact) < 4 * math.sqrt(exact * (1 - exact) / n)


@given(probabilities)
def test_bounds_hold(p: list[float]) -> None:
    plain = theory.error_probability(p, [1] * len(p))
    weighted = theory.error_probability(p, theory.llr_integers(p))
    assert plain <= theory.majority_bound(p) + 1e-12
    assert weighted <= theory.weighted_bound(p) + 1e-12
    assert weighted <= plain + 1e-3  # weights are clipped and rounded


def test_the_weighted_bound_holds_where_weights_are_clipped() -> None:
    """One sure worker of weight 10 is outvoted by two that are all but sure, and wrong once in 10,000 times."""
    p = [0.0, 1e-4, 1e-4]
    error = theory.error_probability(p, theory.llr_integers(p))
    assert 0 < error <= theory.weighted_bound(p)


def test_bounds_tighten_as_the_law_of_large_numbers_says() -> None:
    """A bad worker helps the weighted vote's bound and hurts the majority's."""
    good = [0.3] * 5
    assert theory.weighted_bound([*good, 0.49]) < theory.weighted_bound(good)
    assert theory.majority_bound([*good, 0.49, 0.49]) > theory.majority_bound(good)
    assert theory.majority_bound([0.5, 0.6]) == 1.0


@pytest.mark.parametrize("m", [1, 3, 15, 31])
def test_a_coin_flipper_looks_better_than_it_is(m: int) -> None:
    """Judged by a decision that contains its vote: 1/2 - C(M-1, (M-1)/2) / 2^M."""
    closed_form = 0.5 - math.comb(m - 1, (m - 1) // 2) / 2**m
    assert theory.observed_crossover([0.5] * m, [1] * m, 0) == pytest.approx(closed_form, abs=1e-12)


@given(probabilities, st.data())
@settings(max_examples=50)
def test_observed_crossover_by_enumeration(p: list[float], data: st.DataObject) -> None:
    w = data.draw(st.lists(st.integers(-9, 9), min_size=len(p), max_size=len(p)))
    for m in range(len(p)):
        seen = 0.0
        decided = 0.0
        for y in itertools.product([-1, 1], repeat=len(p)):
            chance = math.prod(1 - q if s > 0 else q for q, s in zip(p, y, strict=True))
            tally = sum(a * s for a, s in zip(w, y, strict=True))
            if tally != 0:
                decided += chance
                seen += chance * ((tally > 0) != (y[m] > 0))
        if decided > 1e-9:
            assert theory.observed_crossover(p, w, m) == pytest.approx(seen / decided, abs=1e-9)


@given(st.floats(1e-6, 1e-3), st.integers(1, 1000))
def test_low_signal_weights_are_proportional_to_the_root_of_the_batch(signal: float, batch: int) -> None:
    p = theory.batch_crossover(signal, batch)
    exact = math.log((1 - p) / p)
    assert theory.low_signal_weight(signal, batch) == pytest.approx(exact, rel=2e-3)
    ratio = theory.low_signal_weight(signal, 4 * batch) / theory.low_signal_weight(signal, batch)
    assert ratio == pytest.approx(2)


def test_a_gaussian_gradient_has_the_crossover_that_its_batch_says() -> None:
    n, batch, signal = 200_000, 9, 0.1
    means = signal + torch.randn(n) / batch**0.5
    p = theory.batch_crossover(signal, batch)
    assert abs((means < 0).double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_settled_weights_are_a_fixed_point() -> None:
    p = [0.47] * 9 + [0.35] * 4 + [0.12] * 2
    w = theory.settled_weights(p)
    assert theory.llr_integers([theory.observed_crossover(p, w, m) for m in range(15)]) == w
    assert theory.error_probability(p, w) < theory.error_probability(p, [1] * 15)
    assert theory.settled_weights(p, rounds=1) != w


def test_lengths_must_match() -> None:
    with pytest.raises(ConfigError, match="2 crossover probabilities, but 1 weights"):
        theory.error_probability([0.1, 0.2], [1])


def test_a_worker_that_is_never_judged_keeps_its_p() -> None:
    """Where no weight is left, every vote is a tie."""
    assert theory.observed_crossover([0.3, 0.4], [0, 0], worker=0) == 0.3
