"""`robust` with many workers: each is compared with some witnesses, on some coordinates.

All laws here are of a rule with few witnesses, as one of 500 with few workers is what it was before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signvote import ConfigError, Layout, Server
from signvote.core import chunks, pairs, rules
from signvote.core.guard import Sample
from signvote.core.pairs import PairCounts, agreement, hostile, sharing, usual
from signvote.core.relay import Relay
from signvote.core.root import Root
from signvote.core.rules import Robust
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.core.witnesses import Witnesses, rows_of
from signvote.kernels import Coin, Planes
from signvote.kernels.reference import pack
from tests.populations import LAYOUT, ballot

FEW: dict[str, Any] = {"witnesses": 5, "sample": 192}


@pytest.fixture(autouse=True)
def coordinates_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On vectors as short as those here."""
    monkeypatch.setattr(rules, "LEAST", 64)
    torch.manual_seed(1)


def votes_of(y: Tensor, workers: Any = None, **more: Any) -> Votes:
    partial = pack(y != 0) if bool((y == 0).any()) else None
    ids = tuple(range(len(y)) if workers is None else workers)
    return Votes(workers=ids, planes=Planes(pack(y > 0), partial), n=y.shape[1], **more)


def play(rule: Robust, y: Tensor, round: int, workers: Any = None) -> None:
    out = empty_decision(y.shape[1], Coin(round))
    rule.learn(rule.vote(out, votes_of(y, workers), Coin(round)))


def weights(rule: Robust, workers: Any) -> list[int]:
    found: list[int] = rule.weights(Voters(workers=tuple(workers)))[:, 0].tolist()
    return found


# ---- who and where -------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 2**63), min_size=6, max_size=40), st.integers(0, 2**64 - 1), st.data())
def test_witnesses_stay_as_long_as_they_vote(ids: set[int], secret: int, data: st.DataObject) -> None:
    workers = tuple(sorted(ids))
    chooser = Witnesses(5, secret)
    chosen = chooser.of(workers)
    assert chosen is not None
    assert len(chosen) == 5
    assert list(chosen) == sorted(chosen)
    away = data.draw(st.sampled_from(workers))
    left = tuple(worker for worker in workers if worker != away)
    after = set(chooser.of(left) or left)
    assert after >= set(chosen) - {away}
    assert len(after - set(chosen)) == (away in chosen)


def test_who_they_are_is_a_secret() -> None:
    workers = tuple(range(1000))
    found = {Witnesses(5, secret).of(workers) for secret in range(50)}
    assert len(found) == 50


def test_at_least_five() -> None:
    with pytest.raises(ConfigError, match="witnesses is 4; it must be 5 workers or more"):
        Robust(LAYOUT, witnesses=4)


@settings(max_examples=30)
@given(st.integers(1, 2000), st.integers(64, 2000), st.integers(64, 1000), st.integers(1, 9))
def test_coordinates_of_many_are_some_of_those_of_few(n: int, size: int, fewer: int, words: int) -> None:
    """In chunks and at once: what is left of a sample is what is left of its parts."""
    sample = Sample(n, size, secret=3)
    y = torch.arange(n)[None].remainder(7).gt(3)
    whole = votes_of(torch.where(y, 1, -1))
    at_once = sample.thinned(sample.of(whole), fewer)
    parts = []
    for first in range(0, n, 64 * words):
        some = slice(first // 64, first // 64 + words)
        part = Votes(
            workers=(0,),
            planes=whole.planes.map(lambda plane: plane[:, some]),  # noqa: B023
            n=min(64 * words, n - first),
            first=first,
        )
        parts.append(sample.thinned(sample.of(part), fewer))
    assert sum(part.n for part in parts) == at_once.n <= sample.of(whole).n
    assert torch.equal(torch.cat([part.planes.signs for part in parts], 1), at_once.planes.signs)


# ---- one answer ----------------------------------------------------------------------------------


def in_a_tree(server: Server, t: int, sent: dict[int, bytes], relays: int) -> bytes:
    branches = [Relay(Server(LAYOUT, "robust", **FEW)).open(t) for _ in range(relays)]
    for worker, message in sent.items():
        branches[worker % relays].add(worker, message)
    root = Root(server, t)
    parts = root.weigh([branch.roll() for branch in branches])
    for branch, part in zip(branches, parts, strict=True):
        branch.weigh(part)
    verdict = root.decide([branch.partial() for branch in branches])
    assert verdict is not None
    for branch in branches:
        branch.decide(verdict)
    root.learn([branch.evidence() for branch in branches])
    return root.decision


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sets(st.integers(0, 14), min_size=1), min_size=2, max_size=4), st.integers(1, 4))
def test_at_once_in_chunks_streamed_and_in_a_tree(present: list[set[int]], relays: int) -> None:
    """Decisions and what is learned, with more and with fewer workers than witnesses."""
    servers = [Server(LAYOUT, "robust", **FEW) for _ in range(4)]
    at_once, chunked, streamed, root = servers
    for t, workers in enumerate(present, start=1):
        sent = {m: ballot("robust", "coin", m, t, 4 + m) for m in sorted(workers)}
        wanted = at_once.decide(t, sent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "STACK_BYTES", 8 * len(sent))
            patch.setattr(chunks, "SAMPLE_BYTES", 16 * len(sent))
            assert chunked.decide(t, sent) == wanted
        opened = streamed.open(t)
        for worker, message in sent.items():
            opened.add(worker, message)
        assert opened.close() == wanted
        assert in_a_tree(root, t, sent, relays) == wanted
    states = [str(server.state_dict()["rule"]) for server in servers]
    assert states == states[:1] * 4


