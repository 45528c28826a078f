"""A round that is given its ballots one by one, from several threads, equals `Server.decide`."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import ConfigError, DataError, Server, Spool, WeightedRule
from signvote.core import report as report_module
from signvote.core.rounds import Receipt
from signvote.core.vote import Voters, fixed_point
from tests.populations import LAYOUT, Population, Sent, ballot, populations


def streamed(server: Server, t: int, sent: list[Sent], threads: int = 1) -> bytes:
    opened = server.open(t)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda each: opened.add(*each), sent))
    return opened.close()


@settings(max_examples=60)
@given(populations(), st.booleans(), st.sampled_from([None, 0, 100]))
def test_one_by_one_is_at_once(population: Population, is_reversed: bool, keep: int | None) -> None:
    """Decision, report and state; in memory, or in a file. Duplicates are identical, so the order changes nothing."""
    at_once = population.server()
    store = None if keep is None else Spool(keep)
    one_by_one = population.server(store=store)
    for t, sent in enumerate(population.rounds, start=1):
        wanted = at_once.decide(t, sent)
        assert streamed(one_by_one, t, sent[::-1] if is_reversed else sent) == wanted
        found = one_by_one.report
        if not is_reversed:
            assert found == at_once.report
        assert (found.voters, found.disagreement) == (at_once.report.voters, at_once.report.disagreement)
        assert (found.abstained, found.notices) == (at_once.report.abstained, at_once.report.notices)
        assert sorted(map(str, found.refused)) == sorted(map(str, at_once.report.refused))
    if not is_reversed:
        assert str(one_by_one.state_dict()) == str(at_once.state_dict())
    assert str(one_by_one.rule.state_dict()) == str(at_once.rule.state_dict())


@settings(max_examples=8, deadline=None)
@given(populations(["weighted", "majority"]))
def test_threads_change_nothing(population: Population) -> None:
    at_once, threaded = population.server(), population.server()
    for t, sent in enumerate(population.rounds, start=1):
        assert streamed(threaded, t, sent, threads=4) == at_once.decide(t, sent)
    assert str(threaded.state_dict()["rule"]) == str(at_once.state_dict()["rule"])


def test_in_steady_state_nothing_is_left_to_add_when_a_round_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the last few ballots: weights are foretold from the voters of the round before."""
    added = []
    server = Server(LAYOUT)
    for t in range(1, 4):
        sent = [Sent(m, ballot("weighted", "coin", m, t, 4 + m)) for m in range(12)]
        opened = server.open(t)
        for each in sent:
            opened.add(*each)
        assert opened.stream is not None
        added.append(len(opened.stream._added))
        opened.close()
    assert added == [0, 8, 8]


def test_what_became_of_a_ballot() -> None:
    server = Server(LAYOUT, "majority", min_voters=2)
    good = [ballot("majority", "coin", m, 1, 0) for m in range(4)]
    opened = server.open(1)
    assert opened.add(0, good[0]) == Receipt("admitted", 1)
    assert opened.add(0, good[0]) == Receipt("duplicate", 1, "worker 0 has already voted in round 1")
    assert opened.add(2, good[1]) == Receipt("refused", 1, "worker 2 sent a ballot in the name of 1")
    worker: Any = np.int64(1)
    assert opened.add(worker, good[1]).votes == opened.votes == 2
    assert opened.add(3, ballot("majority", "coin", 3, 0, 0)).status == "late"
    decision = opened.close()
    before = server.state_dict()
    for worker in (3, 0):
        assert opened.add(worker, good[worker]) == Receipt(
            "late", 2, f"the ballot of worker {worker} came after round 1 was closed"
        )
    assert server.refusals == {(0, "duplicate"): 1, (2, "worker"): 1, (3, "late"): 2, (0, "late"): 1}
    assert str(server.state_dict() | {"refusals": 0}) == str(before | {"refusals": 0})
    other = Server(LAYOUT, "majority", min_voters=2)
    assert other.decide(1, {m: good[m] for m in range(2)}) == decision
    with pytest.raises(ConfigError, match="round 1 was closed, or dropped when another one was opened"):
        opened.close()


def test_a_round_that_is_not_closed_is_dropped_by_the_next() -> None:
    server, other = Server(LAYOUT), Server(LAYOUT)
    dropped = server.open(1)
    dropped.add(1, ballot("weighted", "coin", 1, 1, 4))
    again = server.open(1)
    assert dropped.add(2, ballot("weighted", "coin", 2, 1, 4)).status == "late"
    with pytest.raises(ConfigError, match="dropped when another one was opened"):
        dropped.close()
    sent = {m: ballot("weighted", "coin", m, 1, 4) for m in (3, 4)}
    for worker, message in sent.items():
        assert again.add(worker, message).status == "admitted"
    assert again.close() == other.decide(1, sent)


