from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from signvote import RULES, ConfigError, Layout, Server, StateError, Worker, checkpoint
from signvote.core.ballot import parse
from signvote.core.bits import coin_for, pack_signs, unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.header import HEADER, Kind
from signvote.core.rules import make_rule
from signvote.core.vote import Voters, Votes, empty_decision
from tests.test_rules import LAYOUT, ballots, decision_of, message, signs

SIGNED = [name for name, rule in RULES.items() if not rule.corrects]  # test_mean.py has the others


def test_one_bad_ballot_costs_one_vote_and_never_the_round() -> None:
    server, clean = Server(LAYOUT, "majority"), Server(LAYOUT, "majority")
    y = signs(5, ternary=False)
    good = ballots(y, 5)
    damaged = bytearray(good[2])
    damaged[70] ^= 1
    came = [
        (0, good[0]),
        (1, good[1]),
        (0, good[0]),  # twice
        (2, bytes(damaged)),
        (3, message(y[3], 3, 4)),  # late
        (4, message(y[4], 4, 6)),  # from the future
        (5, good[6]),  # in another's name
        (6, b"garbage"),
        (7, b""),
        (8, None),
    ]
    decision = server.decide(5, came)  # type: ignore[arg-type]
    assert decision == clean.decide(5, {0: good[0], 1: good[1]})
    assert server.report.round == 5
    assert server.report.voters == (0, 1)
    refused = [(r.worker, r.reason) for r in server.report.refused]
    assert refused == [
        (0, "duplicate"), (2, "checksum"), (3, "late"), (4, "future"), (5, "worker"),
        (6, "length"), (7, "length"), (8, "type"),
    ]  # fmt: skip
    assert server.report.refused[0].message == "worker 0 has already voted in round 5"
    server.decide(6, [(2, b"")])
    assert server.refusals[2, "checksum"] == server.refusals[2, "length"] == 1
    assert sum(server.refusals.values()) == 9


def test_a_refused_ballot_can_be_followed_by_a_good_one() -> None:
    server = Server(LAYOUT, "majority")
    good = message(signs(1, ternary=False)[0], 0, 1)
    server.decide(1, [(0, good[:-1]), (0, good)])
    assert server.report.voters == (0,)


def test_a_worker_that_abstains_is_reported_with_its_reason() -> None:
    model = torch.nn.Linear(3, 2)
    workers = [Worker(model, m) for m in (1, 2)]
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
    sent = {1: workers[0].ballot(1)}
    model.bias.grad = torch.tensor([1.0, torch.nan])
    sent[2] = workers[1].ballot(1)
    server = Server(workers[0].layout)
    server.decide(1, sent)
    assert server.report.voters == (1,)
    assert server.report.abstained == {2: "non-finite gradient"}
    assert not server.report.refused


@pytest.mark.parametrize("rule", SIGNED)
@pytest.mark.parametrize("zeros", ["coin", "abstain"])
def test_nobody_answered_and_nothing_moves(rule: str, zeros: Any) -> None:
    """The decision is a header alone; trust learns nothing; the report says so."""
    server = Server(LAYOUT, rule, zeros=zeros)
    before = server.state_dict()["rule"]
    message = server.decide(1, {3: b"garbage"})
    assert len(message) == HEADER.size
    assert not decision_of(message).any()
    assert not server.report.is_decided
    assert server.report.voters == ()
    assert str(server.state_dict()["rule"]) == str(before)


@pytest.mark.parametrize("rule", SIGNED)
def test_below_the_quorum_nothing_moves(rule: str) -> None:
    """In messages and in planes on a device, where who votes may be known there only."""
    options: dict[str, Any] = {"warmup": 0} if rule == "it-signsgd" else {}
    server = Server(LAYOUT, rule, min_voters=4, **options)
    y = signs(1, ternary=False)
    some = {m: message(y[m], m, 1) for m in range(3)}
    assert not decision_of(server.decide(1, some)).any()
    assert not server.report.is_decided
    assert server.report.voters == ()
    there = Server(LAYOUT, rule, min_voters=4, **options)
    parsed = [parse(ballot, layout=LAYOUT, run=0) for ballot in ballots(y, 1).values()]
    votes = replace(Votes.stack(parsed, 0, LAYOUT.size), present=torch.arange(7) < 3)
    decision = there.decide_planes(1, votes)
    assert decision.support is not None
    assert not decision.support.any()
    assert not there.report.is_decided
    workers = Voters(workers=tuple(range(7)))
    assert torch.equal(there.rule.weights(workers), server.rule.weights(workers))
    four = replace(votes, present=torch.arange(7) < 4)
    found = unpack_signs(there.decide_planes(2, four), LAYOUT.size)
    parsed_four = {m: message(y[m], m, 2) for m in range(4)}
    assert torch.equal(found, decision_of(server.decide(2, parsed_four)))
    assert there.report.is_decided


