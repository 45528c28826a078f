"""Populations to draw from: rules, rounds, and the ballots of whoever is there. For the laws of servers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from signvote import RULES, Ballot, Layout, Server
from signvote.core.bits import pack_signs
from signvote.core.encoder import Encoder
from tests.strategies import RULES_AND_ZEROS

LAYOUT = Layout([("a", (10, 13)), ("b", (70,)), ("c", (57,))])
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "majority": [{}],
    "it-signsgd": [{"warmup": 1}, {"warmup": 0, "zero_is_symbol": True, "forgetting": 0.5}],
    "weighted": [{}, {"sizes": False}, {"per": "tensor", "forgetting": 0.9}],
    "robust": [{"sample": 128}],
    "mean": [{}],
}


class Sent(NamedTuple):
    """A message, and who sends it."""

    worker: int
    message: bytes


class Population(NamedTuple):
    """A rule, and what arrives in each round, in order."""

    rule: str
    settings: dict[str, Any]
    rounds: list[list[Sent]]

    def server(self, **more: Any) -> Server:
        """A fresh server."""
        return Server(LAYOUT, self.rule, **self.settings, **more)


def ballot(rule: str, zeros: str, worker: int, round: int, size: int) -> bytes:
    """The votes of a worker, which errs the more often the larger its number is."""
    random = torch.Generator().manual_seed(1000 * round + worker)
    common = torch.Generator().manual_seed(round)
    y = torch.randn(LAYOUT.size, generator=common)
    y *= torch.where(torch.rand(LAYOUT.size, generator=random) < worker / 15, -1, 1)
    if zeros == "abstain" or worker % 3 == 1:
        y *= torch.rand(LAYOUT.size, generator=random) < (0.1 if worker % 4 == 2 else 0.8)
    corrects = RULES[rule].corrects
    planes, _ = pack_signs(y.sign() if not corrects else y.sign() + 0.5, None)
    claims = np.array([worker % 5, -worker, 3], np.int8) if corrects else None
    made = Ballot.cast(LAYOUT, planes, worker=worker, round=round, run=0, batch_size=size, claims=claims)
    return made.thinned().to_bytes()


@st.composite
def populations(draw: st.DrawFn, rules: list[str] | None = None) -> Population:
    """A few rounds of a few workers: some are away, some abstain, some send garbage or twice."""
    rule, zeros = draw(st.sampled_from([each for each in RULES_AND_ZEROS if not rules or each[0] in rules]))
    options = draw(st.sampled_from(OPTIONS[rule]))
    settings = {"zeros": zeros, "min_voters": draw(st.sampled_from([1, 3])), **options}
    sizes = draw(st.lists(st.sampled_from([4, 4, 16, 64, 900]), min_size=12, max_size=12))
    declares = draw(st.booleans())
    rounds = []
    for t in range(1, draw(st.integers(2, 4)) + 1):
        present = draw(st.lists(st.integers(0, 11), unique=True, max_size=12) | st.just(list(range(12))))
        sent = []
        for worker in present:
            made = ballot(rule, zeros, worker, t, sizes[worker] * declares)
            kind = draw(st.sampled_from(["votes"] * 12 + ["abstains", "garbage", "twice", "old"]))
            if kind == "abstains":
                made = Encoder(LAYOUT, worker).ballot(t, None)
            elif kind == "garbage":
                made = made[:-1]
            elif kind == "old":
                made = ballot(rule, zeros, worker, t - 1, 4)
            sent += [Sent(worker, made)] * (2 if kind == "twice" else 1)
        rounds.append(sent)
    return Population(rule, settings, rounds)
