"""Agreement: whatever is delayed, lost or dead, two values are never decided, and a value is one that was proposed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from signvote.engines.ddp.agreement import (
    BLANK,
    Answers,
    Decided,
    Read,
    Refusal,
    Requests,
    is_majority,
    propose,
)
from signvote.engines.ddp.members import parsed
from signvote.engines.ddp.registers import Registers, ask, serve
from tests.elastic import addresses


class Proposer:
    """One member that proposes; its requests travel one by one, in any order, and some never arrive."""

    def __init__(self, members: int, ballot: tuple[int, int], value: str) -> None:
        self.result: Decided | Refusal | None = None
        self._steps: Generator[Requests, Answers, Decided | Refusal] = propose(range(members), ballot, value)
        self._answers: dict[int, Any] = {}
        self.pending: Requests = next(self._steps)

    def travel(self, member: int, slips: Registers, how: str) -> None:
        """One request: it arrives and is answered, is lost, or arrives and its answer is lost."""
        request = self.pending.pop(member)
        if how != "lost":
            key = f"slip/{member}"
            if isinstance(request, Read):
                answer = slips.get(key)
            else:
                answer = slips.change(key, request.expected, request.desired)
            if how == "arrives":
                self._answers[member] = answer
        if not self.pending:
            self._continue()

    def _continue(self) -> None:
        answers, self._answers = self._answers, {}
        try:
            self.pending = dict(self._steps.send(answers))
        except StopIteration as end:
            self.result = end.value


HOW = st.sampled_from(["arrives", "arrives", "arrives", "lost", "answer lost"])


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(2, 5))
def test_two_values_are_never_decided(data: st.DataObject, members: int, proposers: int) -> None:
    slips = Registers()
    for member in range(members):
        slips.put(f"slip/{member}", BLANK)
    numbers = data.draw(st.lists(st.integers(1, 3), min_size=proposers, max_size=proposers))
    running = [Proposer(members, (n, i), f"value {i}") for i, n in enumerate(numbers)]
    done: list[Proposer] = []
    while running:
        chosen = data.draw(st.sampled_from(running))
        member = data.draw(st.sampled_from(sorted(chosen.pending)))
        chosen.travel(member, slips, data.draw(HOW))
        if data.draw(st.integers(0, 20)) == 0:
            running.remove(chosen)  # it dies
        elif chosen.result is not None:
            running.remove(chosen)
            done.append(chosen)
    decided = {each.result.value for each in done if isinstance(each.result, Decided)}
    assert len(decided) <= 1
    assert decided <= {f"value {i}" for i in range(proposers)}
    last = Proposer(members, (9, 0), "a late value")
    while last.pending:
        last.travel(min(last.pending), slips, "arrives")
    assert isinstance(last.result, Decided)
    assert not decided or last.result.value in decided


def test_a_slip_that_is_lost_with_its_process_does_not_come_back() -> None:
    slips = Registers()
    slips.put("slip/0", BLANK)
    asked = Proposer(3, (1, 0), "a")
    while asked.pending and asked.result is None:
        asked.travel(min(asked.pending), slips, "arrives")
    assert asked.result == Refusal(0, 1)
    assert slips.get("slip/1") is None


def test_more_than_half() -> None:
    assert is_majority([1, 2], [1, 2, 3])
    assert not is_majority([1, 2], [1, 2, 3, 4])
    assert not is_majority([1, 7, 8], [1, 2, 3])


def test_values_over_a_network_and_what_is_refused() -> None:
    registers = Registers()
    address = parsed(addresses(1)[0])
    end = serve(registers, address)
    try:
        registers.put("slip", BLANK)
        new = {**BLANK, "promised": [1, 2**63]}
        assert ask(address, {"change": "slip", "from": BLANK, "to": new}, 30) == new
        assert ask(address, {"change": "slip", "from": BLANK, "to": {}}, 30) == new
        assert ask(address, {"read": ["slip", "none"]}, 30) == [new, None]
        assert ask(address, {"tell": "told/knock/3", "value": [1]}, 30) is None
        assert registers.told() == {"told/knock/3": [1]}
    finally:
        end()