@pytest.mark.parametrize("rule", SIGNED)
@pytest.mark.parametrize("voters", [{1, 3}, {3}, set()], ids=str)
def test_those_who_turn_out_to_abstain_are_reported_with_their_reason(rule: str, voters: set[int]) -> None:
    """Everybody's reason is given; it counts for those who do not vote. The state is that after the same messages."""
    server, there = Server(LAYOUT, rule), Server(LAYOUT, rule)
    y = signs(1, ternary=False)
    sent = {m: message(y[m], m, 1) for m in (1, 3)}
    parsed = [parse(ballot, layout=LAYOUT, run=0) for ballot in sent.values()]
    present = torch.tensor([m in voters for m in sent])
    votes = replace(Votes.stack(parsed, 0, LAYOUT.size), present=present)
    decision = there.decide_planes(1, votes, dict.fromkeys(sent, "asleep"))
    wanted = decision_of(server.decide(1, {m: sent[m] for m in voters}))
    assert torch.equal(unpack_signs(decision, LAYOUT.size), wanted)
    assert there.report == replace(server.report, abstained=dict.fromkeys(sent.keys() - voters, "asleep"))


@pytest.mark.parametrize("rule", SIGNED)
@pytest.mark.parametrize("votes_at_all", [True, False])
def test_of_one_worker_nothing_has_to_be_counted_to_know_what_it_did(rule: str, votes_at_all: bool) -> None:
    """Whether it votes may be known on a device only."""
    server, there = Server(LAYOUT, rule), Server(LAYOUT, rule)
    for t in range(1, 4):
        sent = {5: message(signs(t, ternary=False)[0], 5, t)}
        parsed = [parse(ballot, layout=LAYOUT, run=0) for ballot in sent.values()]
        present = torch.tensor([votes_at_all or t == 1])
        decision = there.decide_planes(t, replace(Votes.stack(parsed, 0, LAYOUT.size), present=present))
        wanted = decision_of(server.decide(t, sent if present else {}))
        assert torch.equal(unpack_signs(decision, LAYOUT.size), wanted)
        assert there.report == server.report
        assert str(there.state_dict()) == str(server.state_dict())


def test_a_worker_applies_a_decision_that_moves_nothing() -> None:
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    worker = Worker(model, 0, decay=0.5)
    worker.apply(Server(worker.layout).decide(1, {}), step=0.5)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_workers_may_be_named_by_numpy_integers(tmp_path: Path) -> None:
    server = Server(LAYOUT, "robust")
    y = signs(1, ternary=False)
    sent: Any = {np.int64(m): message(y[m], m, 1) for m in range(5)}
    server.decide(1, sent)
    checkpoint.save(tmp_path / "server", server.state_dict())
    resumed = Server(LAYOUT, "robust")
    resumed.load_state_dict(checkpoint.load(tmp_path / "server"))
    assert (
        resumed.rule.weights(Voters(workers=(0, 4))).tolist()
        == server.rule.weights(Voters(workers=(0, 4))).tolist()
    )


def test_rounds_only_go_forward() -> None:
    server = Server(LAYOUT)
    server.decide(3, {})
    for earlier in (3, 2):
        with pytest.raises(ConfigError, match=f"round {earlier} cannot be decided after round 3"):
            server.decide(earlier, {})
    with pytest.raises(ConfigError, match="round is -1; it must lie in"):
        server.decide(-1, {})
    server.decide(30, {})


def test_settings() -> None:
    with pytest.raises(ConfigError, match="zeros is 'plus'; it must be 'coin' or 'abstain'"):
        Server(LAYOUT, zeros="plus")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run is 18446744073709551616"):
        Server(LAYOUT, run=2**64)
    other = make_rule("majority", Layout([("x", (5,))]))
    with pytest.raises(ConfigError, match="a Rule object must be made for the server's layout"):
        Server(LAYOUT, other)
    with pytest.raises(ConfigError, match="takes no options"):
        Server(LAYOUT, make_rule("weighted", LAYOUT), forgetting=0.5)


def test_states_of_another_kind_run_or_zero_rule_are_refused() -> None:
    state = Server(LAYOUT, run=1).state_dict()
    with pytest.raises(StateError, match="state has run 1; wanted 2"):
        Server(LAYOUT, run=2).load_state_dict(state)
    with pytest.raises(StateError, match="state has zeros 'coin'; wanted 'abstain'"):
        Server(LAYOUT, run=1, zeros="abstain").load_state_dict(state)
    with pytest.raises(StateError, match="state has kind 'worker'; wanted 'server'"):
        Server(LAYOUT, run=1).load_state_dict({**state, "kind": "worker"})
    with pytest.raises(
        StateError, match="a server's state: format 3 is a later signvote's; this one reads up to 2"
    ):
        Server(LAYOUT, run=1).load_state_dict({**state, "version": 3})
    with pytest.raises(
        StateError, match="a server's state: format 1 is an earlier signvote's; this one reads from 2 on"
    ):
        Server(LAYOUT, run=1).load_state_dict({**state, "version": 1})
    with pytest.raises(StateError, match="rule 'weighted' cannot be loaded into rule 'majority'"):
        Server(LAYOUT, "majority", run=1).load_state_dict(state)


