"""Flower with many nodes: replies are counted as they arrive, samples, and nodes that come and go."""

from __future__ import annotations

import gc
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from signvote import Layout, Spool, Worker, checkpoint
from signvote.engines.flower import QuorumError, SignVote, arrivals
from signvote.engines.flower.records import BALLOT, INSTRUCTION, METRICS, STATUS, to_array
from signvote.errors import ConfigError
from tests.flower_grid import LocalGrid

SHAPE = (80,)


def simple(message: Message, context: Context) -> Message:
    """A node that has no model: it votes on signs of its own, mostly on those of the others."""
    instruction: dict[str, Any] = dict(message.content[INSTRUCTION])
    noise = torch.Generator().manual_seed(1000 * instruction["round"] + context.node_id % 997)
    parameters = {"w": torch.zeros(SHAPE)}
    parameters["w"].grad = torch.randn(SHAPE, generator=noise) + 0.5
    worker = Worker(parameters, instruction["worker"], batch_size=4 + context.node_id % 3)
    content = RecordDict()
    content[BALLOT] = ArrayRecord({BALLOT: to_array(worker.ballot(instruction["round"]))})
    content[METRICS] = MetricRecord({"loss": 0.1 * (context.node_id % 7)})
    content[STATUS] = ConfigRecord({"applied": instruction["round"] - 1})
    return Message(content, reply_to=message)


def grid_of(nodes: Iterable[int]) -> LocalGrid:
    return LocalGrid(dict.fromkeys(nodes, simple))


def train(grid: LocalGrid, rounds: int, strategy: SignVote | None = None, **settings: Any) -> SignVote:
    parameters = {"w": torch.zeros(SHAPE)}
    strategy = strategy or SignVote(Layout.of(parameters), **settings)
    strategy.start(grid, ArrayRecord(parameters), num_rounds=rounds, timeout=0)
    return strategy


def state(strategy: SignVote) -> str:
    return str(strategy.state_dict())


# ---- a stream of replies -----------------------------------------------------------------------------


class Slow(LocalGrid):
    """One reply for each look. Notes how many votes are counted and how many replies are alive by then."""

    strategy: SignVote

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(nodes, simple))
        self.replies: list[weakref.ref[RecordDict]] = []
        self.counted: list[int] = []
        self.alive: list[int] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        opened = self.strategy.server._round
        assert opened is not None
        self.counted.append(opened.votes)
        self.alive.append(sum(reply() is not None for reply in self.replies))
        replies = list(super().pull_messages(sorted(message_ids)[:1]))
        self.replies += [weakref.ref(reply.content) for reply in replies]
        return replies


def test_a_ballot_is_counted_and_its_message_dropped_before_the_next_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    grid = Slow(range(8))
    parameters = {"w": torch.zeros(SHAPE)}
    grid.strategy = SignVote(Layout.of(parameters))
    grid.strategy.start(grid, ArrayRecord(parameters), num_rounds=1)
    assert grid.counted == list(range(8))
    assert max(grid.alive) <= 1


class Shuffled(LocalGrid):
    """Replies arrive backwards."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return list(super().pull_messages(message_ids))[::-1]


@pytest.mark.parametrize("rule", ["weighted", "robust", "it-signsgd", "majority"])
def test_neither_order_nor_place_of_ballots_nor_size_of_requests_changes_anything(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = range(10, 30)
    wanted = train(grid_of(nodes), 4, rule=rule)
    monkeypatch.setattr(arrivals, "AT_A_TIME", 3)
    found = train(Shuffled(dict.fromkeys(nodes, simple)), 4, rule=rule, store=Spool(50))
    assert state(found) == state(wanted)
    assert found.server.report == wanted.server.report


def test_a_message_that_cannot_be_sent_is_not_waited_for() -> None:
    class Full(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[Any]:
            return [None, *super().push_messages(list(messages)[1:])]

    strategy = SignVote(Layout.of({"w": torch.zeros(SHAPE)}))
    strategy.start(
        Full(dict.fromkeys(range(3), simple)), ArrayRecord({"w": torch.zeros(SHAPE)}), num_rounds=1
    )
    assert strategy.server.report.voters == (1, 2)


def test_a_round_ends_at_its_deadline() -> None:
    class Deaf(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return [] if len(self.sent) == 1 else super().pull_messages(sorted(message_ids)[:-1])

    strategy = train(Deaf(dict.fromkeys(range(3), simple)), 1)
    assert strategy.server.report.voters == (0, 1)


# ---- how much work -----------------------------------------------------------------------------------


class Counted(int):
    """A node id that counts how often it is compared or hashed."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        Counted.uses += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Counted.uses += 1
        return int.__lt__(self, other)

    def __hash__(self) -> int:
        Counted.uses += 1
        return int.__hash__(self)