def test_a_ballot_is_admitted_or_late_while_another_thread_closes_the_round() -> None:
    """What was admitted is in the decision; what was late is not. The race is real, and either end is right."""
    for t in range(1, 30):
        server, other = Server(LAYOUT, "majority"), Server(LAYOUT, "majority")
        sent = [ballot("majority", "coin", m, t, 0) for m in range(6)]
        opened, start = server.open(t), Barrier(2)
        opened.add(0, sent[0])
        receipts: list[Receipt] = []

        def add(
            start: Barrier = start, opened: Any = opened, receipts: Any = receipts, sent: Any = sent
        ) -> None:
            start.wait()
            receipts.extend(opened.add(m, sent[m]) for m in range(1, 6))

        thread = Thread(target=add)
        thread.start()
        start.wait()
        decision = opened.close()
        thread.join()
        admitted = {0} | {m for m, receipt in enumerate(receipts, start=1) if receipt.status == "admitted"}
        assert decision == other.decide(t, {m: sent[m] for m in admitted})
        assert server.refusals.total() == 6 - len(admitted)


class Fickle(WeightedRule):
    """The weight of a worker depends on who else votes, and may be negative."""

    name = "fickle"

    def weights(self, voters: Voters) -> torch.Tensor:
        """See Rule."""
        first = [float(worker - voters.workers[0] - 2) for worker in voters.workers]
        return fixed_point(torch.tensor(first)[:, None])


def test_a_weight_that_was_foretold_wrongly_is_corrected() -> None:
    server, other = Server(LAYOUT, Fickle(LAYOUT)), Server(LAYOUT, Fickle(LAYOUT))
    for t, workers in enumerate((range(12), range(12), range(3, 12), range(1, 12)), start=1):
        sent = [Sent(m, ballot("weighted", "coin", m, t, 0)) for m in workers]
        assert streamed(server, t, sent) == other.decide(t, sent)
        assert server.report == other.report


def test_a_rule_with_a_vote_of_its_own_is_not_voted_in_steps() -> None:
    class Own(Fickle):
        """Decides nothing."""

        def vote(self, out: Any, votes: Any, coin: Any) -> Any:
            """See Rule."""
            found = super().vote(out, votes, coin)
            out.signs.zero_()
            return found

    server, other = Server(LAYOUT, Own(LAYOUT)), Server(LAYOUT, Own(LAYOUT))
    assert server.open(1).stream is None
    sent = [Sent(m, ballot("weighted", "coin", m, 1, 0)) for m in range(3)]
    assert streamed(server, 1, sent) == other.decide(1, sent)


# ---- the spool -----------------------------------------------------------------------------------


def test_ballots_beyond_a_limit_are_in_a_file_without_a_name(tmp_path: Path) -> None:
    spool = Spool(100, tmp_path)
    server = Server(LAYOUT, "majority", store=spool)
    opened = server.open(1, stream=False)
    for m in (0, 3, 6, 9):
        opened.add(m, ballot("majority", "coin", m, 1, 0))
    assert (spool.bytes_in_memory, spool.bytes_in_file) == (99, 33)
    assert not list(tmp_path.iterdir())
    opened.close()
    assert server.report.voters == (0, 3, 6, 9)
    assert (spool.bytes_in_memory, spool.bytes_in_file) == (0, 0)
    server.open(2).add(0, ballot("majority", "coin", 0, 2, 0))
    assert spool.bytes_in_memory == 33
    server.open(2)
    assert spool.bytes_in_memory == 0


def test_a_spool_keeps_what_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of any sizes, also larger than a block."""
    monkeypatch.setattr("signvote.spool.BLOCK", 4096)
    spool = Spool(0, tmp_path)
    random = np.random.default_rng(1)
    parts = [random.integers(0, 256, size, np.uint8) for size in (1, 4000, 96, 4097, 10_000, 5)]
    kept = [spool.keep(part) for part in parts]
    assert all(np.array_equal(a, b) for a, b in zip(kept, parts, strict=True))
    assert spool.bytes_in_file == sum(part.nbytes for part in parts)
    spool.clear()
    assert all(np.array_equal(a, b) for a, b in zip(kept, parts, strict=True))


def test_a_full_disk_leaves_the_round_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server, other = Server(LAYOUT, store=Spool(70, tmp_path)), Server(LAYOUT)
    sent = [ballot("weighted", "coin", m, 1, 4) for m in range(7)]
    opened = server.open(1)
    for m in (0, 3):
        opened.add(m, sent[m])
    with monkeypatch.context() as patch:
        patch.setattr("signvote.spool.Spool._written", full)
        with pytest.raises(DataError, match=r"ballot of 33 bytes cannot be written to .*No space left"):
            opened.add(2, sent[2])
    assert opened.add(6, sent[6]).status == "admitted"
    voters = [ballot.worker for ballot in opened.voters]
    assert opened.close() == other.decide(1, {m: sent[m] for m in voters})
    assert server.report.voters == tuple(voters)


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_limit_of_memory_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="keep_bytes is -1; it must be 0 or more"):
        Spool(-1)


# ---- refusals ------------------------------------------------------------------------------------


def test_refusals_are_bounded_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "LISTED", 20)
    server = Server(LAYOUT, "majority")
    for t in range(1, 40):
        server.decide(t, {7: b"", **{10 * t + i: b"x" for i in range(5)}})
    assert len(server.refusals) <= 20
    assert server.refusals.total() == 39 * 6
    assert server.refusals[7, "length"] == 39
    assert server.refusals[report_module.OTHERS, "length"] > 100
    resumed = Server(LAYOUT, "majority")
    resumed.load_state_dict(server.state_dict())
    assert resumed.refusals == server.refusals
