"""The rule `robust`: whom it believes, whom it does not, and what a cap guarantees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import ConfigError, Layout
from signvote.core.guard import GuardedTrust, Sample
from signvote.core.pairs import copies, judge
from signvote.core.rules import Majority, Pooled, Robust
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.kernels import Coin, Planes, cpu
from signvote.kernels.reference import pack

M = 15
CLEAN = [0.3] * 5 + [0.4] * 5 + [0.45] * 5


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def honest(p: Any, n: int) -> Tensor:
    """Signs of workers with these crossovers where the truth is +1."""
    return torch.where(torch.rand(len(p), n) < torch.as_tensor(p)[:, None], -1, 1)


def votes_of(y: Tensor, workers: Any = None) -> Votes:
    partial = pack(y != 0) if bool((y == 0).any()) else None
    ids = tuple(range(len(y)) if workers is None else workers)
    return Votes(workers=ids, planes=Planes(pack(y > 0), partial), n=y.shape[1], batch_sizes=(0,) * len(y))


def play(rule: Any, y: Tensor, round: int, workers: Any = None) -> Tensor:
    """One round; the decision."""
    out = empty_decision(y.shape[1], Coin(round))
    rule.learn(rule.vote(out, votes_of(y, workers), Coin(round)))
    return out.signs


def weights(rule: Any, workers: Any) -> Tensor:
    found: Tensor = rule.weights(Voters(workers=tuple(workers)))[:, 0]
    return found


def anti(y: Tensor) -> Tensor:
    """-sign of the majority of these."""
    return torch.where(y.sum(0) > 0, -1, 1)


def made(n: int = 4000, **options: Any) -> Robust:
    return Robust(Layout([("x", (n,))]), **options)


# ---- laws ----------------------------------------------------------------------------------------


def test_where_everybody_may_be_believed_weights_are_pooleds() -> None:
    rule, pooled = made(cap=math.inf), Pooled(Layout([("x", (4000,))]), forgetting=0.98)
    for t in range(1, 20):
        y = honest(CLEAN, 4000)
        decisions = play(rule, y, t), play(pooled, y, t)
        assert t == 1 or torch.equal(weights(rule, range(M)), weights(pooled, range(M)))
        assert torch.equal(*decisions)
    assert weights(rule, range(M)).min() > 0


@pytest.mark.parametrize("hostile", ["none", "clones", "invert"])
def test_other_names_for_workers_change_nothing(hostile: str) -> None:
    one, other, n = made(), made(), 3000
    for t in range(1, 15):
        y = honest(CLEAN, n)
        if hostile == "clones":
            y[[1, 4, 7]] = honest([0.5], n)
        if hostile == "invert":
            y[:7] *= -1
        names = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:M]
        order = names.argsort()
        play(one, y, t)
        play(other, y[order], t, names[order].tolist())
        assert torch.equal(weights(one, range(M)), weights(other, names.tolist()))


def test_the_state_carries_the_verdict() -> None:
    rule = made(per="tensor")
    for t in range(1, 10):
        play(rule, torch.cat([honest(CLEAN[:9], 4000), -honest(CLEAN[:6], 4000)]), t)
    other = made(per="tensor")
    other.load_state_dict(rule.state_dict())
    assert torch.equal(weights(other, range(M)), weights(rule, range(M)))
    for worker in (14, 13, 99):
        rule.forget(worker)
    assert rule.trust.pairs.counts.shape == (2, 1, 13, 13)
    assert weights(rule, [14])[0] > 0, "as a newcomer"


# ---- who is believed -----------------------------------------------------------------------------


def test_before_there_is_evidence_it_is_a_majority() -> None:
    rule, n = made(), 4000
    assert weights(rule, range(4)).tolist() == [1024] * 4
    y = honest([0.1, 0.4], n)
    play(rule, y, 1)
    assert weights(rule, [0, 1]).tolist() == [1024] * 2, "two cannot be told apart"
    out, plain = empty_decision(n, Coin(1)), empty_decision(n, Coin(1))
    rule.vote(out, votes_of(honest([0.4] * 5, n)), Coin(1))
    torch.manual_seed(0)
    votes = votes_of(honest([0.4] * 5, n))
    rule.vote(out, votes, Coin(1))
    Majority(rule.layout).vote(plain, votes, Coin(1))
    assert torch.equal(out.signs, plain.signs)


@pytest.mark.slow
def test_coin_flippers_never_make_a_dictator() -> None:
    rule, worst = made(2000), 0.0
    for t in range(1, 3001):
        play(rule, honest([0.5] * M, 2000), t)
        share = weights(rule, range(M)).double().abs()
        worst = max(worst, float(share.max() / share.sum()))
    assert worst <= 0.15


@pytest.mark.parametrize("count", [1, 5, 7])
def test_inverters_have_no_positive_weight(count: int) -> None:
    rule = made()
    for t in range(1, 30):
        y = honest(CLEAN, 4000)
        y[M - count :] *= -1
        play(rule, y, t)
    found = weights(rule, range(M))
    assert found[: M - count].min() > 0 == found[M - count :].max()


def test_copies_of_random_bits_gain_nothing() -> None:
    rule = made()
    for t in range(1, 30):
        y = honest(CLEAN, 4000)
        y[-3:] = honest([0.5], 4000)
        play(rule, y, t)
        assert t < 2 or weights(rule, range(M))[-3:].max() == 0
    assert weights(rule, range(M))[:12].min() > 0


def test_copies_of_an_honest_worker_share_its_vote() -> None:
    rule, pooled = made(cap=math.inf), Pooled(Layout([("x", (4000,))]), forgetting=0.98)
    for t in range(1, 30):
        y = honest(CLEAN, 4000)
        y[-3:] = y[0]
        play(rule, y, t)
        play(pooled, y, t)
    found = weights(rule, range(M))
    four = found[[0, 12, 13, 14]]
    assert four.min() == four.max()
    unguarded = weights(pooled, range(M)).double()
    shares = [w[[0, 12, 13, 14]].sum() / w.sum() for w in (found.double(), unguarded)]
    assert shares[0] < shares[1] / 2


def test_strong_workers_are_no_copies_though_they_agree() -> None:
    """p = 0.05: any two agree on 90 % of the coordinates."""
    rule, pooled = made(cap=math.inf), Pooled(Layout([("x", (4000,))]), forgetting=0.98)
    for t in range(1, 15):
        y = honest([0.05] * 6 + [0.45] * 9, 4000)
        play(rule, y, t)
        play(pooled, y, t)
    assert torch.equal(weights(rule, range(M)), weights(pooled, range(M)))


@pytest.mark.parametrize("strength", [0.05, 0.2])
def test_sleepers_lose_power_within_25_rounds(strength: float) -> None:
    """Three strong workers of 15 vote against the majority of the others from round 100 on."""
    rule, wrong = made(cap=math.inf), []
    p = [0.45] * 12 + [strength] * 3
    for t in range(1, 160):
        y = honest(p, 4000)
        if t >= 100:
            y[12:] = anti(y[:12])
        decision = play(rule, y, t)
        wrong.append((y[0].numel() - cpu_ones(decision)) / 4000)
    assert sum(wrong[50:99]) / 49 < 0.25
    assert wrong[99] > 0.5
    assert max(wrong[99 + 25 :]) < 0.42, "12 weak workers alone: 0.37"
    assert weights(rule, range(M))[12:].max() == 0


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


def cpu_ones(plane: Tensor) -> int:
    return sum((word & (2**64 - 1)).bit_count() for word in plane.tolist())


def test_a_few_that_agree_with_each_other_only_do_not_take_over() -> None:
    """5 colluders send random bits that correlate by 0.36, more than any honest pair, less than copies."""
    rule, n = made(), 4000
    for t in range(1, 30):
        shared = honest([0.5], n)
        play(rule, torch.cat([honest([0.4] * 10, n), shared * honest([0.2] * 5, n)]), t)
        share = weights(rule, range(M)).double().abs()
        assert share[:10].sum() > share[10:].sum()


def test_a_tensor_in_which_a_worker_inverts_is_closed_to_it() -> None:
    layout = Layout([("a", (3000,)), ("small", (10,)), ("b", (2990,))])
    rule, whole = Robust(layout, per="tensor"), Robust(layout)
    for t in range(1, 20):
        y = honest(CLEAN, 6000)
        y[:3, 3010:] *= -1
        for one in (rule, whole):
            play(one, y, t)
    found = rule.weights(Voters(workers=tuple(range(M))))
    assert found.shape == (M, 3)
    assert (found[3:] > 0).all()
    assert found[:3, 2].max() == 0, "a strong worker, but not here"
    known = Robust(layout, per="tensor")
    known.load_state_dict(rule.state_dict())
    assert torch.equal(known.weights(Voters(workers=tuple(range(M)))), found)


def test_newcomers_and_those_who_return() -> None:
    rule, n = made(), 4000
    for t in range(1, 10):
        play(rule, honest(CLEAN, n), t)
    assert weights(rule, [3, 77, 78])[1:].min() > 0
    before = weights(rule, range(M))
    for t in range(10, 60):
        play(rule, honest(CLEAN[:14], n), t, range(14))
    assert weights(rule, range(M))[14] > 0, "what was known of a worker that was away is kept"
    assert before[14] > 0
    play(rule, honest([0.4] * 2, n), 60, [100, 101])
    assert weights(rule, [100, 101]).tolist() == weights(rule, [101, 100]).tolist()[::-1]


def test_votes_that_were_not_cast_are_not_compared() -> None:
    rule, n = made(), 4000
    for t in range(1, 20):
        y = honest(CLEAN, n)
        y[-5:] *= -1
        play(rule, y * (torch.rand(M, n) < 0.7), t)
    found = weights(rule, range(M))
    assert found[:10].min() > 0 == found[10:].max()


# ---- the verdict ---------------------------------------------------------------------------------


def pairs(c: Tensor, n: float = 1e6) -> tuple[Tensor, Tensor]:
    common = torch.full_like(c, n)[None]
    return (1 - c[None]) / 2 * common, common


def test_no_verdict_where_there_is_none() -> None:
    assert judge(*pairs(torch.ones(2, 2).double())) is None, "two workers"
    assert judge(*pairs(torch.eye(5).double())) is None, "no agreement"
    assert judge(*pairs(torch.full((5, 5), torch.nan).double())) is None
    few = torch.zeros(9, 9).double()
    few[:4, :4] = 0.3
    assert judge(*pairs(few)) is None, "four of nine agree, the others with nobody"
    never = torch.zeros(1, 5, 5).double()
    assert judge(never, never) is None
    assert GuardedTrust(1, 1.0, 1.0).verdict([1, 2]) is None


def test_a_worker_that_met_nobody_is_believable() -> None:
    differ, common = pairs(torch.full((6, 6), 0.2).double())
    for counts in (differ, common):
        counts[:, 5, :] = counts[:, :, 5] = 0
    verdict = judge(differ, common)
    assert verdict is not None
    assert verdict.believable.all()


def test_even_halves_are_oriented_by_strength() -> None:
    a = torch.tensor([0.6, 0.5, 0.4, -0.1, -0.1, -0.1]).double()
    verdict = judge(*pairs(torch.outer(a, a)))
    assert verdict is None, "half is no majority"
    a = torch.tensor([0.6, 0.5, 0.4, 0.3, -0.6, -0.6, -0.6]).double()
    verdict = judge(*pairs(torch.outer(a, a)))
    assert verdict is not None
    assert verdict.believable[:, 0].tolist() == [True] * 4 + [False] * 3


def test_who_is_a_copy() -> None:
    a = torch.tensor([0.9, 0.9, 0.8, 0.3, 0.3]).double()
    c = torch.outer(a, a).fill_diagonal_(0)
    assert copies(c).tolist() == [0, 1, 2, 3, 4]
    c[3, 4] = c[4, 3] = 0.9
    assert copies(c).tolist() == [0, 1, 2, 3, 3]
    assert copies(c[2:, 2:]).tolist() == [0, 1, 2], "three workers explain nothing"
    lonely = torch.zeros(4, 4).double()
    lonely[0, 1] = lonely[1, 0] = 0.8
    assert copies(lonely).tolist() == [0, 0, 2, 3], "nor do strangers, but identity speaks for itself"


# ---- the sample ----------------------------------------------------------------------------------


def test_a_sample_is_the_same_in_chunks_and_depends_on_the_secret() -> None:
    n = 64 * 300 + 17
    y = honest([0.3, 0.4, 0.5], n)
    groups = [(0, 5000), (5000, 5010), (5010, n)]

    def counted(secret: int, cuts: list[int], size: int = 3000) -> tuple[Tensor, Tensor]:
        sample = Sample(groups, size, secret)
        found = []
        for a, b in itertools.pairwise([*cuts, n]):
            piece = votes_of(y[:, a:b])
            found.append(sample.pairs(Votes(workers=(0, 1, 2), planes=piece.planes, n=b - a, first=a)))
        return sum(d for d, _ in found), sum(c for _, c in found)  # type: ignore[return-value]

    whole, other = counted(1, [0]), counted(2, [0])
    for cuts in ([0, 64], [0, 6400, 12_800], [0, 64 * 300]):
        assert all(torch.equal(a, b) for a, b in zip(counted(1, cuts), whole, strict=True))
    assert not torch.equal(whole[1], other[1])
    assert abs(whole[1].sum(0)[0, 0] - 3000) < 5 * 64 * math.sqrt(3000 / 64)
    every = counted(1, [0], n)
    differ, common = cpu.disagreements(votes_of(y).planes, n)
    assert torch.equal(every[0].sum(0), differ)
    assert torch.equal(every[1].sum(0), common)
    assert abs(int(every[1][0, 0, 0]) - 5000) < 64, "a word belongs to the tensor of its first coordinate"
    assert every[1][1].max() <= 64


def test_a_small_sample_still_finds_inverters() -> None:
    rule = made(64 * 500, sample=4000, secret=2**63)
    for t in range(1, 10):
        y = honest(CLEAN, 64 * 500)
        y[-6:] *= -1
        play(rule, y, t)
    found = weights(rule, range(M))
    assert found[:9].min() > 0 == found[9:].max()


def test_settings_out_of_range() -> None:
    for options, text in (
        ({"cap": 0.5}, "cap is 0.5; it must be 1 or more"),
        ({"sample": 63}, "sample is 63; it must be 64 coordinates or more"),
        ({"secret": -1}, "secret is -1; it must lie in"),
        ({"memory": 0}, "forgetting is 0"),
        ({"per": "layer"}, "per is 'layer'"),
    ):
        with pytest.raises(ConfigError, match=text):
            made(**options)
    votes = Votes(workers=(1,), planes=Planes(torch.zeros(1, 2, dtype=torch.int64), None), n=64, first=8)
    with pytest.raises(ConfigError, match="votes begin at coordinate 8; it must be a multiple of 64"):
        made().vote(empty_decision(64, None), votes, None)
    count = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="did not count them"):
        made().learn(Evidence(workers=(1,), mismatches=count, cast=count))
