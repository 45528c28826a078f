"""The rule `robust`: what a declared size can buy, and on which coordinates pairs of workers are compared."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from signvote.core.guard import FIRST, PROBATION, Sample, pair_counts
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin, cpu
from tests.test_robust import (
    CLEAN,
    M,
    anti,
    honest,
    made,
    one_thread,
    play,
    votes_of,
    votes_per_worker,
    weights,
)

__all__ = ["one_thread"]  # a fixture


# ---- what a declared size can buy ----------------------------------------------------------------


def test_strong_workers_that_declare_themselves_are_heard() -> None:
    """Votes like those of mode 3: the strong are right more often, and more weight makes fewer errors."""
    rule, n = made(8000), 8000
    p = [0.42] * 12 + [0.2] * 3
    sizes = [4] * 12 + [304] * 3
    for t in range(1, 40):
        play(rule, honest(p, n), t, sizes=sizes)
    found = weights(rule, range(M), sizes).double()
    assert (found[12:] / found[0]).min() > 3


@pytest.mark.parametrize("lie", [2, 100, 1_000_000])
@pytest.mark.parametrize("liars", [1, 5])
@pytest.mark.parametrize("p", [0.2, 0.35, 0.45])
def test_a_lie_about_size_buys_next_to_nothing(liars: int, lie: int, p: float) -> None:
    """Votes as good as those of the others, and a size that is not."""
    rule, n = made(8000), 8000
    sizes = [64] * (M - liars) + [64 * lie] * liars
    for t in range(1, 40):
        play(rule, honest([p] * M, n), t, sizes=sizes)
        assert votes_per_worker(rule, sizes)[M - liars :].max() < 1.7


@pytest.mark.parametrize("agreeing", [1, 5])
@pytest.mark.parametrize("p", [0.1, 0.2, 0.26])
def test_where_most_agree_no_size_can_be_feigned(agreeing: int, p: float) -> None:
    """Workers that see the votes of the others, agree with all of them, and declare a thousand times their size."""
    rule, n = made(4000), 4000
    sizes = [64] * (M - agreeing) + [64_000] * agreeing
    for t in range(1, 30):
        y = honest([p] * M, n)
        y[M - agreeing :] = -anti(y[: M - agreeing])
        play(rule, y, t, sizes=sizes)
        assert votes_per_worker(rule, sizes)[M - agreeing :].max() < 1.05


def test_nobody_has_more_than_the_largest_vote() -> None:
    for largest in (1.0, 3.0):
        rule = made(8000, largest=largest)
        p = [0.42] * 14 + [0.05]
        sizes = [1] * 14 + [10**9]
        for t in range(1, 30):
            play(rule, honest(p, 8000), t, sizes=sizes)
            assert votes_per_worker(rule, sizes)[14] <= largest + 0.01
    assert votes_per_worker(rule, sizes)[14] == pytest.approx(3, abs=0.01)


def test_strength_is_shown_in_the_first_rounds_or_never() -> None:
    rule, n = made(8000), 8000
    for t in range(1, FIRST):
        play(rule, honest([0.42] * 14 + [0.05], n), t)
    assert rule.trust.strength([14]).item() == 1
    for t in range(FIRST, PROBATION + 2):
        play(rule, honest([0.42] * M, n), t)
    before = rule.trust.strength(range(M))
    for t in range(PROBATION + 2, PROBATION + 30):
        play(rule, honest([0.42] * 14 + [0.05], n), t)
    assert torch.equal(rule.trust.strength(range(M)), before)


# ---- where pairs are compared --------------------------------------------------------------------


def test_a_sample_is_the_same_in_chunks_and_depends_on_the_secret() -> None:
    n = 64 * 300 + 17
    y = honest([0.3, 0.4, 0.5], n)

    def counted(secret: int, cuts: list[int], size: int = 3000) -> tuple[Tensor, Tensor]:
        sample = Sample(n, size, secret)
        found = []
        for a, b in itertools.pairwise([*cuts, n]):
            piece = votes_of(y[:, a:b])
            votes = Votes(workers=(0, 1, 2), planes=piece.planes, n=b - a, first=a)
            found.append(pair_counts(sample.of(votes)))
        return sum(d for d, _ in found), sum(c for _, c in found)  # type: ignore[return-value]

    whole, other = counted(1, [0]), counted(2, [0])
    for cuts in ([0, 64], [0, 6400, 12_800], [0, 64 * 300]):
        assert all(torch.equal(a, b) for a, b in zip(counted(1, cuts), whole, strict=True))
    assert not torch.equal(whole[1], other[1])
    assert abs(whole[1][0, 0] - 3000) < 5 * 64 * math.sqrt(3000 / 64)
    every = counted(1, [0], n)
    assert all(
        torch.equal(a, b) for a, b in zip(every, cpu.disagreements(votes_of(y).planes, n), strict=True)
    )


def test_a_small_sample_still_finds_inverters() -> None:
    rule = made(64 * 500, sample=4000, secret=2**63)
    for t in range(1, 10):
        y = honest(CLEAN, 64 * 500)
        y[-6:] *= -1
        play(rule, y, t)
    found = weights(rule, range(M))
    assert found[:9].min() > 0 == found[9:].max()


def test_votes_without_a_word_of_the_sample_show_nothing() -> None:
    rule = made(64 * 50, sample=64, secret=5)
    piece = votes_of(honest(CLEAN, 64))
    found = [rule.vote(empty_decision(64, Coin(1)), piece, Coin(1)) for _ in range(2)]
    firsts = range(0, 64 * 50, 64)
    seen = [
        rule.sample.of(Votes(workers=piece.workers, planes=piece.planes, n=64, first=first)).n
        for first in firsts
    ]
    assert 0 in seen
    assert sum(seen) > 0
    assert found[0].differ is not None
    empty = Votes(workers=piece.workers, planes=piece.planes, n=64, first=64 * seen.index(0))
    nothing = rule.vote(empty_decision(64, Coin(1)), empty, Coin(1)).common
    assert nothing is not None
    assert nothing.shape == (2, M, M)
    assert not nothing.any()
