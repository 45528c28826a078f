"""Scaled votes: the laws, through ballots."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote.core.ballot import limits_of, parse, scales_of
from signvote.core.bits import unpack_signs
from signvote.core.scales import mean_magnitudes, spread, values
from signvote.core.trust import total
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin, Planes
from tests.federation import (
    LAYOUT,
    SHAPES,
    Federation,
    M,
    N,
    decided,
    each_rule,
    powers_of_votes,
    put,
    q_of,
    rule_of,
    scaled,
    stacked_votes,
)

# ---- laws ----------------------------------------------------------------------------------------


def test_nothing_is_lost() -> None:
    """What was applied and what both sides kept is the mean of all changes: equal workers that are all counted."""
    there = Federation("majority")
    for _ in range(30):
        there.round()
        kept = rule_of(there.server).residual.values + there.residuals().mean(0)
        torch.testing.assert_close(-there.x + kept, there.changed.mean(0), atol=1e-5, rtol=0)
    assert there.x.abs().mean() > 0.9 * there.changed.mean(0).abs().mean()


@given(st.lists(st.tuples(st.sets(st.integers(0, M - 1)), st.sets(st.integers(0, M - 1))), max_size=6))
@settings(max_examples=15, deadline=None)
def test_what_was_not_counted_stays_with_its_worker(rounds: list[tuple[set[int], set[int]]]) -> None:
    """Whoever is absent or late: changes = what a worker's counted ballots carried + its residual."""
    there = Federation("majority")
    there.strength = torch.tensor([1.0, 1.0, 1.0, 1.0, 30.0])  # too loud to count in full
    carried = torch.zeros(M, N)
    for absent, late in rounds:
        ballots = there.ballots(tuple(absent))
        counted = {m: message for m, message in ballots.items() if m not in late}
        decision = there.server.decide(there.t, counted)
        for m, message in counted.items():
            ballot = parse(message, layout=LAYOUT, run=0)
            codes = scales_of(ballot).minimum(limits_of(parse(decision, layout=LAYOUT, run=0)))
            scale = spread(values(codes), LAYOUT, 0, N)
            carried[m] += scale * unpack_signs(ballot.planes(), N)
        for worker in there.workers:
            worker.apply(decision, 1.0)
        torch.testing.assert_close(carried + there.residuals(), there.changed, atol=1e-6, rtol=0)


@each_rule
def test_the_order_of_ballots_does_not_matter(rule: str) -> None:
    one, other = Federation(rule), Federation(rule)
    for _ in range(5):
        ballots = one.ballots()
        assert ballots == other.ballots()
        first = one.server.decide(one.t, ballots)
        again = other.server.decide(one.t, list(reversed(ballots.items())))
        assert first == again


@each_rule
def test_flipping_all_votes_flips_the_decision(rule: str) -> None:
    there = Federation(rule)
    stacked = stacked_votes(there)
    decision, evidence = decided(scaled(rule), stacked)
    signs = stacked.planes.signs
    ones = torch.full_like(signs, -1)
    ones[:, -1] = (1 << N % 64) - 1
    opposite = Votes(
        workers=stacked.workers,
        batch_sizes=stacked.batch_sizes,
        planes=Planes(signs ^ ones, None),
        n=N,
        claims=stacked.claims,
    )
    flipped, its_evidence = decided(scaled(rule), opposite)
    tied = q_of(stacked, rule) == 0
    assert torch.equal(unpack_signs(decision, N)[~tied], -unpack_signs(flipped, N)[~tied])
    assert evidence.magnitudes is not None
    assert its_evidence.magnitudes is not None
    assert torch.equal(evidence.magnitudes, its_evidence.magnitudes)


@each_rule
def test_the_decision_is_the_sign_and_mean_magnitude_of_the_weighted_mean(rule: str) -> None:
    for _ in range(3):
        votes = stacked_votes(Federation(rule))
        mean = q_of(votes, rule)
        chosen = scaled(rule)
        planes, evidence = decided(chosen, votes)
        sure = mean.abs() > 1e-9
        assert torch.equal(unpack_signs(planes, N)[sure], mean.sign()[sure].to(torch.int8))
        chosen.learn(evidence)
        found = values(chosen.decided)
        wanted = mean_magnitudes(mean, LAYOUT)
        assert ((found - wanted).abs() <= wanted / 8).all()
        scale = spread(found, LAYOUT, 0, N)
        left = mean - scale * unpack_signs(planes, N)
        torch.testing.assert_close(chosen.residual.values.double(), left, atol=1e-7, rtol=1e-5)