def test_refusals_survive_a_restart() -> None:
    server = Server(LAYOUT)
    server.decide(1, [(4, b"")])
    resumed = Server(LAYOUT)
    resumed.load_state_dict(server.state_dict())
    assert resumed.refusals == {(4, "length"): 1}


MEMORY = """
import sys, torch
from signvote import Ballot, Layout, Server
from signvote.kernels import Planes, words_for
rule, m, n = sys.argv[1], 15, int(sys.argv[2])
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def vote(n):
    layout = Layout([("x", (n,))])
    signs = torch.randint(-(2**63), 2**63 - 1, (words_for(n),))
    signs[-1] &= 2 ** (n % 64) - 1
    planes = Planes(signs, None)
    sent = {w: Ballot.cast(layout, planes, worker=w, round=1, run=0).to_bytes() for w in range(m)}
    server = Server(layout, rule)
    before = peak()
    server.decide(1, sent)
    return (peak() - before) / n
vote(100_001)  # compile first
print(vote(n))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    ("rule", "n", "most"), [("weighted", 40_000_001, 1), ("it-signsgd", 4_000_001, 2 * 15 + 8)]
)
def test_memory_beyond_the_ballots(rule: str, n: int, most: float) -> None:
    """Bytes per coordinate at M = 15. glibc gives freed blocks back, so that the peak is the same in each run."""
    command = [sys.executable, "-c", MEMORY, rule, str(n)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    used = float(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    assert used <= most


def test_a_round_decided_in_parts_is_learned_as_a_whole() -> None:
    """Two halves decide by `rule.vote` and add their evidence up, as ranks do."""
    layout = Layout([("w", (150,))])
    whole, halves = Server(layout, "weighted"), [Server(layout, "weighted") for _ in range(2)]
    spans = [(0, 64), (64, 86)]
    for t in range(1, 4):
        gradients = torch.randn(3, 150, generator=torch.Generator().manual_seed(t))
        sent = {m: Encoder(layout, m).ballot(t, pack_signs(g, None)[0]) for m, g in enumerate(gradients)}
        decision = parse(whole.decide(t, sent), layout=layout, run=0)
        parsed = [parse(message, layout=layout, run=0) for message in sent.values()]
        coin = coin_for("coin", 0, t)
        assert coin is not None
        outs, seen = [empty_decision(n, coin) for _, n in spans], []
        for server, out, (first, n) in zip(halves, outs, spans, strict=True):
            seen.append(server.rule.vote(out, Votes.stack(parsed, first, n), coin.after(first)))
        for server in halves:
            server.learn(t, seen[0] + seen[1], {9: "asleep"})
            assert server.report.disagreement == whole.report.disagreement
            assert server.report.abstained == {9: "asleep"}
            assert str(server.rule.state_dict()) == str(whole.rule.state_dict())
        assert torch.equal(torch.cat([o.signs for o in outs]), decision.planes().signs)
    with pytest.raises(ConfigError, match="round 3 cannot be decided after round 3"):
        halves[0].learn(3, seen[0])


def test_ballots_are_admitted_before_a_round_is_decided() -> None:
    """As an engine does that wants a quorum first: nothing is decided or learned until it asks for it."""
    layout = Layout([("w", (70,))])
    server, at_once = Server(layout, "weighted"), Server(layout, "weighted")
    sent = {m: Encoder(layout, m).ballot(1, pack_signs(torch.randn(70), None)[0]) for m in range(3)}
    sent[3] = b"garbage"
    sent[4] = Encoder(layout, 4).ballot(1, None)
    before = str(server.state_dict())
    opened = server.open(1)
    for worker, ballot in sent.items():
        opened.add(worker, ballot)
    assert [ballot.worker for ballot in opened.voters] == [0, 1, 2]
    assert opened.abstained == {4: "non-finite gradient"}
    assert [(r.worker, r.reason) for r in opened.refused] == [(3, "length")]
    assert str(server.state_dict()) == before
    assert opened.close() == at_once.decide(1, sent)
    assert str(server.state_dict()) == str(at_once.state_dict())


def test_a_server_may_refuse_a_form() -> None:
    server = Server(LAYOUT, "majority", kinds=(Kind.DENSE,))
    y = signs(1, ternary=False)
    few = y[1].clone()
    few[3:] = 0
    server.decide(1, {0: message(y[0], 0, 1), 1: message(few, 1, 1)})
    assert server.report.voters == (0,)
    assert [refusal.worker for refusal in server.report.refused] == [1]
