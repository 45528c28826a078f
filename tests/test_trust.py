"""Estimators recover known crossover probabilities, within the bound that statistics gives them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signvote import ConfigError, Layout, theory
from signvote.core.counters import CoordinateTrust
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.rules import Majority, Weighted
from signvote.core.trust import CountTrust, Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.kernels import Coin, Planes, cpu
from signvote.kernels.reference import pack
from tests import reference as obvious

CROSSOVER = [0.05, 0.2, 0.35, 0.45, 0.5, 0.7]


def sent(p: list[float] | Tensor, n: int) -> Tensor:
    """Signs of workers whose truth is +1 everywhere."""
    return 1 - 2 * (torch.rand(len(p), n) < torch.as_tensor(p)[:, None]).long()


def stacked(y: Tensor) -> Votes:
    partial = pack(y != 0) if bool((y == 0).any()) else None
    return Votes(
        workers=tuple(range(len(y))), planes=Planes(pack(y > 0), partial), n=y.shape[1],
        batch_sizes=(0,) * len(y),
    )  # fmt: skip


def counted(trust: CoordinateTrust, worker: int) -> Tensor:
    """p of one worker at every coordinate, as its counters say: halves of a mismatch / rounds."""
    state = trust.state_dict()
    slot = state["workers"].index(worker)
    halves = state["counters"][:, slot].reshape(-1)[: trust.n].double()
    p: Tensor = halves / (2 * state["rounds"][slot])
    return p


def against_the_truth(y: Tensor) -> Evidence:
    return Evidence(
        workers=tuple(range(len(y))),
        mismatches=(y < 0).sum(1, keepdim=True),
        cast=(y != 0).sum(1, keepdim=True),
    )


def test_pooled_counts_recover_p_within_four_sigma() -> None:
    n, rounds = 5000, 20
    trust = CountTrust(groups=1)
    for _ in range(rounds):
        trust.learn(against_the_truth(sent(CROSSOVER, n)))
    sigma = [math.sqrt(p * (1 - p) / (n * rounds)) for p in CROSSOVER]
    for found, p, s in zip(trust.crossover(range(6))[:, 0].tolist(), CROSSOVER, sigma, strict=True):
        assert abs(found - p) < 4 * s


def test_forgetting_follows_a_worker_that_changes() -> None:
    faithful, forgetful = CountTrust(1), CountTrust(1, forgetting=0.9)
    for p in [0.1] * 100 + [0.6] * 50:
        for trust in (faithful, forgetful):
            trust.learn(against_the_truth(sent([p], 1000)))
    assert forgetful.crossover([0]).item() == pytest.approx(0.6, abs=0.03)
    assert faithful.crossover([0]).item() == pytest.approx((100 * 0.1 + 50 * 0.6) / 150, abs=0.01)


def test_a_newcomer_is_believed_as_the_average_of_the_known() -> None:
    trust = CountTrust(groups=2)
    assert trust.crossover([4, 5]).tolist() == [[0.25, 0.25], [0.25, 0.25]]
    trust.learn(
        Evidence(
            workers=(1, 2), mismatches=torch.tensor([[10, 0], [30, 0]]), cast=torch.tensor([[100, 0]] * 2)
        )
    )
    assert trust.crossover([1, 2, 9]).tolist() == [[0.1, 0.25], [0.3, 0.25], [0.2, 0.25]]
    trust.forget(1)
    trust.forget(77)
    assert trust.crossover([1]).tolist() == [[0.3, 0.25]]


def test_the_optimistic_bias_of_judging_by_ones_own_decision() -> None:
    """What a plain majority's counts say of coin-flippers, against the closed form, within 4 sigma."""
    m, n = 15, 200_000
    votes = stacked(sent([0.5] * m, n))
    seen = Majority(Layout([("x", (n,))])).vote(empty_decision(n, None), votes, None)
    expected = 0.5 - math.comb(14, 7) / 2**15
    measured = (seen.mismatches / seen.cast)[:, 0]
    assert expected == pytest.approx(0.395, abs=1e-3)
    assert (measured - expected).abs().max() < 4 * math.sqrt(expected * (1 - expected) / n)


def test_pooled_settles_where_theory_says() -> None:
    p, n = [0.47] * 9 + [0.35] * 4 + [0.12] * 2, 20_000
    rule = Weighted(Layout([("x", (n,))]), forgetting=0.8)
    for round in range(60):
        rule.learn(rule.vote(empty_decision(n, Coin(round)), stacked(sent(p, n)), Coin(round)))
    settled = theory.settled_weights(p)
    expected = torch.tensor([theory.observed_crossover(p, settled, m) for m in range(15)])
    found = rule.trust.crossover(range(15))[:, 0]
    assert (found - expected).abs().max() < 0.005


