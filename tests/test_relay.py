"""A tree of servers equals one server, bit for bit: decisions, reports and trust, whatever its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import RULES, BallotError, ConfigError, Server
from signvote.core.ballot import parse
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.joining import joined
from signvote.core.messages import Partial, Roll, Shown, Verdict, Weights
from signvote.core.relay import Branch, Relay
from signvote.core.root import Root
from signvote.core.rules import make_rule
from signvote.core.vote import Votes
from signvote.core.wire import Form, Topic, form_of, seal, unseal
from tests.populations import LAYOUT, Population, Sent, ballot, populations
from tests.test_rounds import Fickle

PHASES = ("roll", "partial", "evidence")


class Node:
    """A relay of a tree, its transport, and when it dies, if it does."""

    def __init__(self, server: Server, below: Sequence[Node] = ()) -> None:
        self.relay = Relay(server)
        self.below = below
        self.dies_before = ""
        self.tallies = 0  # partial tallies that it made

    def all(self) -> list[Node]:
        """It and all below, in order."""
        return [self, *(node for each in self.below for node in each.all())]

    def open(self, round: int) -> None:
        for node in self.all():
            node.branch = node.relay.open(round)

    branch: Branch

    def roll(self) -> bytes | None:
        if self.dies_before == "roll":
            return None
        return self.branch.roll([node.roll() for node in self.below])

    def partial(self, weights: bytes) -> bytes | None:
        if self.dies_before in ("roll", "partial"):
            return None
        parts = self.branch.weigh(weights)
        self.tallies += 1
        return self.branch.partial([n.partial(w) for n, w in zip(self.below, parts, strict=True)])

    def evidence(self, verdict: bytes) -> bytes | None:
        if self.dies_before:
            return None
        decision = self.branch.decide(verdict)
        found = self.branch.evidence([node.evidence(verdict) for node in self.below])
        assert decision == Verdict.from_bytes(verdict, self.branch._topic).decision
        return found


def decide(server: Server, round: int, tops: Sequence[Node]) -> bytes:
    """One round of a tree."""
    root = Root(server, round)
    weights = root.weigh([node.roll() for node in tops])
    while (verdict := root.decide([n.partial(w) for n, w in zip(tops, weights, strict=True)])) is None:
        weights = root.weights
    root.learn([node.evidence(verdict) for node in tops])
    assert not root.faults
    return root.decision


class Tree(NamedTuple):
    tops: list[Node]
    all: list[Node]


def tree(shape: Any, population: Population) -> Tree:
    """Nested lists: each is a relay, with those in it below."""

    def node(parts: Any) -> Node:
        return Node(population.server(), [node(part) for part in parts])

    tops = [node(part) for part in shape]
    return Tree(tops, [each for top in tops for each in top.all()])


shapes = st.sampled_from(
    [
        [[]],
        [[], [], [], []],
        [[[], []], []],
        [[[[], []], [], []], [[]]],
    ]
)


def spread(nodes: list[Node], sent: Sequence[Sent], at: Sequence[int]) -> list[list[Sent]]:
    """Each worker's messages go to a relay; the ballots of each relay, in the order of relays."""
    taken: list[list[Sent]] = [[] for _ in nodes]
    for each in sent:
        taken[at[each.worker] % len(nodes)].append(each)
    return taken


def trust_of(server: Server, tree: Tree) -> dict[int, Any]:
    """What is known about each worker, wherever it is."""
    rules = (
        [server.rule, *(node.relay.server.rule for node in tree.all)]
        if server.rule.is_local
        else [server.rule]
    )
    found: dict[int, Any] = {}
    for rule in rules:
        if isinstance(rule, ItSignSGD):
            state = rule.trust.state_dict()
            for m, worker in enumerate(state["workers"]):
                if state["seen"][m]:
                    found[worker] = (state["rounds"][m], state["seen"][m], state["counters"][:, m].tolist())
        elif not rule.is_local:
            found[-1] = str(rule.state_dict())
    return found


@settings(max_examples=50, deadline=None)
@given(populations(), shapes, st.lists(st.integers(0, 99), min_size=12, max_size=12))
def test_a_tree_is_one_server(population: Population, shape: Any, at: list[int]) -> None:
    """Also with bad ballots, with too few voters, and with relays that have no workers."""
    one, root = population.server(), population.server()
    grown = tree(shape, population)
    for t, sent in enumerate(population.rounds, start=1):
        taken = spread(grown.all, sent, at)
        wanted = one.decide(t, [each for some in taken for each in some])
        for top in grown.tops:
            top.open(t)
        for node, some in zip(grown.all, taken, strict=True):
            for each in some:
                node.branch.add(*each)
        assert decide(root, t, grown.tops) == wanted
        found, expected = vars(root.report), vars(one.report)
        assert sorted(map(str, found.pop("refused"))) == sorted(map(str, expected.pop("refused")))
        assert found == expected
        assert root.refusals == one.refusals
        assert trust_of(root, grown) == trust_of(one, Tree([], []))


