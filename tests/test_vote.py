"""The laws of a weighted vote."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from signvote.core import theory
from signvote.core.bits import unpack_signs
from signvote.core.vote import (
    LARGEST,
    Voters,
    Votes,
    disagreements,
    empty_decision,
    everywhere,
    fixed_point,
    in_a_row,
    llr_weights,
    scaled,
)
from signvote.kernels import Coin, Planes, cpu, words_for
from signvote.kernels.reference import unpack
from tests import reference as obvious

probabilities = st.floats(0.001, 0.999)


def decided(y: Tensor, weights: list[int] | Tensor, coin: Coin | None = None) -> Tensor:
    """Decision of signs y (workers, n), through the real kernel."""
    out = empty_decision(y.shape[1], coin)
    w = torch.as_tensor(weights, dtype=torch.int32)
    cpu.vote_(out, obvious.planes_of(y.tolist()), w, coin, (0, y.shape[1]))
    return unpack_signs(out, y.shape[1])


def random_signs(m: int, n: int, *, ternary: bool = False) -> Tensor:
    return torch.randint(-1, 2, (m, n)) if ternary else 2 * torch.randint(0, 2, (m, n)) - 1


@given(st.lists(st.integers(-LARGEST, LARGEST), min_size=2, max_size=12), st.randoms(), st.booleans())
def test_permuting_workers_changes_nothing(weights: list[int], random, ternary: bool) -> None:  # type: ignore[no-untyped-def]
    y = random_signs(len(weights), 90, ternary=ternary)
    order = list(range(len(weights)))
    random.shuffle(order)
    coin = Coin(4)
    assert torch.equal(decided(y, weights, coin), decided(y[order], [weights[i] for i in order], coin))


@given(st.lists(st.integers(-LARGEST, LARGEST), min_size=1, max_size=12), st.booleans())
def test_flipping_every_ballot_flips_the_decision(weights: list[int], ternary: bool) -> None:
    y = random_signs(len(weights), 90, ternary=ternary)
    assert torch.equal(decided(-y, weights), -decided(y, weights))


@given(st.floats(0.001, 0.499), st.integers(1, 15))
def test_equal_p_is_majority(p: float, m: int) -> None:
    y = random_signs(m, 200, ternary=True)
    weights = fixed_point(scaled(llr_weights(torch.full((m, 1), p))))[:, 0]
    assert torch.equal(decided(y, weights, Coin(1)), decided(y, [1] * m, Coin(1)))


@given(st.lists(probabilities, min_size=1, max_size=8))
def test_a_worker_with_p_one_half_is_ignorable(p: list[float]) -> None:
    y = random_signs(len(p) + 1, 200)
    weights = theory.llr_integers([*p, 0.5])
    assert weights[-1] == 0
    assert torch.equal(decided(y, weights, Coin(1)), decided(y[:-1], weights[:-1], Coin(1)))


@given(st.lists(probabilities, min_size=1, max_size=8))
def test_a_worker_with_p_above_one_half_is_believed_to_mean_the_opposite(p: list[float]) -> None:
    y = random_signs(len(p), 200)
    assert torch.equal(
        decided(y, theory.llr_integers(p)), decided(-y, theory.llr_integers([1 - q for q in p]))
    )


@given(st.lists(probabilities, min_size=1, max_size=7))
def test_no_rule_beats_the_llr_vote(p: list[float]) -> None:
    """All 2^M ballots at once, each a coordinate: the best possible rule errs on the rarer cause.

    Rounding a weight moves it by at most 1/2048, so a ballot decided against its likelier cause has
    likelihoods within exp(M / 2048) of each other; that is all the exactness costs.
    """
    m = len(p)
    y = torch.tensor(list(itertools.product([-1, 1], repeat=m))).T
    chance = torch.tensor(p, dtype=torch.float64)[:, None]
    likelihood = {
        truth: torch.where(y == truth, 1 - chance, chance).prod(0) for truth in (-1, 1)
    }  # P(ballots | truth)
    optimum = torch.minimum(likelihood[1], likelihood[-1]).sum() / 2
    decision = decided(y, theory.llr_integers(p))
    error = (
        torch.where(
            decision == 0,
            (likelihood[1] + likelihood[-1]) / 2,
            torch.where(decision > 0, likelihood[-1], likelihood[1]),
        ).sum()
        / 2
    )
    assert optimum - 1e-12 <= error <= optimum * math.exp(m / 2048) + 1e-12
    assert error.item() == pytest.approx(theory.error_probability(p, theory.llr_integers(p)), abs=1e-9)


def test_a_tie_is_a_fair_coin_or_stands_still() -> None:
    y = torch.stack([torch.ones(64_000), -torch.ones(64_000)]).long()
    assert not decided(y, [5, 5]).any()
    tossed = decided(y, [5, 5], Coin(3)).double()
    assert tossed.abs().min() == 1
    assert abs(tossed.mean().item()) < 4 / 64_000**0.5
    assert torch.equal(tossed, decided(y, [700, 700], Coin(3)).double())


def test_equation_3() -> None:
    """w = log((1 - p) / p), clipped at 10."""
    p = torch.tensor([0.0, 1e-9, 0.1, 0.5, 0.9, 1.0])
    assert llr_weights(p).tolist() == pytest.approx([10, 10, math.log(9), 0, -math.log(9), -10], abs=1e-6)
    assert llr_weights(p, max_llr=2.0).tolist() == pytest.approx([2, 2, 2, 0, -2, -2], abs=1e-6)
    assert fixed_point(llr_weights(torch.tensor([0.25]))).tolist() == [round(1024 * math.log(3))]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_scaling_doubles_until_the_largest_weight_is_between_5_and_10(values: list[float]) -> None:
    weights = torch.tensor(values).double()[:, None]
    doubled = scaled(weights)
    ratio = (doubled / weights)[weights.abs() > 1e-9]
    if ratio.numel():
        assert (ratio == ratio[0]).all()
        assert math.log2(ratio[0]).is_integer()
        assert 5 < doubled.abs().max() <= 10


def test_scaling_tells_workers_near_one_half_apart() -> None:
    p = torch.tensor([[0.4999], [0.4998], [0.49985]]).double()
    assert fixed_point(llr_weights(p)).flatten().tolist() == [0, 1, 1]
    a, b, c = fixed_point(scaled(llr_weights(p))).flatten().tolist()
    assert a < c < b
    assert b / a == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128])
def test_everywhere(n: int) -> None:
    assert unpack(everywhere(n), n).all()
    assert not unpack(everywhere(n), -(-n // 64) * 64)[n:].any()


def test_voters_that_declare_nothing_have_batch_sizes_of_zero() -> None:
    assert Voters(workers=(3, 7)).batch_sizes == (0, 0)
    assert Voters(workers=(3, 7), batch_sizes=(4, 0)).batch_sizes == (4, 0)
    votes = Votes(workers=(3,), planes=obvious.planes_of([[1]]), n=1)
    assert isinstance(votes, Voters), "a rule is asked for weights with votes, too"
    assert votes.batch_sizes == (0,)


# ---- evidence ------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    cuts=st.sets(st.integers(1, 149), max_size=4),
    at=st.sampled_from([64, 128]),
)
def test_evidence_of_pieces_adds_up_to_that_of_the_whole(
    seed: int, workers: int, cuts: set[int], at: int
) -> None:
    """Span by span, wherever spans and pieces begin."""
    y = torch.randint(-1, 2, (workers + 1, 150), generator=torch.Generator().manual_seed(seed))
    spans = list(itertools.pairwise([0, *sorted(cuts), 150]))
    found = torch.zeros(2, workers, len(spans), dtype=torch.int64)
    for first, stop in ((0, at), (at, 150)):
        planes = obvious.planes_of(y[:, first:stop].tolist(), partial=True)
        votes = Votes(
            workers=tuple(range(workers)), planes=planes.map(lambda p: p[1:]), n=stop - first, first=first
        )
        found += torch.stack(disagreements(planes.map(lambda p: p[0]), votes, spans))
    decision, cast = y[0], y[1:]
    for g, (a, b) in enumerate(spans):
        product = cast[:, a:b] * decision[a:b]
        assert torch.equal(found[0, :, g], (product == -1).sum(1))
        assert torch.equal(found[1, :, g], (product != 0).sum(1))


@given(
    cut=st.sampled_from([64, 128]),
    has_gap=st.lists(st.booleans(), min_size=2, max_size=2),
    seed=st.integers(0, 9),
)
def test_votes_in_a_row_are_those_of_the_parts(cut: int, has_gap: list[bool], seed: int) -> None:
    """A part without a support plane was voted on everywhere; an empty part adds nothing."""
    draws = torch.Generator().manual_seed(seed)
    parts = []
    for n, gap in zip((cut, 70), has_gap, strict=True):
        signs = torch.randint(-9, 9, (3, words_for(n)), generator=draws) & everywhere(n)
        support = torch.randint(-9, 9, signs.shape, generator=draws) & everywhere(n) if gap else None
        parts.append(Votes(workers=(0, 1, 2), planes=Planes(signs, support), n=n))
    empty = Votes(workers=(0, 1, 2), planes=Planes(torch.zeros(3, 0).long(), None), n=0)
    whole = in_a_row([parts[0], None, empty, parts[1]])
    assert whole is not None
    assert whole.n == cut + 70
    assert torch.equal(whole.planes.signs, torch.cat([part.planes.signs for part in parts], 1))
    if not any(has_gap):
        assert whole.planes.support is None
        return
    full = [everywhere(part.n).expand(3, -1) for part in parts]
    given_ = [
        part.planes.support if gap else each for part, gap, each in zip(parts, has_gap, full, strict=True)
    ]
    assert whole.planes.support is not None
    assert torch.equal(whole.planes.support, torch.cat([each for each in given_ if each is not None], 1))


def test_nothing_in_a_row_is_nothing() -> None:
    assert in_a_row([None, None]) is None
