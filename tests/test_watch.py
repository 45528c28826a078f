"""What is noticed about workers: each thing once, after 50 rounds, and nothing in an ordinary run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import Layout, Server, StateError, checkpoint
from signvote.core import watch as watching
from signvote.core.ballot import Ballot, parse
from signvote.core.bits import pack_signs
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.core.watch import LONG, MOST, Watch
from tests.test_optimizer_lazy import are_equal

LAYOUT = Layout([("w", (64,)), ("b", (8,))])
N = LAYOUT.size


class Round(NamedTuple):
    """A round as somebody draws it."""

    workers: tuple[int, ...]
    sizes: tuple[int, ...]
    weights: tuple[int, ...]
    overruled: tuple[int, ...]  # of ten votes
    cast: tuple[int, ...]


def ballot(worker: int, round: int, signs: torch.Tensor, size: int = 0) -> bytes:
    planes, _ = pack_signs(signs.float(), None)
    return Ballot.cast(LAYOUT, planes, worker=worker, round=round, run=0, batch_size=size).to_bytes()


def decide(
    server: Server, round: int, signs: torch.Tensor, sizes: tuple[int, ...] | None = None
) -> list[str]:
    """Decide a round by these rows; what was noticed."""
    declared = sizes or (4,) * len(signs)
    sent = {m: ballot(m, round, row, declared[m]) for m, row in enumerate(signs)}
    server.decide(round, sent)
    return list(server.report.notices)


def noisy(round: int, workers: int = 15, wrong: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round)
    return 1 - 2 * (torch.rand(workers, N, generator=generator) < wrong).long()


# ---- laws ----------------------------------------------------------------------------------------------


@st.composite
def rounds_of(draw: st.DrawFn) -> list[Round]:
    def drawn() -> Round:
        workers = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
        sizes = tuple(draw(st.sampled_from([4, 4, 0])) for _ in workers)
        weights = tuple(draw(st.sampled_from([1, 4])) for _ in workers)
        cast = tuple(draw(st.sampled_from([0, 10, 10])) for _ in workers)
        overruled = tuple(min(all_, draw(st.sampled_from([0, 0, 4, 5, 9]))) for all_ in cast)
        return Round(workers, sizes, weights, overruled, cast)

    return [drawn() for _ in range(draw(st.integers(0, 25)))]


def told(rounds: list[Round], long: int) -> list[str]:
    """The slow and obvious way: look at everything before, in every round."""
    found: dict[tuple[str, int], str] = {}
    strongest: list[int | None] = []
    votes: dict[int, list[tuple[int, int]]] = {}
    for t, (workers, sizes, weights, overruled, cast) in enumerate(rounds, start=1):
        silent = [m for m, size in zip(workers, sizes, strict=True) if not size]
        if 0 < len(silent) < len(workers):
            names = f"worker{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            others = len(workers) - len(silent)
            text = f"{names} declared no batch size, but {others} other{'s' if others > 1 else ''} did"
            found.setdefault(("sizes", 0), f"round {t}: {text}")
        above = [m for m, w in zip(workers, weights, strict=True) if 2 * w > sum(weights)]
        strongest.append(above[0] if above and len(workers) > 1 else None)
        last = set(strongest[-long:])
        if len(strongest) >= long and len(last) == 1 and None not in last:
            text = f"worker {strongest[-1]} has had more weight than all others together for {long} rounds"
            found.setdefault(("dominance", strongest[-1] or 0), f"round {t}: {text}")
        if len(workers) < 3:
            continue
        for m, wrong, all_ in zip(workers, overruled, cast, strict=True):
            if not all_:
                continue
            votes.setdefault(m, []).append((wrong, all_))
            if len(votes[m]) % long:
                continue
            wrongs = sum(wrong for wrong, _ in votes[m][-long:])
            alls = sum(all_ for _, all_ in votes[m][-long:])
            if wrongs == 0:
                found.setdefault(("never", m), f"round {t}: worker {m} was never overruled in {long} rounds")
            elif wrongs / alls >= 0.5:
                text = (
                    f"worker {m} was overruled in {100 * wrongs / alls:.0f} % of its votes of {long} rounds"
                )
                found.setdefault(("half", m), f"round {t}: {text}")
    return list(found.values())


def observe(watch: Watch, t: int, seen: Round) -> list[str]:
    evidence = Evidence(
        workers=seen.workers,
        mismatches=torch.tensor(seen.overruled)[:, None],
        cast=torch.tensor(seen.cast)[:, None],
    )
    weights = torch.tensor(seen.weights, dtype=torch.float64)
    voters = Voters(workers=seen.workers, batch_sizes=seen.sizes)
    return watch.observe(t, voters, evidence, weights / weights.sum())


@given(rounds_of(), st.integers(0, 25))
def test_notices_are_those_of_the_obvious_way_also_after_a_checkpoint(rounds: list[Round], cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "LONG", 3)
        watch = Watch(1000)
        said: list[str] = []
        for t, seen in enumerate(rounds, start=1):
            if t == cut:
                state = watch.state_dict()
                watch = Watch(1000)
                watch.load_state_dict(state)
                assert are_equal(watch.state_dict(), state)
            said += observe(watch, t, seen)
        assert said == watch.notices == told(rounds, 3)


@given(st.integers(1, 9), st.integers(1, 4))
def test_equal_weights_are_never_dominance(workers: int, rounds: int) -> None:
    watch = Watch(1000)
    shares = torch.full((workers,), 1 / workers, dtype=torch.float64)
    voters = Voters(workers=tuple(range(workers)))
    counts = torch.ones(workers, 1, dtype=torch.int64)
    evidence = Evidence(workers=voters.workers, mismatches=counts, cast=3 * counts)
    for t in range(1, LONG * rounds):
        assert watch.observe(t, voters, evidence, shares) == []


def test_half_of_its_votes_is_enough_and_one_vote_less_is_not() -> None:
    watch = Watch(1000)
    for t in range(1, LONG + 1):
        observe(watch, t, Round((0, 1, 2), (4,) * 3, (1,) * 3, (5, 5 - (t == 7), t == 7), (10,) * 3))
    assert watch.notices == ["round 50: worker 0 was overruled in 50 % of its votes of 50 rounds"]


def test_workers_that_come_and_go_need_bounded_memory() -> None:
    watch = Watch(8)
    for t in range(1, 200):
        observe(watch, t, Round((t, t + 1, t + 2), (4,) * 3, (1,) * 3, (1,) * 3, (10,) * 3))
        assert len(watch.state_dict()["workers"]) <= 8
    watch.forget(200, 201, 12345)
    assert len(watch.state_dict()["workers"]) == 6


def test_notices_end_after_a_hundred() -> None:
    watch = Watch(1000)
    everybody = tuple(range(MOST + 20))
    count = len(everybody)
    for t in range(1, LONG + 1):
        seen = Round(everybody, (4,) * count, (1,) * count, (10,) * count, (10,) * count)
        observe(watch, t, seen)
    assert len(watch.notices) == MOST
    assert watch.notices[0] == "round 50: worker 0 was overruled in 100 % of its votes of 50 rounds"
    assert watch.notices[-1].endswith("; this is notice 100, and the last one")


# ---- through the server --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["majority", "it-signsgd", "robust"])
def test_an_ordinary_run_has_no_notice(rule: str) -> None:
    options: dict[str, Any] = {"warmup": 5} if rule == "it-signsgd" else {}
    server = Server(LAYOUT, rule, **options)
    for t in range(1, 2 * LONG + 2):
        assert decide(server, t, noisy(t)) == []


def test_sizes_that_some_declare_are_noticed_once() -> None:
    server = Server(LAYOUT, "majority")
    assert decide(server, 1, noisy(1, 4), (0, 0, 0, 0)) == []
    assert decide(server, 2, noisy(2, 4), (8, 8, 8, 8)) == []
    assert decide(server, 3, noisy(3, 4), (8, 0, 8, 0)) == [
        "round 3: workers 1, 3 declared no batch size, but 2 others did"
    ]
    assert decide(server, 4, noisy(4, 4), (8, 0, 8, 8)) == []
    assert server.watch.notices == ["round 3: workers 1, 3 declared no batch size, but 2 others did"]


@pytest.mark.parametrize("voters", [2, 4])
def test_a_worker_with_most_of_the_weight_is_noticed_in_its_50th_round(voters: int) -> None:
    """It is never overruled either. A round in which it has less starts the count anew."""
    server = Server(LAYOUT, "weighted")
    sizes = (100,) + (1,) * (voters - 1)
    said = []
    for t in range(1, 100):
        said += decide(server, t, noisy(t, voters), (1,) * voters if t == 20 else sizes)
    text = "round 70: worker 0 has had more weight than all others together for 50 rounds"
    assert said.count(text) == 1
    assert all("worker 0" in notice for notice in said)


def test_a_worker_alone_is_not_noticed_and_weights_per_coordinate_are_no_weights_per_worker() -> None:
    server = Server(LAYOUT, "weighted")
    said = [decide(server, t, noisy(t, 1), (100,)) for t in range(1, 60)]
    assert not any(said)
    paper = Server(LAYOUT, "it-signsgd", warmup=0)
    for t in range(1, 60):
        decide(paper, t, noisy(t, 4))
        assert paper.rule.shares(tuple(range(4))) is None


def test_a_tensor_counts_by_its_size() -> None:
    """Worker 0 decides the tensor of 64, worker 1 that of 8."""

    class Halves(type(Server(LAYOUT, "weighted").rule)):  # type: ignore[misc]
        def weights(self, voters: Voters) -> torch.Tensor:
            return torch.tensor([[90, 1], [1, 90], [1, 1]], dtype=torch.int32)

    server = Server(LAYOUT, Halves(LAYOUT, per="tensor"))
    said = []
    for t in range(1, 51):
        said += decide(server, t, noisy(t, 3))
    assert said == ["round 50: worker 0 has had more weight than all others together for 50 rounds"]


def test_workers_that_are_never_overruled_and_always() -> None:
    server = Server(LAYOUT, "majority")
    said = []
    for t in range(1, 2 * LONG + 1):
        signs = noisy(t, 5)
        signs[0] = signs[1] = signs[2] = 1
        signs[4] = -1
        said += decide(server, t, signs)
        assert (t == LONG) == bool(server.report.notices)
    assert said == [
        *(f"round 50: worker {m} was never overruled in 50 rounds" for m in range(3)),
        "round 50: worker 4 was overruled in 100 % of its votes of 50 rounds",
    ]


def test_two_voters_are_not_judged() -> None:
    server = Server(LAYOUT, "majority")
    for t in range(1, 60):
        assert decide(server, t, noisy(t, 2)) == []


def test_rounds_that_decide_nothing_are_counted_and_said_once() -> None:
    server = Server(LAYOUT, "majority", min_voters=3)
    assert decide(server, 1, noisy(1, 2)) == ["round 1: fewer than 3 voted, so no parameter moved"]
    assert decide(server, 2, noisy(2, 2)) == []
    assert decide(server, 3, noisy(3, 3)) == []
    assert server.watch.undecided == 2
    other = Server(LAYOUT, "majority", min_voters=3)
    other.load_state_dict(server.state_dict())
    assert other.watch.undecided == 2
    assert decide(other, 4, noisy(4, 2)) == []


@pytest.mark.parametrize("rule", ["weighted"])
def test_votes_on_a_device_are_noticed_like_ballots(rule: str) -> None:
    """Worker 3 abstains in the planes, and sends nothing in messages."""
    here = Server(LAYOUT, rule)
    there = Server(LAYOUT, rule)
    sizes = (400, 4, 0, 4)
    for t in range(1, 60):
        signs = noisy(t, 4)
        sent = {m: ballot(m, t, row, sizes[m]) for m, row in enumerate(signs)}
        parsed = [parse(message, layout=LAYOUT, run=0) for message in sent.values()]
        here.decide(t, {m: message for m, message in sent.items() if m < 3})
        present = torch.tensor([True, True, True, False])
        there.decide_planes(t, replace(Votes.stack(parsed, 0, N), present=present))
        assert t > 1 or not there.watch.notices  # nobody waits for the device: evidence comes later
    there.settle()
    assert here.watch.notices == there.watch.notices
    assert here.watch.notices[0] == "round 1: worker 2 declared no batch size, but 2 others did"


def test_a_round_that_was_weighed_elsewhere_says_nothing_of_weights() -> None:
    server = Server(LAYOUT, "weighted")
    counts = torch.ones(3, 1, dtype=torch.int64)
    for t in range(1, 60):
        evidence = Evidence(workers=(0, 1, 9), mismatches=counts, cast=3 * counts)
        if t % 2:
            votes = [parse(ballot(m, t, noisy(t, 2)[m]), layout=LAYOUT, run=0) for m in range(2)]
            stacked = Votes.stack(votes, 0, N)
            server.rule.vote(empty_decision(N, None), stacked, None)
        assert server.rule.shares((0, 1, 9)) is None
        server.learn(t, evidence, batch_sizes={0: 100, 1: 1, 9: 1})
        assert server.report.notices == ()


# ---- states --------------------------------------------------------------------------------------------


def test_a_server_resumes_its_watch(tmp_path: Path) -> None:
    whole = Server(LAYOUT, "weighted")
    first = Server(LAYOUT, "weighted")
    sizes = (10_000, 1, 1, 1)
    for t in range(1, 31):
        decide(whole, t, noisy(t, 4), sizes)
        decide(first, t, noisy(t, 4), sizes)
    checkpoint.save(tmp_path / "server", first.state_dict())
    rest = Server(LAYOUT, "weighted")
    rest.load_state_dict(checkpoint.load(tmp_path / "server"))
    for t in range(31, 120):
        assert decide(whole, t, noisy(t, 4), sizes) == decide(rest, t, noisy(t, 4), sizes)
    assert rest.watch.notices == whole.watch.notices
    assert rest.watch.notices


def test_a_state_of_before_the_watch_starts_anew() -> None:
    server = Server(LAYOUT, "majority")
    decide(server, 1, noisy(1, 4), (4, 0, 4, 4))
    state = server.state_dict()
    without_likeness = {**state["watch"]}
    del without_likeness["likeness"]
    other = Server(LAYOUT, "majority")
    other.load_state_dict(state | {"watch": without_likeness})
    assert other.watch.notices == server.watch.notices
    del state["watch"]
    other.load_state_dict(state)
    assert other.watch.notices == []


@pytest.mark.parametrize("counts", [[0, -1, 3], [0, 4, 3], [50, 0, 3], [-1, 0, 3]])
def test_an_impossible_watch_is_refused(counts: list[int]) -> None:
    server = Server(LAYOUT, "majority")
    decide(server, 1, noisy(1, 4))
    state = server.state_dict()
    state["watch"]["counts"][0] = counts
    with pytest.raises(StateError, match="the state's counts of overruled votes are impossible"):
        Server(LAYOUT, "majority").load_state_dict(state)
    del state["watch"]["counts"]
    with pytest.raises(StateError, match="not a state that a server wrote"):
        Server(LAYOUT, "majority").load_state_dict(state)