def test_counts_per_coordinate_recover_p_within_five_sigma() -> None:
    """Strong helpers make the decision all but the truth; the watched workers are then judged fairly."""
    n, rounds = 300, 400
    rule = ItSignSGD(Layout([("x", (n,))]), warmup=rounds)
    p = [0.001] * 5 + [0.3, 0.45]
    for round in range(rounds):
        rule.learn(rule.vote(empty_decision(n, Coin(round)), stacked(sent(p, n)), Coin(round)))
    for worker in (5, 6):
        found = counted(rule.trust, worker)
        sigma = math.sqrt(p[worker] * (1 - p[worker]) / rounds)
        assert found.shape == (n,)
        assert (found - p[worker]).abs().max() < 5 * sigma
        assert abs(found.mean().item() - p[worker]) < 4 * sigma / n**0.5 + 1e-3


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
@pytest.mark.parametrize("symbol", [False, True])
def test_it_signsgd_is_equations_3_and_4_line_by_line(zeros: str, symbol: bool) -> None:
    """150 rounds against the textbook in Python lists: warm-up, then weights by counts so far."""
    m, n, warmup = 5, 40, 100
    rule = ItSignSGD(Layout([("x", (n,))]), warmup=warmup, zero_is_symbol=symbol)
    halves = [[0] * n for _ in range(m)]
    p = torch.rand(m, n) * 0.6
    for t in range(150):
        y = torch.where(torch.rand(m, n) < p, -1, 1)
        if zeros == "abstain":
            y *= torch.rand(m, n) < 0.8
        coin = Coin(t) if zeros == "coin" else None
        out = empty_decision(n, coin)
        rule.learn(rule.vote(out, stacked(y), coin))
        if t < warmup:  # w = 1
            decision = obvious.vote(y.tolist(), [1] * m, coin)[0]
            equal = [[2 * (a != d) if symbol or a * d else int(a != d)
                      for a, d in zip(row, decision, strict=True)] for row in y.tolist()]  # fmt: skip
            halves = [[h + e for h, e in zip(a, b, strict=True)] for a, b in zip(halves, equal, strict=True)]
        else:
            decision, halves = obvious.vote_by_coordinate(y.tolist(), halves, [t] * m, coin, symbol)
        assert obvious.signs_in(out, n) == decision, f"round {t}"
    assert [(counted(rule.trust, w) * 2 * 150).round().int().tolist() for w in range(m)] == halves


def test_a_missing_sign_counts_half_a_mismatch_or_is_a_symbol() -> None:
    y = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, -1, 1, 0]])
    for symbol, expected in ((False, [[0, 0, 0.5, 0], [0, 0, 0, 0], [0, 1, 0, 0]]),
                             (True, [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])):  # fmt: skip
        rule = ItSignSGD(Layout([("x", (4,))]), zero_is_symbol=symbol)
        rule.learn(rule.vote(empty_decision(4, None), stacked(y), None))
        assert [counted(rule.trust, w).tolist() for w in range(3)] == expected


def test_full_counters_are_halved_and_p_stays() -> None:
    trust = CoordinateTrust(3, warmup=0, max_llr=10)
    trust.admit([7])
    trust._rounds[7] = trust._seen[7] = trust.FULL - 1
    trust.counters[0, 0, :3] = torch.tensor([0, 2 * (trust.FULL - 1), trust.FULL - 1], dtype=torch.int32).to(
        torch.uint16
    )
    before = counted(trust, 7)
    trust.counters[0, 0, 1] = 2 * trust.FULL  # the round's own mismatch
    trust.learn(Evidence(workers=(7,), mismatches=torch.zeros(1, 1), cast=torch.zeros(1, 1)))
    assert trust._rounds[7] == trust.FULL // 2
    assert (counted(trust, 7) - before).abs().max() < 1e-4 + 1 / trust.FULL
    weights = trust.weights([7], 0, 1)
    assert weights.tables.shape[1] == 2 * int(weights.sizes[0]) + 1