def work(nodes: int, **settings: Any) -> tuple[int, int]:
    """Calls of the strategy's own functions and uses of node ids, in the second of two rounds."""
    grid = grid_of(map(Counted, range(1, nodes + 1)))
    strategy = train(grid, 1, **settings)
    calls = Counter[str]()
    Counted.uses = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        if str(frame.f_globals.get("__name__")).startswith("signvote.") and event in ("call", "c_call"):
            calls[event] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train(grid, 2, strategy)
    finally:
        sys.setprofile(before)
    return calls.total(), Counted.uses


@pytest.mark.parametrize("settings", [{"rule": "majority"}, {"rule": "weighted"}, {"fraction_train": 0.5}])
def test_ten_times_the_nodes_are_ten_times_the_work(settings: dict[str, Any]) -> None:
    few, many = work(20, **settings), work(200, **settings)
    assert many[0] < 10.5 * few[0]
    assert many[1] < 15 * few[1]  # node ids are sorted


# ---- samples -----------------------------------------------------------------------------------------


class Noting(LocalGrid):
    """Notes which nodes are asked, by round."""

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(nodes, simple))
        self.asked: dict[int, list[int]] = {}

    def answer(self, node: int, message: Message) -> Message | None:
        round: Any = message.content.config_records[INSTRUCTION]["round"]
        self.asked.setdefault(round, []).append(node)
        return super().answer(node, message)


@pytest.mark.parametrize(
    ("nodes", "settings", "size"),
    [
        (20, {}, 20),
        (20, {"fraction_train": 0.25}, 5),
        (19, {"fraction_train": 0.25}, 4),  # rounded down, as Flower's FedAvg does
        (20, {"fraction_train": 0.25, "min_train_nodes": 7}, 7),
        (3, {"fraction_train": 0.25}, 1),
        (3, {"fraction_train": 0.25, "min_train_nodes": 7}, 3),  # FedAvg would wait for ever
    ],
)
def test_a_fraction_of_the_nodes_is_asked(nodes: int, settings: dict[str, Any], size: int) -> None:
    grid = Noting(range(nodes))
    strategy = train(grid, 3, **settings)
    assert [len(set(asked)) for asked in grid.asked.values()] == [size] * 3
    assert len(strategy.server.report.voters) == size


def test_every_node_has_its_turn_and_a_resumed_run_asks_the_same(tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    whole, first, second = (Noting(range(20)) for _ in range(3))
    wanted = train(whole, 30, fraction_train=0.25)
    train(first, 11, fraction_train=0.25, checkpoint=saved)
    found = train(second, 30, fraction_train=0.25, checkpoint=saved)
    assert first.asked | second.asked == whole.asked
    assert state(found) == state(wanted)
    turns = Counter(node for asked in whole.asked.values() for node in asked)
    assert len(turns) == 20
    assert max(turns.values()) < 20  # of 30, at 7.5 in the mean


def test_the_first_round_waits_for_nodes_and_each_for_those_that_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = Noting(range(5))
    grid.online = {0}
    monkeypatch.setattr("time.sleep", lambda seconds: grid.online.add(len(grid.online)))
    parameters = {"w": torch.zeros(SHAPE)}
    strategy = SignVote(Layout.of(parameters), min_available_nodes=4, min_train_nodes=2)

    def leave(t: int, arrays: ArrayRecord) -> None:
        if t == 1:
            grid.online = {0}

    strategy.start(grid, ArrayRecord(parameters), num_rounds=2, evaluate_fn=leave)
    assert {t: len(asked) for t, asked in grid.asked.items()} == {1: 4, 2: 2}


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="it must lie above 0, and at most be 1"):
        SignVote(Layout.of({"w": torch.zeros(SHAPE)}), fraction_train=fraction)


# ---- come and go -------------------------------------------------------------------------------------


def held(thing: object) -> int:
    """How many references a thing and its parts hold: what grows with every departed node shows here."""
    seen: set[int] = set()
    left = [thing]
    references = 0
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
            seen.add(id(each))
            found = gc.get_referents(each)
            references += len(found)
            left += found
    return references


