"""Many workers, and workers that come and go: nothing grows without a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from signvote import ConfigError, Server
from signvote.core.pairs import PairCounts, agreement
from signvote.core.rules import RULES, Weighted
from signvote.core.trust import CountTrust, Evidence
from signvote.core.vote import Voters
from tests.test_rules import LAYOUT, ballots, message, signs

LEARNING = ("it-signsgd", "weighted", "robust")


@pytest.mark.parametrize("rule", LEARNING)
def test_workers_not_seen_for_longest_are_forgotten(rule: str) -> None:
    server = Server(LAYOUT, rule, remember=5)
    y = signs(1, ternary=False)
    for t in range(1, 12):
        server.decide(t, {m: message(y[m % 7], m, t) for m in (0, 10 * t, 10 * t + 1)})
        trust = server.rule.trust
        assert trust is not None
        expected = {0, *(10 * s + i for s in range(max(1, t - 1), t + 1) for i in (0, 1))}
        assert set(trust.workers) == expected
    resumed = Server(LAYOUT, rule, remember=5)
    resumed.load_state_dict(server.state_dict())
    for each in (server, resumed):
        each.decide(12, {m: message(y[m % 7], m, 12) for m in (100, 120, 121)})
    assert str(resumed.state_dict()) == str(server.state_dict())


def test_the_voters_of_a_round_are_never_forgotten() -> None:
    server = Server(LAYOUT, "weighted", remember=1)
    y = signs(1, ternary=False)
    server.decide(1, {m: message(y[m], m, 1) for m in range(6)})
    assert server.rule.trust is not None
    assert server.rule.trust.workers == list(range(6))


def test_limits_must_be_positive() -> None:
    for name in ("remember", "min_voters"):
        with pytest.raises(ConfigError, match=f"{name} is 0; it must be 1 or more"):
            Server(LAYOUT, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_several_workers_are_forgotten_at_once(rule: str) -> None:
    one, many = Server(LAYOUT, rule), Server(LAYOUT, rule)
    for t in range(1, 5):
        y = signs(t, ternary=False)
        for server in (one, many):
            server.decide(t, {m: message(y[m], m, t) for m in range(7)})
    for worker in (5, 2, 77):
        one.forget(worker)
    many.forget(2, 5, 77)
    assert str(one.state_dict()) == str(many.state_dict())
    many.forget(*range(7))
    many.decide(9, {})


def test_weights_are_computed_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks there are; here one for each word."""
    monkeypatch.setattr("signvote.core.chunks.STACK_BYTES", 8)
    calls = []

    class Counting(Weighted):
        def weights(self, voters: Voters) -> Any:
            calls.append(voters.workers)
            return super().weights(voters)

    assert LAYOUT.size > 64
    server = Server(LAYOUT, Counting(LAYOUT))
    for t in range(1, 4):
        server.decide(t, ballots(signs(t, ternary=False), t))
        assert len(calls) == t


def test_a_long_absence_changes_no_trust() -> None:
    """Counts of a worker shrink in the rounds in which it votes: its p stays while it is away."""
    trust = CountTrust(1, forgetting=0.9)

    def seen(workers: tuple[int, ...], wrong: int) -> Evidence:
        shape = (len(workers), 1)
        return Evidence(
            workers=workers,
            mismatches=torch.full(shape, wrong),
            cast=torch.full(shape, 100),
        )

    trust.learn(seen((0, 1, 2), 5))
    for _ in range(10_000):
        trust.learn(seen((1, 2, 3), 20))
    assert trust.crossover([0]).item() == pytest.approx(0.05)
    assert trust.crossover([1]).item() == pytest.approx(0.2)


def test_pair_counts_of_nobody() -> None:
    pairs = PairCounts()
    pairs.forget(3)
    other = PairCounts()
    other.load_state_dict(pairs.state_dict())
    assert agreement(*other.counts).shape == (1, 1, 0, 0)
