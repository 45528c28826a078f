"""The formulas of docs/scale.md are what the code sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import Layout, Server, Worker
from signvote.core.messages import Weights
from signvote.core.relay import Branch, Relay
from signvote.core.root import Root
from tests import scale
from tests.scale import Traffic

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
MEASURED = PAGE.parent.parent / "benchmarks" / "scale"
Shape = tuple[int, ...]


class Machine:
    """A relay of a uniform tree, and the bytes through it, by level of the tree."""

    def __init__(
        self, layout: Layout, rule: str, shape: Shape, level: int, found: dict[int, Traffic]
    ) -> None:
        self.branch: Branch = Relay(Server(layout, rule)).open(1)
        self.below: list[Machine] = []
        self.ballots: dict[int, bytes] = {}
        self.level = level
        self.found = found
        if level + 1 < len(shape):
            self.below = [Machine(layout, rule, shape, level + 1, found) for _ in range(shape[level])]

    def count(self, *, received: int = 0, sent: int = 0, levels_up: int = 0) -> None:
        """Note bytes through this machine, or the one above it."""
        level = self.level - levels_up
        before = self.found.get(level, Traffic(0, 0))
        self.found[level] = Traffic(before.received + received, before.sent + sent)

    def up(self, message: bytes) -> bytes:
        """Note a message to the server above."""
        self.count(sent=len(message))
        self.count(received=len(message), levels_up=1)
        return message

    def down(self, message: bytes) -> bytes:
        """Note a message from the server above."""
        self.count(received=len(message))
        self.count(sent=len(message), levels_up=1)
        return message

    def roll(self) -> bytes:
        for worker, ballot in self.ballots.items():
            self.count(received=len(ballot))
            self.branch.add(worker, ballot)
        return self.up(self.branch.roll([each.roll() for each in self.below]))

    def partial(self, weights: bytes) -> bytes:
        parts = self.branch.weigh(self.down(weights))
        pairs = zip(self.below, parts, strict=True)
        return self.up(self.branch.partial([each.partial(part) for each, part in pairs]))

    def evidence(self, verdict: bytes) -> bytes:
        decision = self.branch.decide(self.down(verdict))
        self.count(sent=len(decision) * len(self.ballots))
        return self.up(self.branch.evidence([each.evidence(verdict) for each in self.below]))

    def last(self) -> list[Machine]:
        return [found for each in self.below for found in each.last()] or [self]


def layout_of(n: int) -> Layout:
    return Layout([("w", (n,))])


def ballots(n: int, workers: int, sizes: list[int]) -> dict[int, bytes]:
    found = {}
    for m in range(workers):
        parameters = {"w": torch.zeros(n)}
        parameters["w"].grad = torch.randn(n, generator=torch.Generator().manual_seed(m))
        found[m] = Worker(parameters, m, batch_size=sizes[m % len(sizes)]).ballot(1)
    return found


def sent_in_a_tree(
    n: int, rule: str, shape: Shape, sizes: list[int]
) -> tuple[list[Traffic], bytes, list[int]]:
    """The bytes through each level together, the decision, and the weights."""
    found: dict[int, Traffic] = {}
    tops = [Machine(layout_of(n), rule, shape, 1, found) for _ in range(shape[0])]
    last = [machine for top in tops for machine in top.last()]
    for worker, ballot in ballots(n, len(last) * shape[-1], sizes).items():
        last[worker // shape[-1]].ballots[worker] = ballot
    root = Root(Server(layout_of(n), rule), 1)
    weights = root.weigh([top.roll() for top in tops])
    verdict = root.decide([top.partial(part) for top, part in zip(tops, weights, strict=True)])
    assert verdict is not None
    root.learn([top.evidence(verdict) for top in tops])
    read = [Weights.from_bytes(part, root._topic, 1) for part in weights]
    known = [int(weight) for part in read if part.weights is not None for weight in part.weights[:, 0]]
    return [found[level] for level in range(len(shape))], root.decision, known


odd = st.integers(0, 3).map(lambda k: 2 * k + 1)  # so that no vote of equal weights is tied
shapes = st.lists(odd, min_size=2, max_size=3).map(tuple)


@settings(max_examples=30)
@given(st.integers(1, 300), shapes)
def test_bytes_through_every_machine_of_a_tree(n: int, shape: Any) -> None:
    totals, decision, _ = sent_in_a_tree(n, "majority", shape, [8])
    assert len(decision) == scale.ballot(n)
    machines = 1
    for level, (total, each) in enumerate(zip(totals, scale.tree(n, shape), strict=True)):
        assert total == Traffic(machines * each.received, machines * each.sent), level
        machines *= shape[level]


@settings(max_examples=30)
@given(st.integers(1, 300), st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(1, 12))
def test_planes_of_a_tally_of_any_weights(n: int, sizes: list[int], workers: int) -> None:
    totals, _, weights = sent_in_a_tree(n, "weighted", (1, workers), sizes)
    digits = scale.planes(weights)
    up = scale.roll(workers) + scale.partial(workers, n, digits) + scale.evidence(workers)
    assert totals[0].received == up
    assert scale.verdict(n) <= totals[0].sent - scale.weights(workers) <= 3 * scale.verdict(n)


def test_the_tables_of_the_page_are_computed_so() -> None:
    text = PAGE.read_text()
    found = [json.loads((MEASURED / name).read_text()) for name in ("sizes.json", "predicted.json")]
    for rows in [*scale.tables(), *map(scale.measurements, found)]:
        assert "\n".join(rows) in text, "\n".join(rows)
