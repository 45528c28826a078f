"""Few voters: two cannot be told apart, and a tie shows nothing about anybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from signvote import ConfigError, Layout, Server
from signvote.core import theory
from signvote.core.rules import make_rule
from signvote.core.vote import MOST, Voters, empty_decision, fit_tally
from signvote.kernels import Coin
from tests.test_robust import honest, votes_of

N = 4000
LAYOUT = Layout([("x", (N,))])


def play(rule: Any, y: Tensor, t: int) -> Any:
    """One round; the evidence."""
    evidence = rule.vote(empty_decision(N, Coin(t)), votes_of(y), Coin(t))
    rule.learn(evidence)
    return evidence


@pytest.mark.parametrize("seed", range(12))
def test_of_two_neither_is_a_dictator(seed: int) -> None:
    """Each is overruled where the coin is against it, the weak and the strong alike."""
    torch.manual_seed(seed)
    rule = make_rule("weighted", LAYOUT)
    for t in range(1, 20):
        y = honest([0.1, 0.45], N)
        play(rule, y, t)
        found = rule.weights(Voters(workers=(0, 1)))
        assert found[0] == found[1] > 0


def test_what_two_voters_do_teaches_nothing() -> None:
    rule = make_rule("weighted", LAYOUT)
    play(rule, honest([0.1, 0.45], N), 1)
    assert rule.trust is not None
    assert rule.trust.workers == []
    play(rule, honest([0.1, 0.3, 0.45], N), 2)
    assert rule.trust.workers == [0, 1, 2]


@given(st.lists(st.sampled_from([0.1, 0.4, 0.5]), min_size=1, max_size=6), st.booleans())
def test_ties_count_for_nobody(p: list[float], has_coin: bool) -> None:
    """Of a plain vote: the counts are those of the coordinates on which the votes do not cancel."""
    torch.manual_seed(len(p))
    y = honest(p, N)
    coin = Coin(7) if has_coin else None
    seen = make_rule("majority", LAYOUT).vote(empty_decision(N, coin), votes_of(y), coin)
    tally = y.sum(0)
    decided = tally != 0
    overruled = (y != tally.sign()) & decided
    assert seen.cast[:, 0].tolist() == [int(decided.sum())] * len(p)
    assert seen.mismatches[:, 0].tolist() == overruled.sum(1).tolist()


def test_equal_weights_of_few_noisy_workers_are_a_knifes_edge() -> None:
    """Theory says so, and so do votes: weights of log((1-p)/p) do not keep four equal workers equal."""
    p = [0.45] * 4
    even = theory.settled_weights(p, start=[1000] * 4)
    assert min(even) == max(even) > 0
    tilted = theory.settled_weights(p, start=[1010, 1000, 1000, 1000])
    assert max(tilted) > sum(tilted) - max(tilted), "a dictator"


def test_the_weights_of_very_many_workers_fit_a_tally() -> None:
    weights = torch.full((300_000, 1), 10_240, dtype=torch.int32)
    fitting = fit_tally(weights)
    assert fitting.long().sum() < 2**31
    assert set(fitting[:, 0].tolist()) == {5120}


def test_a_majority_of_very_many_workers() -> None:
    """At 300,000 workers of the largest weight a tally of 32 bits would wrap."""
    n = 64
    y = torch.full((300_000, n), -1, dtype=torch.int8)
    y[:150_001] = 1
    rule = make_rule("weighted", Layout([("x", (n,))]))
    out = empty_decision(n, Coin(1))
    rule.vote(out, votes_of(y), Coin(1))
    assert out.signs.tolist() == [-1], "all ones"


def test_a_server_of_two_workers_has_equal_weights() -> None:
    server = Server(LAYOUT)
    one, other = server.rule.weights(Voters(workers=(5, 9)))[:, 0].tolist()
    assert one == other > 0


def test_the_papers_rule_refuses_more_workers_than_a_tally_holds() -> None:
    rule = make_rule("it-signsgd", Layout([("x", (64,))]))
    y = torch.ones(MOST + 1, 64, dtype=torch.int8)
    with pytest.raises(ConfigError, match=f"{MOST + 1} workers; a tally holds the votes of {MOST}"):
        rule.vote(empty_decision(64, Coin(1)), votes_of(y), Coin(1))