@settings(max_examples=40, deadline=None)
@given(populations(), shapes, st.lists(st.integers(0, 99), min_size=12, max_size=12), st.data())
def test_the_workers_below_a_relay_that_dies_are_absent(
    population: Population, shape: Any, at: list[int], data: st.DataObject
) -> None:
    """Before its roll, or before its tally, when others have been weighed along with them already."""
    one, root = population.server(), population.server()
    grown = tree(shape, population)
    for t, sent in enumerate(population.rounds, start=1):
        taken = spread(grown.all, sent, at)
        victim = data.draw(st.sampled_from(grown.all))
        for node in grown.all:
            node.dies_before = ""
        victim.dies_before = data.draw(st.sampled_from(PHASES[:2]))
        lost = victim.all()
        for top in grown.tops:
            top.open(t)
        for node, some in zip(grown.all, taken, strict=True):
            for each in some:
                node.branch.add(*each)
        left = [
            each for node, some in zip(grown.all, taken, strict=True) if node not in lost for each in some
        ]
        assert decide(root, t, grown.tops) == one.decide(t, left)
        assert (root.report.voters, root.report.disagreement, root.report.is_decided) == (
            one.report.voters,
            one.report.disagreement,
            one.report.is_decided,
        )
        assert trust_of(root, grown) == trust_of(one, Tree([], []))


def opened(rule: str, workers: int, relays: int, t: int = 1, **settings: Any) -> tuple[Tree, list[bytes]]:
    """A round of some relays side by side that has all ballots."""
    sent = [ballot(rule, "coin", m, t, 4 + m) for m in range(workers)]
    grown = tree([[]] * relays, Population(rule, settings, []))
    for node in grown.tops:
        node.open(t)
    for m, message in enumerate(sent):
        grown.tops[m % relays].branch.add(m, message)
    return grown, sent


@pytest.mark.parametrize("rule", RULES)
def test_of_a_relay_that_dies_after_its_tally_nothing_is_learned(rule: str) -> None:
    """Its votes count: the decision is that of all."""
    grown, sent = opened(rule, 9, 3)
    server, one = Server(LAYOUT, rule), Server(LAYOUT, rule)
    grown.tops[1].dies_before = "evidence"
    assert decide(server, 1, grown.tops) == one.decide(1, dict(enumerate(sent)))
    assert server.report.voters == tuple(range(9))
    for worker, share in one.report.disagreement.items():
        assert server.report.disagreement[worker] == (0 if worker % 3 == 1 else share)


def test_nothing_at_all_may_be_learned() -> None:
    grown, sent = opened("robust", 5, 1)
    grown.tops[0].dies_before = "evidence"
    server, one = Server(LAYOUT, "robust"), Server(LAYOUT, "robust")
    assert decide(server, 1, grown.tops) == one.decide(1, dict(enumerate(sent)))
    assert server.report.is_decided
    assert set(server.report.disagreement.values()) == {0.0}


def test_only_a_rule_that_is_local_has_weights_of_its_own() -> None:
    parsed = [parse(ballot("majority", "coin", 0, 1, 0), layout=LAYOUT, run=0)]
    with pytest.raises(
        ConfigError, match="the rule 'majority' has no weights of its own for each coordinate"
    ):
        make_rule("majority", LAYOUT).tally(Votes.stack(parsed, 0, LAYOUT.size))


def test_weights_that_stay_need_no_second_tally() -> None:
    for rule, tallies in (("majority", 1), ("it-signsgd", 1), ("weighted", 2)):
        grown, _ = opened(rule, 9, 3)
        grown.tops[2].dies_before = "partial"
        decide(Server(LAYOUT, rule), 1, grown.tops)
        assert [node.tallies for node in grown.tops] == [tallies, tallies, 0]


def test_a_worker_at_two_relays_votes_once() -> None:
    """At the first of them, in a tree as at one server."""
    grown, sent = opened("majority", 4, 2)
    grown.tops[1].branch.add(0, sent[0])
    server, one = Server(LAYOUT, "majority"), Server(LAYOUT, "majority")
    assert decide(server, 1, grown.tops) == one.decide(1, dict(enumerate(sent)))
    assert server.report.refused[0].message == "worker 0 has already voted in round 1"
    assert server.report.disagreement == one.report.disagreement


def test_a_ballot_after_the_roll_is_late() -> None:
    grown, sent = opened("majority", 4, 2)
    branch = grown.tops[0].branch
    branch.roll()
    assert branch.add(5, sent[1]).status == "late"


