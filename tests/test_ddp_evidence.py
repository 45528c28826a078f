"""Evidence travels in few bytes and arrives as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from signvote import Evidence, Layout, Votes
from signvote.core.layout import trainable
from signvote.core.rule import Rule
from signvote.core.rules import Majority, make_rule
from signvote.core.vote import empty_decision
from signvote.engines.ddp import VoteState, vote_gradients
from signvote.engines.ddp.evidence import Packings, in_a_row, with_counts
from signvote.engines.ddp.shares import Shares
from signvote.kernels import Coin, Planes, words_for
from tests.ranks import alone

__all__ = ["alone"]  # a fixture

RULES: list[tuple[str, dict[str, Any]]] = [
    ("majority", {}),
    ("it-signsgd", {}),
    ("weighted", {}),
    ("weighted", {"per": "tensor"}),
    ("robust", {"sample": 128}),
    ("robust", {"sample": 10**6}),
    ("robust", {"sample": 128, "witnesses": 5}),
]


def votes_of(workers: int, n: int, first: int, random: torch.Generator, dense: bool) -> Votes:
    """Random votes, half of them missing unless all are dense."""
    bits = torch.randint(-(2**63), 2**63 - 1, (2, workers, words_for(n)), generator=random)
    ends = n % 64
    if ends:
        bits[:, :, -1] &= (1 << ends) - 1
    signs, support = bits
    planes = Planes(signs, None) if dense else Planes(signs & support, support)
    return Votes(workers=tuple(range(workers)), planes=planes, n=n, first=first)


def counted(rule: Rule, shares: Shares, rank: int, workers: int, dense: bool) -> Evidence:
    """What one rank counts on its pieces."""
    random = torch.Generator().manual_seed(rank)
    total: Evidence | None = None
    coin = Coin(7) if dense else None
    for number in range(shares.chunks):
        first, n = shares.piece(number, rank)
        votes = votes_of(workers, n, first, random, dense)
        decision = empty_decision(n, coin)
        seen = rule.vote(decision, votes, coin)
        total = seen if total is None else total + seen
    assert total is not None
    return total


def counts_of(evidence: Evidence) -> list[Tensor]:
    fields = (evidence.mismatches, evidence.cast, evidence.differ, evidence.common)
    return [field for field in fields if field is not None]


@given(
    which=st.sampled_from(RULES),
    shapes=st.lists(st.integers(0, 700), min_size=1, max_size=6).filter(any),
    world=st.integers(1, 5),
    absent=st.integers(0, 4),
    chunk=st.integers(64, 900),
    dense=st.booleans(),
)
def test_the_sum_of_what_all_ranks_count_arrives_exactly(
    which: tuple[str, dict[str, Any]], shapes: list[int], world: int, absent: int, chunk: int, dense: bool
) -> None:
    """For every rule, layout, number of ranks and voters; with votes on all coordinates and on some."""
    name, options = which
    layout = Layout([(str(i), (n,)) for i, n in enumerate(shapes)])
    shares = Shares.of(layout.size, world, chunk)
    workers = max(1, world - absent)
    rules = [make_rule(name, layout, **options) for _ in range(world)]
    for rank, rule in enumerate(rules):
        rule.own(shares.owned(rank))
    evidence = [counted(rule, shares, rank, workers, dense) for rank, rule in enumerate(rules)]
    groups = getattr(rules[0], "groups", [(0, layout.size)])
    packings = Packings(groups, [shares.owned(rank) for rank in range(world)], dense=dense)
    packing = packings.of(evidence[0])
    assert all(packings.of(each) is packing for each in evidence)
    messages = torch.stack([packing.pack(in_a_row(each), rank) for rank, each in enumerate(evidence)])
    total = packing.total(messages)
    assert total is not None
    wanted = evidence[0]
    for each in evidence[1:]:
        wanted = wanted + each
    found = with_counts(evidence[0], total)
    assert len(counts_of(found)) == len(counts_of(wanted))
    for mine, its in zip(counts_of(found), counts_of(wanted), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(("field", "damage"), [("mismatches", 10**6), ("mismatches", -300), ("cast", -1)])
def test_counts_that_do_not_fit_are_said_not_to_fit(field: str, damage: int) -> None:
    """A rule of somebody's own may count something else: then the counts travel whole."""
    layout = Layout([("w", (300,))])
    shares = Shares.of(300, 2, 300)
    packings = Packings([(0, 300)], [shares.owned(rank) for rank in range(2)], dense=True)
    rule = make_rule("weighted", layout)
    mine, other = (counted(rule, shares, rank, 2, True) for rank in range(2))
    packing = packings.of(mine)
    odd = {field: getattr(other, field) + damage * torch.tensor([[0], [1]])}
    for theirs, fits in ((other, True), (replace(other, **odd), False)):
        messages = torch.stack([packing.pack(in_a_row(mine), 0), packing.pack(in_a_row(theirs), 1)])
        assert (packing.total(messages) is not None) == fits


def test_the_size_of_a_message() -> None:
    """8 ranks, 52 tensors: 8 mismatches and a number for all, of 2 bytes at most, in 9 groups at most."""
    shapes = [(60, 60), (60,)] * 26
    layout = Layout([(str(i), shape) for i, shape in enumerate(shapes)])
    shares = Shares.of(layout.size, 8, 2**21)
    rule = make_rule("weighted", layout, per="tensor")
    evidence = counted(rule, shares, 0, 8, True)
    whole = in_a_row(evidence).nbytes
    owned = [shares.owned(rank) for rank in range(8)]
    packed = 8 * Packings(rule.groups, owned, dense=True).of(evidence).words
    touched = math.ceil(52 / 8) + 2
    assert whole == 8 * 52 * 2 * 8
    assert packed <= 8 + touched * 2 * (8 + 1)


class Thousandfold(Majority):
    """Counts every mismatch a thousand times, which no count of coordinates does."""

    name = "thousandfold"

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        evidence = super().vote(out, votes, coin)
        return replace(evidence, mismatches=1000 * evidence.mismatches + 700)


@pytest.mark.usefixtures("alone")
def test_a_rule_that_counts_something_else_learns_from_its_own_counts() -> None:
    model = nn.Linear(9, 8)
    state = VoteState(model, Thousandfold(Layout.of(trainable(model))))
    model(torch.ones(1, 9)).sum().backward()
    vote_gradients(state)
    assert state.report.disagreement == {0: pytest.approx(700 / state.layout.size)}
