"""Agreement on one value, although members may die, stop or be cut off at any moment: single-decree Paxos.

Every member has a *slip*: a register that anybody may change, if it is as expected. A proposer works in two steps, each
of which needs more than half of the slips:

    promise   write its ballot, larger than any seen, on each slip; no smaller one is accepted there any more
    accept    write its value next to the ballot: that of the largest ballot accepted before, if it saw one

A value that more than half of the slips have accepted under one ballot is decided, and no other value ever is. Members
that hold slips do nothing: a slip works as long as its process answers. A slip that is lost with its process must never
come back empty, so its name holds the number of the process.

`propose` is a generator of requests: it knows no network and no clock, so a test can try any order and any loss.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Slip = dict[str, Any]
Ballot = tuple[int, int]  # a number, and the member that uses it: no two proposers have the same


class Read(NamedTuple):
    """Ask for a slip."""


class Change(NamedTuple):
    """Ask to change a slip if it is as expected. The answer is the slip afterwards."""

    expected: Slip
    desired: Slip


class Refusal(NamedTuple):
    """A proposal that was not decided."""

    largest: int  # number of a ballot that was seen: try again with a larger one
    answered: int  # slips that answered


class Decided(NamedTuple):
    """The value that is decided for ever."""

    value: Any


Requests = dict[int, Read | Change]
Answers = Mapping[int, Slip | None]  # None: no such slip; no entry: no answer

BLANK: Slip = {
    "promised": [0, 0],
    "accepted": [0, 0],
    "value": None,
}


def is_majority(some: Collection[int], members: Collection[int]) -> bool:
    """Whether these are more than half of the members."""
    return 2 * len(set(some) & set(members)) > len(members)


def propose(
    members: Collection[int],
    ballot: Ballot,
    value: Any,
) -> Generator[Requests, Answers, Decided | Refusal]:
    """Propose a value. Yields requests by member, and wants their answers; the result is what came of it.

    Args:
        members: whose slips count.
        ballot: larger than any before by this member.
        value: anything that JSON holds, and not None.

    """
    found = _known((yield {member: Read() for member in members}))
    known = [tuple(slip["promised"]) for slip in found.values()]
    largest = max(known, default=(0, 0))
    if not is_majority(found, members) or largest >= ballot:
        return Refusal(largest[0], len(found))
    promises: Requests = {}
    for member, before in found.items():
        promises[member] = Change(before, before | {"promised": list(ballot)})
    promised = _changed(promises, (yield promises))
    if not is_majority(promised, members):
        return Refusal(largest[0], len(promised))
    accepted = max(promised.values(), key=lambda slip: tuple(slip["accepted"]))
    chosen = value if accepted["value"] is None else accepted["value"]
    slip = {
        "promised": list(ballot),
        "accepted": list(ballot),
        "value": chosen,
    }
    writes: Requests = {member: Change(before, slip) for member, before in promised.items()}
    written = _changed(writes, (yield writes))
    if not is_majority(written, members):
        return Refusal(ballot[0], len(written))
    return Decided(chosen)


def _known(answers: Answers) -> dict[int, Slip]:
    """The slips that there are."""
    return {member: slip for member, slip in answers.items() if slip is not None}


def _changed(requests: Requests, answers: Answers) -> dict[int, Slip]:
    """The slips that are now as they were to be."""
    changed = {}
    for member, slip in _known(answers).items():
        request = requests[member]
        if isinstance(request, Change) and slip == request.desired:
            changed[member] = slip
    return changed
