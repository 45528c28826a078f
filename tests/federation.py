"""Workers around a server whose votes have scales, for the tests of scaled votes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import Layout, ScaledVotes, Server, Worker
from signvote.core.ballot import parse
from signvote.core.bits import unpack_signs
from signvote.core.powers import Powers
from signvote.core.rules import make_rule
from signvote.core.scaled import capped, loudest_of
from signvote.core.scales import spread, values
from signvote.core.trust import Evidence
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin, Planes

SHAPES: dict[str, tuple[int, ...]] = {"a": (10, 13), "none": (0,), "b": (70,), "c": (100,)}
LAYOUT = Layout(SHAPES.items())
N = LAYOUT.size
M = 5
RULES = ("majority", "weighted", "robust")
each_rule = pytest.mark.parametrize("rule", RULES)


def scaled(rule: str = "weighted", **options: Any) -> ScaledVotes:
    return ScaledVotes(make_rule(rule, LAYOUT, **options))


class Federation:
    """Workers whose changes differ in size and direction, around a server; by bytes."""

    def __init__(
        self, rule: str = "weighted", *, momentum: float = 0.0, server: Any = (), **options: Any
    ) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.drift = torch.randn(N, generator=self.random)
        self.params = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(M)]
        self.workers = [
            Worker(params, m, scales=True, batch_size=4 + 12 * (m == 0), outer_momentum=momentum)
            for m, params in enumerate(self.params)
        ]
        self.server = Server(LAYOUT, scaled(rule, **options), **dict(server))
        self.changed = torch.zeros(M, N)
        self.strength = torch.ones(M)
        self.t = 0

    def ballots(self, absent: tuple[int, ...] = ()) -> dict[int, bytes]:
        """Of the next round; each worker has changed its parameters a little."""
        self.t += 1
        found = {}
        for m, worker in enumerate(self.workers):
            noise = torch.randn(N, generator=self.random)
            if m not in absent:
                change = 1e-3 * self.strength[m] * (self.drift + (0.3 + 0.1 * m) * noise)
                self.changed[m] += change
                put(self.params[m], change)
                found[m] = worker.ballot(self.t)
        return found

    def round(self, absent: tuple[int, ...] = (), late: tuple[int, ...] = ()) -> bytes:
        """Late workers have voted, and are not counted."""
        ballots = self.ballots(absent)
        decision = self.server.decide(self.t, {m: b for m, b in ballots.items() if m not in late})
        for worker in self.workers:
            worker.apply(decision, 1.0)
        return decision

    @property
    def x(self) -> Tensor:
        found = [torch.cat([p.reshape(-1) for p in params.values()]) for params in self.params]
        assert all(torch.equal(one, found[0]) for one in found)
        return found[0]

    def residuals(self) -> Tensor:
        kept = [worker.encoder.memory.residual for worker in self.workers]
        return torch.stack([torch.zeros(N) if e is None else e for e in kept])


def put(params: dict[str, Tensor], change: Tensor) -> None:
    for segment in LAYOUT.segments:
        params[segment.name].grad = change[segment.start : segment.stop].view(segment.shape)


def rule_of(server: Server) -> ScaledVotes:
    assert isinstance(server.rule, ScaledVotes)
    return server.rule


def stacked_votes(there: Federation) -> Votes:
    ballots = [parse(message, layout=LAYOUT, run=0) for message in there.ballots().values()]
    return Votes.stack(ballots, 0, N)


def decided(rule: ScaledVotes, votes: Votes) -> tuple[Planes, Evidence]:
    out = empty_decision(N, Coin(1))
    return out, rule.vote(out, votes, Coin(1))


def q_of(votes: Votes, rule: str) -> Tensor:
    """The slow and obvious way, in float64."""
    weights = make_rule(rule, LAYOUT).weigh(votes).double()[:, 0]
    assert votes.claims is not None
    scale = values(votes.claims).double()
    middle = torch.stack([lower_median(scale[:, g], weights) for g in range(scale.shape[1])])
    scale = scale.minimum(2 * middle)
    signs = unpack_signs(votes.planes, N).double()
    by_coordinate = torch.stack([spread(row, LAYOUT, 0, N) for row in scale])
    return (weights[:, None] * by_coordinate * signs).sum(0) / weights.sum()


def lower_median(numbers: Tensor, weights: Tensor) -> Tensor:
    order = numbers.argsort()
    reached = weights[order].cumsum(0) * 2 >= weights.sum()
    return numbers[order][reached.int().argmax()]


def powers_of_votes(claimed: Tensor, weights: Tensor) -> Powers:
    return capped(claimed, weights, loudest_of(claimed, weights))