@each_rule
@pytest.mark.parametrize("cuts", [(0, 64, N), (0, 128, 192, N), (0, 0, 256, N)])
def test_servers_that_own_parts_decide_as_one(rule: str, cuts: tuple[int, ...]) -> None:
    there = Federation(rule)
    whole = scaled(rule)
    ranges = list(itertools.pairwise(cuts))
    parts = [scaled(rule) for _ in ranges]
    for part, span in zip(parts, ranges, strict=True):
        part.own([span])
    for _ in range(4):
        ballots = [parse(message, layout=LAYOUT, run=0) for message in there.ballots().values()]
        planes, evidence = decided(whole, Votes.stack(ballots, 0, N))
        found = []
        for part, (start, stop) in zip(parts, ranges, strict=True):
            out = empty_decision(stop - start, Coin(1))
            votes = Votes.stack(ballots, start, stop - start)
            found.append(part.vote(out, votes, Coin(1).after(start)))
            assert torch.equal(out.signs, planes.signs[start // 64 : start // 64 + len(out.signs)])
        added = total(found)
        if rule != "robust":  # whose sample is not of whole tensors
            assert torch.equal(added.mismatches, evidence.mismatches)
        whole.learn(evidence)
        for part in parts:
            part.learn(added)
            assert torch.equal(part.decided, whole.decided)
        joined = torch.cat([part.residual.values for part in parts])
        assert torch.equal(joined, whole.residual.values)


@given(
    st.lists(st.integers(-128, 127), min_size=2, max_size=6),
    st.lists(st.integers(1, 10_240), min_size=7, max_size=7),
)
@settings(max_examples=200, deadline=None)
def test_less_than_a_third_of_the_weight_never_outvotes_the_rest(
    codes: list[int], weights: list[int]
) -> None:
    """Whatever scales the attackers claim; the others have one scale and agree."""
    others = 7 - len(codes)
    sizes = torch.tensor(weights)
    strength = int(sizes[others:].sum())
    if others < 1 or 3 * strength >= int(sizes.sum()):
        return
    claimed = torch.tensor([0] * others + codes, dtype=torch.int8)[:, None]
    power = powers_of_votes(claimed, sizes[:, None]).weights[:, 0].long()
    assert power[:others].sum() > power[others:].sum()


def test_trust_is_learned_from_scaled_votes() -> None:
    """A worker whose votes are noise loses weight; nobody declares a size."""
    there = Federation()
    for worker in there.workers:
        worker.batch_size = 0
    for _ in range(20):
        ballots = there.ballots(absent=(4,))
        put(there.params[4], torch.randn(N, generator=there.random) * 1e-3)
        ballots[4] = there.workers[4].ballot(there.t)
        there.server.decide(there.t, ballots)
    voters = stacked_votes(there)
    weights = rule_of(there.server).weights(Votes(workers=voters.workers, planes=voters.planes, n=N))
    assert weights[4] * 4 <= weights[:4].min()


def test_evidence_is_about_the_votes_of_the_round() -> None:
    """Mismatches with the sign of the weighted sum, whatever earlier rounds have left."""
    votes = stacked_votes(Federation())
    chosen = scaled()
    chosen.residual.values += 100.0
    planes, evidence = decided(chosen, votes)
    assert bool((unpack_signs(planes, N) == 1).all())
    mean = q_of(votes, "weighted")
    sure = mean.abs() > 1e-9
    differs = (unpack_signs(votes.planes, N) != mean.sign())[:, sure].sum(1)
    assert torch.equal(evidence.mismatches[:, 0], differs)
    assert (evidence.cast == int(sure.sum())).all()


def test_a_rule_may_count_by_tensor() -> None:
    votes = stacked_votes(Federation())
    _, pooled = decided(scaled(), votes)
    _, by_tensor = decided(scaled(per="tensor"), votes)
    assert by_tensor.mismatches.shape == (M, len(SHAPES))
    assert torch.equal(by_tensor.mismatches.sum(1, keepdim=True), pooled.mismatches)
