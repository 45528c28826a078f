"""Workers die, stop, lose their link and come back; nobody else restarts, and nothing else changes."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import Crew, Plan, addresses


def plan_for(folder: Path, world: int, rounds: int, **more: Any) -> Plan:
    return Plan(world=world, rounds=rounds, peers=addresses(world), folder=str(folder), **more)


def dies(t: int, optimizer: Any, worker: int, plan: Plan, when: int, name: str, call: int) -> None:
    """Die, as by `kill -9`, at a call of the group in the first round from `when` on that it takes part in."""
    if t < when:
        return
    if not name:
        os.kill(os.getpid(), signal.SIGKILL)
    group = optimizer.poll.company.group
    usual, calls = getattr(group, name), count(1)

    def deadly(*args: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args)

    setattr(group, name, deadly)


# A worker dies at any of these points of round 5.
POINTS = {
    "before its votes are sent": ("", 0),
    "with its votes sent, before it says that it votes": ("all_gather", 1),
    "before the decisions are put together": ("all_gather", 2),
}


@pytest.mark.slow
def test_one_of_four_is_killed_at_any_point_and_comes_back(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 4, 10**6)
    with Crew(plan) as crew:
        for worker in range(4):
            crew.start(worker, *((dies, 5, *POINTS["before its votes are sent"]) if worker == 0 else ()))
        crew.start(0, dies, 25, *POINTS["with its votes sent, before it says that it votes"])
        crew.start(0, dies, 45, *POINTS["before the decisions are put together"])
        crew.start(0)
        crew.wait_for(lambda: crew.round_of(0) >= 45)
        story = crew.finish(0, 1, 2, 3)
    assert crew.starts == {0: 4, 1: 1, 2: 1, 3: 1}
    assert len(story.returns) == 4