@pytest.mark.parametrize("voters", [4, 5, 8])
def test_on_a_device_the_absent_are_no_witnesses(voters: int) -> None:
    """There it is known late who votes."""
    y = 2 * torch.randint(0, 2, (9, 200)) - 1
    here = torch.tensor([m < voters - 1 or m == 8 for m in range(9)])
    present, few = Robust(Layout([("x", (200,))]), **FEW), Robust(Layout([("x", (200,))]), **FEW)
    ids = [m for m in range(9) if here[m]]
    for t in range(1, 4):
        out = empty_decision(200, Coin(t))
        present.learn(present.vote(out, votes_of(y, present=here), Coin(t)).sent()())
        play(few, y[here], t, ids)
    assert str(present.state_dict()) == str(few.state_dict())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sets(st.integers(0, 12), min_size=6), min_size=1, max_size=6), st.integers(2, 30))
def test_state_is_bounded_and_a_resumed_rule_goes_on(present: list[set[int]], limit: int) -> None:
    rule, resumed = Robust(LAYOUT, **FEW), Robust(LAYOUT, **FEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "COLUMNS", limit)
        _come_and_go(rule, resumed, present, limit)


def _come_and_go(rule: Robust, resumed: Robust, present: list[set[int]], limit: int) -> None:
    for t, workers in enumerate(present):
        y = 2 * torch.randint(0, 2, (len(workers), LAYOUT.size)) - 1
        for each in (rule, resumed):
            play(each, y, t, sorted(workers))
        assert len(rule.trust.pairs.columns) <= max(limit, 5) * 11 // 10
        rule.forget(t)
        resumed.forget(t)
        again = Robust(LAYOUT, **FEW)
        again.load_state_dict(resumed.state_dict())
        resumed = again
    assert str(rule.state_dict()) == str(resumed.state_dict())


def test_a_pair_is_known_from_either_side() -> None:
    """A worker that becomes a witness has a column as far as its row goes."""
    known = PairCounts()

    def seen(workers: tuple[int, ...], witnesses: tuple[int, ...]) -> Evidence:
        shape = (1, len(workers), len(witnesses))
        counts = torch.tensor([[[10 * i + j for j in witnesses] for i in workers]])
        none = torch.zeros(len(workers), 1, dtype=torch.int64)
        common = torch.full(shape, 100)
        return Evidence(
            workers=workers, mismatches=none, cast=none, differ=counts, common=common, witnesses=witnesses
        )

    known.learn(seen((1, 2, 3, 4), (2, 4)))
    known.learn(seen((1, 2, 3), (3,)))
    differ = known.among((2, 4, 7), (3, 2))[0, 0, 0]
    assert differ.tolist() == [[32 + 23, 22], [34, 42], [0, 0]]


# ---- what is seen --------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.integers(6, 14), st.data())
def test_all_as_witnesses_is_all_pairs(m: int, data: st.DataObject) -> None:
    c = torch.randn(m, m).double() / 4
    c = (c + c.T).fill_diagonal_(0)
    sizes = torch.rand(m).double() * 3
    at = torch.tensor(data.draw(st.permutations(range(m))))
    chance = torch.rand(m).double() / 4
    assert torch.allclose(sharing(c[:, at], sizes, chance, at), sharing(c, sizes, chance))
    assert torch.equal(hostile(c[:, at], chance, at), hostile(c, chance))
    for one, other in zip(usual(c[:, at], at), usual(c), strict=True):
        assert torch.equal(one, other)
    rows = rows_of(range(m), at.tolist())
    assert torch.equal(agreement(c[:, at], 1 + c[:, at], rows), agreement(c, 1 + c)[:, at])


@settings(max_examples=30, deadline=None)
@given(st.integers(31, 60), st.data())
def test_inverters_have_no_vote_whoever_the_witnesses_are(m: int, data: st.DataObject) -> None:
    """Any minority, by all workers and not by the witnesses: if one honest witness is left, that is enough."""
    inverters = data.draw(st.sets(st.integers(0, m - 1), max_size=(m - 1) // 2 - 2))
    secret = data.draw(st.integers(0, 100))
    rule = Robust(Layout([("x", (1280,))]), witnesses=7, secret=secret)
    chosen = set(rule.witnesses.of(range(m)) or ())
    if chosen <= inverters:
        return
    for t in range(3):
        y = torch.where(torch.rand(m, 1280) < 0.25, -1, 1)
        y[sorted(inverters)] *= -1
        play(rule, y, t)
    found = weights(rule, range(m))
    assert [found[worker] for worker in sorted(inverters)] == [0] * len(inverters)
    assert min((w for worker, w in enumerate(found) if worker not in inverters), default=1) > 0


@pytest.mark.parametrize("flips", [0.0, 0.2])
def test_a_tenth_that_pushes_together_has_the_votes_of_few(flips: float) -> None:
    """100 workers, of whom 20 are witnesses and 10 push against the majority."""
    rule = Robust(Layout([("x", (20_000,))]), witnesses=20, secret=5)
    for t in range(10):
        y = torch.where(torch.rand(100, 20_000) < 0.47, -1, 1)
        push = torch.where(y[:90].sum(0) > 0, -1, 1)
        noise = torch.where(torch.rand(10, 20_000) < flips, -1, 1)
        y[90:] = push * noise
        play(rule, y, t)
    found = torch.tensor(weights(rule, range(100))).double()
    assert found[90:].sum() / found[:90].median() < 4
    assert found[:90].min() > 0.5 * found[:90].median()
