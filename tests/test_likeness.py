"""Votes that differ in the same way for 50 rounds are noticed; noise, attackers and unequal workers are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signvote import Layout, Server, StateError
from signvote.core.ballot import Ballot, parse
from signvote.core.bits import pack_signs
from signvote.core.likeness import (
    EVERY,
    LOOKS,
    MOST,
    WORDS,
    Likeness,
    Seen,
    signs_of_ballots,
    signs_of_votes,
)
from signvote.core.vote import Votes
from signvote.kernels import WORD
from signvote.sim import Config, train
from signvote.tasks import Task

LAYOUT = Layout([("w", (1100,))])
N = LAYOUT.size
ROUNDS = EVERY * LOOKS
NOTICE = (
    f"round {ROUNDS}: workers differed in the same way for 100 rounds, so each may have its own kind of data;"
    " if nobody attacks, try the rule 'mean'"
)


def drawn(seed: int, *shape: int) -> Tensor:
    """Random signs."""
    random = torch.Generator().manual_seed(seed)
    return 2 * torch.randint(0, 2, shape, generator=random, dtype=torch.int8) - 1


def votes_of(t: int, own: list[float], reliable: list[float]) -> Tensor:
    """Signs that have a share in what a worker always wants, one in what is right in this round, and noise."""
    workers = len(own)
    chance = torch.rand(2, workers, N, generator=torch.Generator().manual_seed(t))
    noise = drawn(1000 + t, workers, N)
    seen = torch.where(chance[0] < torch.tensor(reliable)[:, None], drawn(t, N), noise)
    return torch.where(chance[1] < torch.tensor(own)[:, None], drawn(0, workers, N), seen)


def ballots(t: int, signs: Tensor) -> dict[int, bytes]:
    """A ballot for each row."""
    rows = [
        Ballot.cast(LAYOUT, pack_signs(row.float(), None)[0], worker=m, round=t, run=0)
        for m, row in enumerate(signs)
    ]
    return {ballot.worker: ballot.to_bytes() for ballot in rows}


def unlike(server: Server) -> list[str]:
    return [notice for notice in server.watch.notices if "rule 'mean'" in notice]


def noticed(votes: Callable[[int], Tensor]) -> bool:
    """Whether it is noticed after the first looks, at votes of a look, from 1."""
    likeness = Likeness()
    for t in range(1, ROUNDS + 1):
        assert likeness.wants_signs == (t % EVERY == 0)
        signs = None
        if likeness.wants_signs:
            sent = ballots(t, votes(t // EVERY)).values()
            signs = signs_of_ballots([parse(message, layout=LAYOUT, run=0) for message in sent], N)
        found = likeness.observe(signs)
    return found


reliability = st.floats(0, 1)


@settings(max_examples=30)
@given(st.lists(reliability, min_size=3, max_size=12), st.data())
def test_noise_unequal_workers_and_less_than_half_that_always_say_the_same_are_not_noticed(
    reliable: list[float], data: st.DataObject
) -> None:
    workers = len(reliable)
    stubborn = data.draw(st.sets(st.integers(0, workers - 1), max_size=(workers - 1) // 2))
    own = [data.draw(st.floats(0.3, 1)) if m in stubborn else 0.0 for m in range(workers)]
    assert not noticed(lambda look: votes_of(look, own, reliable))


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 0.3), min_size=3, max_size=12))
def test_signs_that_are_old_are_not_noticed(renewed: list[float]) -> None:
    """Where no gradient comes, a momentum keeps its sign, and has another one after the next sample."""
    votes = [drawn(0, len(renewed), N)]
    for look in range(1, LOOKS + 1):
        fresh = torch.rand(len(renewed), N, generator=torch.Generator().manual_seed(look))
        votes.append(
            torch.where(fresh < torch.tensor(renewed)[:, None], drawn(look, len(renewed), N), votes[-1])
        )
    assert not noticed(lambda look: votes[look])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.4, 0.8), reliability), min_size=3, max_size=12))
def test_data_of_their_own_are_noticed(workers: list[tuple[float, float]]) -> None:
    own, reliable = zip(*workers, strict=True)
    assert noticed(lambda look: votes_of(look, list(own), list(reliable)))


@pytest.mark.parametrize("how", ["decide", "stream", "planes", "abstaining", "resumed"])
def test_every_way_of_a_round_says_it_once_in_round_100(how: str) -> None:
    """Worker 4 votes on half of the coordinates."""
    server = Server(LAYOUT, "weighted")
    said: list[str] = []
    for t in range(1, 2 * ROUNDS + 1):
        signs = votes_of(t if t % EVERY == 0 else 1, [0.7] * 5, [0.5] * 5)
        signs[4, ::2] = 0
        sent = ballots(t, signs)
        if how == "stream":
            opened = server.open(t)
            for worker, message in sent.items():
                opened.add(worker, message)
            opened.close()
        elif how in ("planes", "abstaining"):
            parsed = [parse(message, layout=LAYOUT, run=0) for message in sent.values()]
            stacked = Votes.stack(parsed, 0, N)
            if how == "abstaining":
                stacked = replace(stacked, present=torch.tensor([True, True, True, False, True]))
            server.decide_planes(t, stacked)
        else:
            server.decide(t, sent)
        if how == "resumed" and t == EVERY + 3:
            state, server = server.state_dict(), Server(LAYOUT, "weighted")
            server.load_state_dict(state)
        said += server.report.notices
    assert [notice for notice in said if "mean" in notice] == [NOTICE] == unlike(server)


def test_small_models_two_workers_and_more_than_a_hundred() -> None:
    assert signs_of_ballots([], 1000) == {}
    small = Layout([("w", (1000,))])
    one = Ballot.cast(small, pack_signs(drawn(1, 1000).float(), None)[0], worker=1, round=1, run=0)
    assert signs_of_ballots([one], 1000) == {}
    assert signs_of_votes(Votes.stack([one], 0, 1000))() == {}
    assert not noticed(lambda look: votes_of(look, [0.7] * 2, [0.5] * 2))
    likeness = Likeness()
    likeness.rounds = EVERY - 1
    likeness.observe(dict(enumerate(drawn(1, MOST + 5, WORDS * WORD))))
    assert len(likeness.state_dict()["workers"]) == MOST
    likeness.forget(3, 12345)
    assert len(likeness.state_dict()["workers"]) == MOST - 1


@pytest.mark.parametrize(
    "damage", [{"looks": [LOOKS + 1]}, {"votes": torch.zeros(1, 4, 3)}, {"workers": [0, 0]}]
)
def test_an_impossible_state_is_refused(damage: dict[str, Any]) -> None:
    likeness = Likeness()
    likeness.rounds = EVERY - 1
    likeness.observe({0: drawn(1, WORDS * WORD)})
    with pytest.raises(StateError):
        Likeness().load_state_dict(likeness.state_dict() | damage)


@pytest.mark.parametrize(("split", "told"), [("shared", 0), ("labels:2", 1)])
def test_a_run_says_it(split: str, told: int, digits: Task, tmp_path: Path) -> None:
    """Through what a user calls."""
    config = Config(
        task=digits.name,
        model="mlp",
        rule="majority",
        batch_sizes=(8,) * 5,
        rounds=ROUNDS,
        split=split,
        seed=1,
    )
    found = train(config, digits, tmp_path)
    assert len([notice for notice in found["notices"] if "rule 'mean'" in notice]) == told


def test_a_worker_is_looked_at_no_more_than_needed() -> None:
    votes = torch.ones(3, dtype=torch.int8)
    nothing = torch.zeros(3, dtype=torch.int8)
    seen = Seen(0, nothing.clone(), nothing.clone(), torch.zeros(2, 3, dtype=torch.int8))
    for _ in range(LOOKS + 2):
        seen.add(votes)
    assert seen.looks == LOOKS
    assert seen.halves.tolist() == [[LOOKS // 2] * 3] * 2