@pytest.mark.parametrize("rule", ["weighted", "robust", "it-signsgd"])
def test_nothing_is_kept_of_nodes_that_left_long_ago(rule: str, tmp_path: Path) -> None:
    """Five new nodes in each round, and a bound of 12: what the strategy keeps does not grow."""
    saved = tmp_path / "run.safetensors"
    strategy = SignVote(Layout.of({"w": torch.zeros(SHAPE)}), rule, remember=12, checkpoint=saved)
    references, sizes = [], []
    for t in range(1, 31):
        train(grid_of(range(5 * t, 5 * t + 10)), t, strategy)
        references.append(held(strategy))
        sizes.append(saved.stat().st_size)
    assert len(strategy.nodes) <= 13
    assert strategy.nodes.keys() >= set(strategy.server.report.voters)
    assert max(references[20:]) < 1.1 * max(references[10:20])
    assert max(sizes[20:]) < 1.1 * max(sizes[10:20])


def test_a_forgotten_node_has_a_new_number_and_no_number_is_used_twice(tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    settings: dict[str, Any] = {"remember": 4, "checkpoint": saved}
    train(grid_of(range(4)), 1, **settings)
    train(grid_of(range(10, 14)), 2, **settings)
    strategy = train(grid_of([0, 10, 11]), 3, **settings)
    assert strategy.nodes == {4: 10, 5: 11, 6: 12, 7: 13, 8: 0} or strategy.nodes == {
        4: 10,
        5: 11,
        7: 13,
        8: 0,
    }
    assert strategy.server.report.voters == (4, 5, 8)


def test_a_checkpoint_of_format_1_is_continued(tmp_path: Path) -> None:
    """It had a list of all nodes."""
    saved = tmp_path / "run.safetensors"
    whole = train(grid_of(range(5)), 4)
    train(grid_of(range(5)), 2, checkpoint=saved)
    old = checkpoint.load(saved)
    del old["workers"], old["next_worker"]
    checkpoint.save(saved, {**old, "version": 1})
    assert state(train(grid_of(range(5)), 4, checkpoint=saved)) == state(whole)


def test_a_missed_quorum_names_a_few_reasons_only() -> None:
    grid = grid_of(range(300))
    grid.answer = lambda node, message: None if node else simple(message, grid.contexts[node])  # type: ignore[method-assign]
    with pytest.raises(QuorumError, match="1 of 300 nodes voted") as raised:
        train(grid, 1, min_ballots=2)
    assert len(str(raised.value)) < 300


def test_a_log_of_many_bad_nodes_is_short(caplog: pytest.LogCaptureFixture) -> None:
    def damaged(message: Message, context: Context) -> Message:
        reply = simple(message, context)
        ballot = (b"", bytes(80), None)[context.node_id % 3]
        if ballot is None:
            raise RuntimeError("no")
        reply.content[BALLOT] = ArrayRecord({BALLOT: to_array(ballot)})
        return reply

    caplog.set_level(logging.INFO, "flwr")
    train(LocalGrid(dict.fromkeys(range(300), damaged)), 1, min_ballots=0)
    assert "round 1: 180 more nodes are refused" in caplog.text
    assert "round 1: 80 more nodes answer with an error" in caplog.text
    assert "0 voted, 200 refused, 0 abstained, 100 silent (workers [2, 5, " in caplog.text
    assert "] and 80 more)" in caplog.text
    assert caplog.text.count("\n") < 90


@pytest.mark.parametrize(("rule", "weight"), [("weighted", r"[\d.]+ %"), ("it-signsgd", "by coordinate")])
def test_the_log_ends_with_those_whose_votes_counted(
    rule: str, weight: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    strategy = train(grid_of(range(50)), 2, rule=rule)
    table = caplog.text.split("whose votes counted in round 2:")[1]
    rows = re.findall(rf"\t +(\d+) +{weight} +[\d.]+ %  (\d+)\n", table)
    assert len(rows) == 20
    assert all(strategy.nodes[int(worker)] == int(node) for worker, node in rows)
    assert "and 30 more in between" in table
    if rule == "weighted":
        shares = [strategy.shares[int(worker)] for worker, _ in rows]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == max(strategy.shares.values())
        assert sum(strategy.shares.values()) == pytest.approx(1)
