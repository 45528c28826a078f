"""What a cap on weights guarantees."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote.core.vote import Voters, capped, empty_decision, roots
from signvote.kernels import Coin
from tests.test_robust import CLEAN, M, honest, made, play, votes_of, weights


def test_a_cap_of_one_is_a_majority_of_those_who_may_be_believed() -> None:
    rule, n = made(cap=1), 3000
    for t in range(1, 10):
        play(rule, torch.cat([honest(CLEAN[:10], n), -honest(CLEAN[:5], n)]), t)
    found = weights(rule, range(M))
    assert found[:10].min() == found[:10].max()
    assert found[0] > 0 == found[10:].max()


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_the_bound_of_the_cap_by_enumeration(cap: float) -> None:
    """L < M / (1 + cap) colluders never overturn all others, whatever the weights; L beyond it may."""
    for m in range(2, 7):
        raw = torch.tensor(list(itertools.product([1, 7, 601, 6000], repeat=m)), dtype=torch.int32).T
        found = capped(raw, cap)
        for colluders in range(m):
            obeyed = found[colluders:].sum(0) > found[:colluders].sum(0)
            assert bool(obeyed.all()) == (colluders < m / (1 + cap)), (m, colluders)
        with_zeros = torch.where(raw == 1, 0, raw)  # colluders that are not believed add nothing
        for colluders in range(math.ceil(m / (1 + cap))):
            found = capped(with_zeros, cap)
            obeyed = found[colluders:].sum(0) > found[:colluders].sum(0)
            assert (obeyed | (with_zeros[colluders:] == 0).any(0)).all()


def test_who_declares_more_may_weigh_more() -> None:
    """The cap is on weight / sqrt(batch size), the largest integer weight stays the largest, signs stay."""
    raw = torch.tensor([[10_240], [700], [700], [0], [-50]], dtype=torch.int32)
    found = capped(raw, 2, roots([64, 64, 6400, 64, 64]))
    assert found[:, 0].tolist() == [2048, 1024, 10_240, 0, -10]
    assert torch.equal(capped(raw, 2, roots([0] * 5)), capped(raw, 2))


@pytest.mark.parametrize("by_size", [True, False])
def test_a_strong_worker_that_declares_itself(by_size: bool) -> None:
    """Mode 4: without its word for it, the one strong worker has twice the weight of a weak one."""
    rule = made(by_size=by_size)
    sizes = (4,) * 14 + (904,)
    for t in range(1, 30):
        y = honest([0.47] * 14 + [0.1], 4000)
        out = empty_decision(4000, Coin(t))
        rule.learn(rule.vote(out, replace(votes_of(y), batch_sizes=sizes), Coin(t)))
    found = rule.weights(Voters(workers=tuple(range(M)), batch_sizes=sizes))[:, 0]
    assert (found[14] > 8 * found[:14].max()) == by_size
    assert by_size or found[14] <= 2 * found[:14][found[:14] > 0].min()


def test_no_cap_changes_nothing() -> None:
    raw = torch.tensor([[5, 0], [10_240, 0], [1, 0]], dtype=torch.int32)
    assert torch.equal(capped(raw, math.inf), raw)
    assert capped(raw, 4).tolist() == [[2560, 0], [10_240, 0], [2560, 0]]


@st.composite
def populations(draw: st.DrawFn) -> tuple[int, float, list[float], int, float, float, int]:
    """Workers, cap, honest crossovers, colluders, their noise, the share they attack, and a seed."""
    m = draw(st.integers(4, 15))
    cap = draw(st.sampled_from([1.0, 1.5, 2.0, 3.0]))
    most = math.ceil(m / (1 + cap)) - 1
    colluders = draw(st.integers(0, most))
    p = draw(st.lists(st.sampled_from([0.0, 0.005, 0.1, 0.3, 0.45]), min_size=m, max_size=m))
    if draw(st.booleans()):
        p = [p[0]] * m
    noise = draw(st.sampled_from([0.0, 0.01, 0.3, 0.45]))
    share = draw(st.sampled_from([0.02, 0.1, 0.4]))
    return m, cap, p, colluders, noise, share, draw(st.integers(0, 2**31))


@given(populations())
def test_colluders_below_the_bound_never_overturn_unanimous_workers(population: tuple) -> None:  # type: ignore[type-arg]
    """Copies, honest or not, included: the cap holds for the weights that vote."""
    m, cap, p, colluders, noise, share, seed = population
    torch.manual_seed(seed)
    n = 2000
    rule = made(n, cap=cap)
    for t in range(1, 8):
        y = honest(p, n)
        against = torch.rand(n) < share
        theirs = honest([noise] * colluders, n)
        y[:colluders] = torch.where(against, -1, theirs)
        play(rule, y, t)
        found = weights(rule, range(m))
        if found.min() > 0:
            assert found[colluders:].sum() > found[:colluders].sum(), found.tolist()
        positive = found[found > 0]
        assert positive.max() <= cap * positive.min(), found.tolist()


def test_two_colluders_do_not_overturn_thirteen_who_look_like_copies() -> None:
    for p in (0.0, 0.005):
        rule, n = made(), 4000
        for t in range(1, 30):
            against = torch.rand(n) < 0.1
            y = honest([p] * 13 + [0.3] * 2, n)
            y[13:] = torch.where(against, -y[0], y[13:])
            play(rule, y, t)
            found = weights(rule, range(M))
            assert found[:13].sum() > found[13:].sum()
