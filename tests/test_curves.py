"""Curves come as close to their tables as they say, and a vote with them is that of the tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote.core.counters import CoordinateTrust
from signvote.kernels import Coin, CoordinateWeights, Planes, cpu, reference, words_for
from signvote.kernels.curve_lanes import COPIES, add_curve
from signvote.kernels.curves import TOGETHER, UNIT, WORST, curves, values
from signvote.kernels.words import ONES, Array, Word, compiled

CAPACITY = CoordinateTrust.FULL - 1  # most rounds in counters


def trust_after(rounds: list[int], n: int, max_llr: float = 10.0, warmup: int = 0) -> CoordinateTrust:
    """The trust in workers that voted in so many rounds; their counters are 0."""
    trust = CoordinateTrust(n, warmup=warmup, max_llr=max_llr)
    trust.admit(range(len(rounds)))
    trust._rounds.update(enumerate(rounds))
    trust._seen.update(enumerate(rounds))
    return trust


def table_after(rounds: int, max_llr: float = 10.0) -> CoordinateWeights:
    return trust_after([rounds], 64, max_llr).weights([0], 0, 1)


@compiled  # type: ignore[untyped-decorator]
def added(counters: Array, vote: Word, curve: Array) -> tuple[Array, Word]:
    """What `add_curve` adds for 64 counters, and where they are far."""
    sums = np.zeros(64, np.int16)
    far = add_curve(counters, 0, vote, ONES, curve, 0, sums)
    return sums, far


@settings(max_examples=40, deadline=None)
@given(st.integers(1, CAPACITY), st.randoms(use_true_random=False))
def test_a_curve_is_no_further_from_its_table_than_it_says(rounds: int, random: object) -> None:
    size = 2 * rounds + 1
    weights = table_after(rounds)
    known = curves(weights.tables.numpy(), [size])
    (curve,), (error,) = known.curves, known.error
    table = UNIT * weights.tables[0, size : 2 * size].numpy().astype(np.int64)
    assert error <= 2 * UNIT
    generator = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    fields = torch.from_numpy(curve).repeat_interleave(COPIES).numpy()
    for first in generator.integers(0, max(1, size - 64), 8):
        counters = np.minimum(np.arange(first, first + 64), size - 1)
        for vote, sign in ((ONES, 1), (Word(0), -1)):
            found, far = added(counters.astype(np.uint16), vote, fields)
            is_far = np.array([int(far) >> lane & 1 for lane in range(64)], bool)
            near = counters[~is_far]
            assert (found[~is_far] == sign * values(curve, near)).all()
            assert np.abs(found[~is_far] - sign * table[near]).max(initial=0) <= error
            assert np.abs(found[~is_far]).max(initial=0) * TOGETHER < 2**15
            assert (is_far == (np.abs(counters - rounds) > int(0.8 * rounds))).all()


def test_a_weight_that_is_the_same_everywhere_is_exact() -> None:
    weights = trust_after([50], 64, warmup=100).weights([0], 0, 1)
    known = curves(weights.tables.numpy(), [101])
    assert known.error.tolist() == [0]
    assert set(values(known.curves[0], np.arange(101)).tolist()) == {UNIT * 1024}


def test_a_table_with_corners_gets_no_curve() -> None:
    """Weights are cut off at 0.3 here: no polynomial of this degree follows."""
    weights = table_after(500, max_llr=0.3)
    assert curves(weights.tables.numpy(), [1001]).error > WORST


@pytest.mark.parametrize("max_llr", [10.0, 0.3])
@pytest.mark.parametrize("rounds", [[3000] * 15, [3000, 16000, 40, 0, 700, 3], [200]])
@pytest.mark.parametrize("coin", [Coin(5), None])
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("p", [0.45, 0.15])
def test_a_vote_with_curves_is_that_of_the_tables(
    max_llr: float, rounds: list[int], coin: Coin | None, ternary: bool, p: float
) -> None:
    """Some tallies are certain, some are looked up one by one, some words as a whole."""
    n, m = 5000, len(rounds)
    trust = trust_after(rounds, n, max_llr, warmup=10)
    generator = torch.Generator().manual_seed(m)
    for worker, t in enumerate(rounds):
        mean = 2 * t * p
        spread = (2 * t * p * (1 - p)) ** 0.5
        drawn = mean + 4 * spread * torch.randn(len(trust.counters), 64, generator=generator)
        trust.counters[:, worker] = drawn.round().clamp(0, 2 * t).to(torch.uint16)
    bits = [
        torch.randint(-(2**63), 2**63 - 1, (m, words_for(n)), generator=generator) for _ in range(1 + ternary)
    ]
    votes = Planes(bits[0], bits[1] if ternary else None)
    found = []
    for kernels in (cpu, reference):
        weights = trust.weights(range(m), 0, words_for(n))
        weights = weights._replace(counters=weights.counters.clone())
        out = Planes(*(torch.zeros(words_for(n), dtype=torch.int64) for _ in range(2)))
        out = out if coin is None else out._replace(support=None)
        wrong, cast = kernels.vote_by_coordinate_(out, votes, weights, coin, n)
        planes = [plane for plane in out if plane is not None]
        found.append([*planes, wrong, cast, weights.counters.view(torch.int16)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