def test_the_largest_counters_still_index_the_tables_in_16_bits() -> None:
    assert 2 * (2 * CoordinateTrust.FULL + 1) < 2**16
    trust = CoordinateTrust(64, warmup=0, max_llr=10)
    trust.admit([0])
    trust._rounds[0] = trust._seen[0] = CoordinateTrust.FULL - 1
    trust.counters.fill_(2 * (CoordinateTrust.FULL - 1))  # always wrong: weight -10
    out = Planes(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    positive = Planes(torch.full((1, 1), -1, dtype=torch.int64), None)
    cpu.vote_by_coordinate_(out, positive, trust.weights([0], 0, 1), None, 64)
    assert out.signs.item() == 0
    assert out.support is not None
    assert out.support.item() == -1
    assert (trust.counters.to(torch.int32) == 2 * CoordinateTrust.FULL).all()


def test_forgetting_per_coordinate_is_a_smaller_capacity() -> None:
    """A worker that turns is found out in the rounds that forgetting says, not in as many as it was good."""
    n = 500
    turned = {}
    for forgetting in (1.0, 0.98):
        rule = ItSignSGD(Layout([("x", (n,))]), forgetting=forgetting)
        for t in range(500):
            p = [0.02] * 6 + [0.02 if t < 300 else 0.9]
            rule.learn(rule.vote(empty_decision(n, Coin(t)), stacked(sent(p, n)), Coin(t)))
        turned[forgetting] = counted(rule.trust, 6).mean().item()
    assert rule.trust.capacity == 2 * round(math.log(0.5) / math.log(0.98)) == 68
    assert turned[0.98] > 0.8
    assert turned[1.0] < 0.5


def test_bad_settings() -> None:
    for forgetting in (0.0, 1.1, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"it must lie in \(0, 1\], 1 = remember all"):
            CountTrust(1, forgetting)
    with pytest.raises(ConfigError, match="warmup is -1; it must be 0 or more rounds"):
        CoordinateTrust(1, warmup=-1, max_llr=10)


def test_evidence_adds() -> None:
    pair = torch.ones(1, 1, dtype=torch.int64)
    plain = Evidence(workers=(1,), mismatches=pair, cast=2 * pair)
    paired = Evidence(workers=(1,), mismatches=pair, cast=pair, differ=pair, common=pair)
    for total in (plain + paired, paired + plain):
        assert (total.mismatches.item(), total.cast.item()) == (2, 3)
        assert total.differ is pair
    both = paired + paired
    assert both.common is not None
    assert both.common.item() == 2
    assert (plain + plain).differ is None


@pytest.mark.parametrize("paired", [False, True])
def test_evidence_arrives_without_workers_that_did_not_vote(paired: bool) -> None:
    counts = torch.arange(3)[:, None]
    pairs = torch.arange(9).view(1, 3, 3) if paired else None
    present = torch.tensor([True, False, True])
    seen = Evidence(
        workers=(4, 5, 6), mismatches=counts, cast=counts + 10, differ=pairs, common=pairs, present=present
    )
    found = seen.sent()()
    assert found.workers == (4, 6)
    assert found.mismatches.tolist() == [[0], [2]]
    assert found.cast.tolist() == [[10], [12]]
    assert found.present is None
    for counted_pairs in (found.differ, found.common):
        assert (counted_pairs is not None) == paired
        assert counted_pairs is None or counted_pairs.tolist() == [[[0, 2], [6, 8]]]
    whole = Evidence(workers=(4, 5, 6), mismatches=counts, cast=counts, present=torch.ones(3).bool())
    assert whole.sent()().workers == (4, 5, 6)


@settings(max_examples=12)
@given(st.sampled_from([0.5, 0.9, 0.98]), st.floats(0, 1), st.integers(1, 150))
def test_counters_never_leave_their_table(forgetting: float, p: float, rounds: int) -> None:
    """An always wrong worker keeps p = 1 and a weight of -10, however often its counters were halved."""
    n = 64
    rule = ItSignSGD(Layout([("x", (n,))]), warmup=0, forgetting=forgetting)
    for _ in range(rounds):
        y = torch.ones(5, n)
        y[4] = -1
        y[3] = torch.where(torch.rand(n) < p, -1, 1)
        rule.learn(rule.vote(empty_decision(n, None), stacked(y), None))
        assert (counted(rule.trust, 4) == 1).all()
        assert (counted(rule.trust, 3) <= 1).all()
        assert (rule.weights(Voters(workers=(4,))) == -10_240).all()


def test_counters_of_the_largest_capacity_never_leave_their_table() -> None:
    trust = CoordinateTrust(64, warmup=0, max_llr=10)
    trust.admit([0])
    for _ in range(3 * trust.FULL):
        trust.counters.view(torch.int16).add_(2)
        trust.learn(Evidence(workers=(0,), mismatches=torch.zeros(1, 1), cast=torch.zeros(1, 1)))
    assert (counted(trust, 0) == 1).all()


def test_a_newcomer_without_warmup_has_a_weight_of_one() -> None:
    rule = ItSignSGD(Layout([("x", (64,))]), warmup=0)
    assert (rule.weights(Voters(workers=(8,))) == 1024).all()


def test_a_round_cannot_be_counted_twice() -> None:
    rule = ItSignSGD(Layout([("x", (64,))]), warmup=0)
    votes = stacked(torch.ones(3, 64))
    evidence = rule.vote(empty_decision(64, None), votes, None)
    with pytest.raises(ConfigError, match="decided in this round; call `learn` before"):
        rule.vote(empty_decision(64, None), votes, None)
    rule.learn(evidence)
    rule.vote(empty_decision(64, None), votes, None)
