"""The rule `robust`: who is heard, who shares a vote, and what a declared size can buy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from signvote import ConfigError, Layout, StateError
from signvote.core.guard import contested
from signvote.core.pairs import ENOUGH, hostile, sharing, usual
from signvote.core.rules import Majority, Robust
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.kernels import Coin, Planes
from signvote.kernels.reference import pack

M = 15
CLEAN = [0.35] * M
SURE = torch.full((M,), 0.02).double()  # what a hundred rounds show by chance


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)


def honest(p: Any, n: int) -> Tensor:
    """Signs of workers with these crossovers where the truth is +1."""
    return torch.where(torch.rand(len(p), n) < torch.as_tensor(p)[:, None], -1, 1)


def votes_of(y: Tensor, workers: Any = None, sizes: Any = ()) -> Votes:
    partial = pack(y != 0) if bool((y == 0).any()) else None
    ids = tuple(range(len(y)) if workers is None else workers)
    return Votes(workers=ids, planes=Planes(pack(y > 0), partial), n=y.shape[1], batch_sizes=tuple(sizes))


def play(rule: Any, y: Tensor, round: int, workers: Any = None, sizes: Any = ()) -> Tensor:
    """One round; the decision."""
    out = empty_decision(y.shape[1], Coin(round))
    rule.learn(rule.vote(out, votes_of(y, workers, sizes), Coin(round)))
    return out.signs


def weights(rule: Any, workers: Any, sizes: Any = ()) -> Tensor:
    found: Tensor = rule.weights(Voters(workers=tuple(workers), batch_sizes=tuple(sizes)))[:, 0]
    return found


def votes_per_worker(rule: Any, sizes: Any = ()) -> Tensor:
    """Weights in units of the median honest vote, that of worker 0 to 9."""
    found = weights(rule, range(M), sizes).double()
    return found / found[:10].median()


def anti(y: Tensor) -> Tensor:
    """-sign of the majority of these."""
    return torch.where(y.sum(0) > 0, -1, 1)


def made(n: int = 4000, **options: Any) -> Robust:
    return Robust(Layout([("x", (n,))]), **options)


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.2, 0.35, 0.45, 0.49])
@pytest.mark.parametrize("m", [2, 3, 4, 7, 15, 31])
def test_equal_honest_workers_have_equal_weights(m: int, p: float) -> None:
    """So ties stay ties, and a clean run is a plain majority."""
    rule = made()
    for t in range(1, 25):
        play(rule, honest([p] * m, 4000), t)
        assert len(set(weights(rule, range(m)).tolist())) == 1


@pytest.mark.parametrize("attack", ["none", "clones", "invert"])
def test_other_names_for_workers_change_nothing(attack: str) -> None:
    one, other, n = made(), made(), 3000
    for t in range(1, 15):
        y = honest(CLEAN, n)
        if attack == "clones":
            y[[1, 4, 7]] = honest([0.5], n)
        if attack == "invert":
            y[:7] *= -1
        names = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:M]
        order = names.argsort()
        play(one, y, t)
        play(other, y[order], t, names[order].tolist())
        assert torch.equal(weights(one, range(M)), weights(other, names.tolist()))


def test_the_state_carries_the_verdict_and_the_sizes_shown() -> None:
    rule = made()
    p = [0.45] * 12 + [0.2] * 3
    sizes = [4] * 12 + [256] * 3
    for t in range(1, 12):
        y = honest(p, 4000)
        y[:2] *= -1
        play(rule, y, t, sizes=sizes)
    other = made()
    other.load_state_dict(rule.state_dict())
    assert torch.equal(weights(other, range(M), sizes), weights(rule, range(M), sizes))
    assert weights(rule, range(M), sizes)[14] > weights(rule, range(M))[14]
    for worker in (14, 13, 99):
        rule.forget(worker)
    assert rule.trust.pairs.counts.shape == (2, 2, 2, 13, 13)
    assert weights(rule, [14])[0] > 0, "as a newcomer"
    for name, wrong in (("strengths", [0.5] * M), ("strengths", [math.inf] * M), ("rounds", [-1] * M)):
        with pytest.raises(StateError, match="a strength below 1, or a negative number"):
            other.load_state_dict(other.state_dict() | {name: wrong})


def test_before_there_is_evidence_it_is_a_majority() -> None:
    rule, n = made(), 4000
    y = honest([0.4] * 5, n)
    out, plain = empty_decision(n, Coin(1)), empty_decision(n, Coin(1))
    rule.vote(out, votes_of(y), Coin(1))
    Majority(rule.layout).vote(plain, votes_of(y), Coin(1))
    assert torch.equal(out.signs, plain.signs)
    play(rule, honest([0.1, 0.4], n), 1)
    one, other = weights(rule, [0, 1]).tolist()
    assert one == other, "two cannot be told apart"


@pytest.mark.slow
def test_coin_flippers_never_make_a_dictator() -> None:
    rule, worst = made(2000), 0.0
    for t in range(1, 1001):
        play(rule, honest([0.5] * M, 2000), t)
        share = weights(rule, range(M)).double()
        worst = max(worst, float(share.max() / share.sum()))
    assert worst <= 0.15


# ---- who contradicts the others ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_inverters_have_no_vote(count: int) -> None:
    rule = made()
    for t in range(1, 15):
        y = honest(CLEAN, 4000)
        y[M - count :] *= -1
        play(rule, y, t)
    found = weights(rule, range(M))
    assert found[: M - count].min() > 0 == found[M - count :].max()


def test_inverters_are_found_in_noisy_signs() -> None:
    """What two workers have in common is too little for few rounds, and enough for many."""
    rule = made()
    found = []
    for t in range(1, 91):
        y = honest([0.43] * M, 4000)
        y[-6:] *= -1
        play(rule, y, t)
        found.append(weights(rule, range(M)))
        assert found[-1][:9].min() > 0
    assert found[10][9:].min() > 0, "it looks like chance"
    assert found[-1][9:].max() == 0


def test_workers_that_own_different_data_are_all_heard() -> None:
    """Five groups of three, each of one mind and against the others: nobody is hostile, all weigh the same."""
    c = torch.full((M, M), -0.1).double()
    for group in range(5):
        mine = slice(3 * group, 3 * group + 3)
        c[mine, mine] = 0.8
    c.fill_diagonal_(0)
    assert not hostile(c, SURE).any()
    assert len(set(sharing(c, torch.ones(M).double(), SURE).tolist())) == 1


def test_who_contradicts_some_only_is_heard() -> None:
    """It knows something rare: it disagrees with three of five, and the others agree with one another."""
    c = torch.full((M, M), 0.3).double()
    c[14] = torch.tensor([-0.2] * 8 + [0.2] * 7)
    c[:, 14] = c[14]
    c.fill_diagonal_(0)
    assert not hostile(c, SURE).any()
    c[14] = c[:, 14] = -0.2
    assert hostile(c, SURE).tolist() == [False] * 14 + [True]


def test_turncoats_do_not_rule_by_being_disbelieved() -> None:
    """Inverters that become honest: at no time is the opposite of their votes counted."""
    rule = made()
    for t in range(1, 80):
        y = honest(CLEAN, 4000)
        if t < 50:
            y[-6:] *= -1
        play(rule, y, t)
        assert weights(rule, range(M)).min() >= 0
    assert weights(rule, range(M)).min() > 0, "and in the end they are believed again"


def test_votes_that_were_not_cast_are_not_compared() -> None:
    rule, n = made(), 4000
    for t in range(1, 20):
        y = honest(CLEAN, n)
        y[-5:] *= -1
        play(rule, y * (torch.rand(M, n) < 0.7), t)
    found = weights(rule, range(M))
    assert found[:10].min() > 0 == found[10:].max()


def test_newcomers_and_those_who_return() -> None:
    rule, n = made(), 4000
    for t in range(1, 10):
        play(rule, honest(CLEAN, n), t)
    assert weights(rule, [3, 77, 78])[1:].min() > 0
    for t in range(10, 60):
        play(rule, honest(CLEAN[:14], n), t, range(14))
    assert weights(rule, range(M))[14] > 0, "what was known of a worker that was away is kept"
    assert rule.trust.strength([100]).tolist() == [1.0], "a newcomer has shown nothing"


# ---- who errs together ---------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 300), st.booleans(), st.booleans())
def test_contested_is_where_the_tally_is_small(
    seed: int, m: int, n: int, ternary: bool, is_masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (m, n), generator=generator) * 2 - 1
    if ternary:
        y = y * torch.randint(0, 2, (m, n), generator=generator)
    present = torch.rand(m, generator=generator) < 0.7
    votes = votes_of(y)
    voters = int(present.sum()) if is_masked else m
    if is_masked:
        votes = Votes(workers=votes.workers, planes=votes.planes, n=n, present=present)
        counted = y * present[:, None]
    else:
        counted = y
    small = counted.sum(0).abs() <= math.isqrt(voters)
    found = contested(votes).planes
    assert found.support is not None
    cast = (y != 0) if votes.planes.support is not None else torch.ones_like(y, dtype=torch.bool)
    assert torch.equal(found.support, pack(cast & small))


@pytest.mark.parametrize("count", [3, 5, 7])
def test_copies_of_random_bits_have_less_than_one_vote_together(count: int) -> None:
    rule, n = made(), 4000
    for t in range(1, 20):
        y = honest(CLEAN, n)
        y[M - count :] = honest([0.5], n)
        play(rule, y, t)
    assert votes_per_worker(rule)[M - count :].sum() < 1


@pytest.mark.parametrize("count", [3, 7])
def test_copies_of_an_honest_worker_share_its_vote(count: int) -> None:
    rule, n = made(), 4000
    for t in range(1, 20):
        y = honest(CLEAN, n)
        y[M - count :] = y[0]
        play(rule, y, t)
    found = weights(rule, range(M)).double()
    sharing_it = [0, *range(M - count, M)]
    assert found[sharing_it].sum() < 2 * found[1]


@pytest.mark.parametrize("p", [0.3, 0.4, 0.45, 0.48])
@pytest.mark.parametrize("flips", [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45])
@pytest.mark.parametrize("push", ["narrow", "random"])
def test_five_that_push_together_have_two_votes_at_most(push: str, flips: float, p: float) -> None:
    """However they hide: with the majority where it is clear, each with noise of its own."""
    rule, n, attackers = made(8000), 8000, 5
    for t in range(1, 25):
        y = honest([p] * 10, n)
        tally = y.sum(0)
        together = torch.where(tally.abs() <= attackers, -tally.sign(), tally.sign())
        together = torch.where(together == 0, 1, together)
        if push == "random":
            together = honest([0.5], n)[0]
        noisy = together * honest([flips] * attackers, n)
        play(rule, torch.cat([y, noisy]), t)
    common_push = (1 - 2 * flips) * votes_per_worker(rule)[10:].sum()
    assert common_push < 2.2


@pytest.mark.parametrize("total", [1.0, 2.2, 2.5, 4.0])
def test_five_that_share_out_their_noise_have_little_more_than_two_votes(total: float) -> None:
    """Who votes the other way is agreed on, so two of them agree by chance only: to sqrt(5) votes no pair shows it."""
    rule, n, attackers = made(2000), 2000, 5
    for t in range(1, 90):
        y = honest([0.4] * 10, n)
        tally = y.sum(0)
        against = ((attackers - total) / 2 + torch.rand(n)).floor() * (tally.abs() <= 7)
        turned = torch.rand(attackers, n).argsort(0).argsort(0) < against
        together = torch.where(tally <= 4, -1, 1)
        play(rule, torch.cat([y, torch.where(turned, -together, together)]), t)
    common_push = total * votes_per_worker(rule)[10:].mean()
    assert common_push < 2.3


@pytest.mark.parametrize("strength", [0.05, 0.2])
def test_sleepers_lose_power_within_25_rounds(strength: float) -> None:
    """Three strong workers of 15 vote against the majority of the others from round 100 on."""
    rule, wrong = made(), []
    p = [0.4] * 12 + [strength] * 3
    sizes = [4] * 12 + [304] * 3
    for t in range(1, 160):
        y = honest(p, 4000)
        if t >= 100:
            y[12:] = anti(y[:12])
        decision = play(rule, y, t, sizes=sizes)
        wrong.append((4000 - cpu_ones(decision)) / 4000)
    assert sum(wrong[50:99]) / 49 < 0.25
    assert wrong[99] > 0.5
    assert max(wrong[99 + 25 :]) < 0.3, "12 weak workers alone: 0.24"
    assert weights(rule, range(M), sizes)[12:].max() == 0


def cpu_ones(plane: Tensor) -> int:
    return sum((word & (2**64 - 1)).bit_count() for word in plane.tolist())


def test_few_workers_share_nothing() -> None:
    """Of three, two are always of one mind where it is contested."""
    c = torch.ones(ENOUGH - 1, ENOUGH - 1).double()
    few = torch.ones(ENOUGH - 1).double()
    assert sharing(c, few, few / 100).tolist() == [1.0] * (ENOUGH - 1)


# ---- what most have in common --------------------------------------------------------------------


@given(st.data())
def test_a_minority_does_not_move_what_most_have_in_common(data: st.DataObject) -> None:
    """Whatever a minority does, to whomever: it stays between what honest pairs have."""
    m = data.draw(st.integers(3, 12))
    attackers = data.draw(st.integers(0, (m - 1) // 2))
    number = st.floats(-1, 1)
    c = torch.tensor(data.draw(st.lists(number, min_size=m * m, max_size=m * m))).view(m, m).triu(1)
    honest_ones = m - attackers
    c = c + c.T
    among = c[:honest_ones, :honest_ones]
    pairs = among[~torch.eye(honest_ones, dtype=torch.bool)]
    _, most = usual(c)
    assert most >= pairs.min()
    low = torch.full((m, m), -1.0)
    low[:honest_ones, :honest_ones] = among
    assert usual(low)[1] <= pairs.max()


def test_settings_out_of_range() -> None:
    for options, text in (
        ({"largest": 0.5}, "largest is 0.5; it must be 1 or more votes"),
        ({"sample": 63}, "sample is 63; it must be 64 coordinates or more"),
        ({"secret": -1}, "secret is -1; it must lie in"),
        ({"memory": 0}, "forgetting is 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            made(**options)
    votes = Votes(workers=(1,), planes=Planes(torch.zeros(1, 2, dtype=torch.int64), None), n=64, first=8)
    with pytest.raises(ConfigError, match="votes begin at coordinate 8; it must be a multiple of 64"):
        made().vote(empty_decision(64, None), votes, None)
    count = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="did not count them"):
        made().learn(Evidence(workers=(1,), mismatches=count, cast=count))