def test_a_damaged_message_is_as_good_as_none() -> None:
    grown, sent = opened("weighted", 6, 2)
    server, one = Server(LAYOUT), Server(LAYOUT)
    root = Root(server, 1)
    rolls = [node.roll() for node in grown.tops]
    assert rolls[1] is not None
    weights = root.weigh([rolls[0], rolls[1][:-1] + b"?"])
    assert root.faults == ["checksum mismatch: the roll was damaged on its way"]
    verdict = root.decide([grown.tops[0].partial(weights[0]), b"garbage"])
    assert verdict is not None
    root.learn([grown.tops[0].evidence(verdict), None])
    assert len(root.faults) == 2
    assert root.decision == one.decide(1, {m: sent[m] for m in (0, 2, 4)})
    assert server.report == one.report


def test_a_rule_that_does_not_vote_in_steps_has_no_relays() -> None:
    class Own(Fickle):
        """As it is, but votes by itself."""

        def vote(self, out: Any, votes: Any, coin: Any) -> Any:
            """See Rule."""
            return super().vote(out, votes, coin)

    server = Server(LAYOUT, Own(LAYOUT))
    for make in (lambda: Relay(server), lambda: Root(server, 1)):
        with pytest.raises(ConfigError, match="the rule 'fickle' cannot be split among relays"):
            make()


def test_a_tally_costs_bytes_by_its_digits_and_not_by_its_workers() -> None:
    sizes = []
    for workers in (3, 12, 15):
        grown, _ = opened("majority", workers, 1)
        root = Root(Server(LAYOUT, "majority"), 1)
        partial = grown.tops[0].partial(root.weigh([grown.tops[0].roll()])[0])
        assert partial is not None
        sizes.append(len(partial) - 8 * workers)
    plane = -(-LAYOUT.size // 8)
    assert sizes[1] == sizes[2] == sizes[0] + 2 * plane  # 3 bits hold 0 to 6, with gaps; 5 bits 0 to 30


# ---- damage --------------------------------------------------------------------------------------

TOPIC = Topic(LAYOUT, 0, 1)


def every_message() -> dict[str, bytes]:
    """One of each form."""
    grown, _ = opened("robust", 5, 1, sample=128)
    top, root = grown.tops[0], Root(Server(LAYOUT, "robust", sample=128), 1)
    roll = top.roll()
    weights = root.weigh([roll])[0]
    partial = top.partial(weights)
    verdict = root.decide([partial])
    assert verdict is not None
    shown = top.evidence(verdict)
    assert roll is not None
    assert partial is not None
    assert shown is not None
    return {"roll": roll, "weights": weights, "partial": partial, "verdict": verdict, "evidence": shown}


READERS: dict[str, Any] = {
    "roll": lambda message: Roll.from_bytes(message, TOPIC),
    "weights": lambda message: Weights.from_bytes(message, TOPIC, 1),
    "partial": lambda message: Partial.from_bytes(message, TOPIC, 1),
    "verdict": lambda message: Verdict.from_bytes(message, TOPIC),
    "evidence": lambda message: Shown.from_bytes(message, TOPIC, 1),
}


@settings(max_examples=100)
@given(st.sampled_from(sorted(READERS)), st.data())
def test_every_message_is_read_back_and_a_damaged_one_is_refused(name: str, data: st.DataObject) -> None:
    message, read = MESSAGES[name], READERS[name]
    assert read(message).to_bytes(TOPIC) == message
    at = data.draw(st.integers(0, len(message) - 1))
    flipped = bytearray(message)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), message[:at], message + b"x"):
        with pytest.raises(BallotError):
            read(damaged)


MESSAGES = every_message()


@pytest.mark.parametrize("name", READERS)
def test_parts_that_do_not_fit_one_another_are_refused(name: str) -> None:
    """With a checksum that fits."""
    form = {"weights": Form.WEIGHTS, "verdict": Form.VERDICT}.get(name, Form[name.upper()])
    count, arrays = unseal(form, TOPIC, MESSAGES[name])
    if name == "verdict":
        return
    with pytest.raises(BallotError, match=f"the parts of the {name} have lengths that do not fit"):
        READERS[name](seal(form, TOPIC, count + 1, *arrays))


def test_the_header_says_what_a_message_is() -> None:
    names = {form_of(message) for message in MESSAGES.values()}
    assert names == {Form.ROLL, Form.WEIGHTS, Form.PARTIAL, Form.VERDICT, Form.EVIDENCE}
    assert form_of(b"") is form_of(MESSAGES["roll"][:50]) is form_of(bytes(60)) is None


def test_nobody_is_below() -> None:
    roll, sources = joined([None, None], 1)
    assert (roll.declared, roll.abstained, roll.refused, sources) == ({}, {}, (), {})
    root = Root(Server(LAYOUT), 1)
    verdict = None
    assert root.weigh([None])
    verdict = root.decide([None])
    assert verdict is not None
    root.learn([None])
    assert not root.server.report.is_decided
    assert not torch.tensor(list(root.decision[64:])).any()
