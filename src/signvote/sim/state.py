"""A run's state: everything needed to continue it bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from signvote.core.encoder import Memory
from signvote.errors import StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes

if TYPE_CHECKING:
    from signvote.sim.run import Run

VERSION = 3


def state_of(run: Run) -> dict[str, Any]:
    """The state of a run between two rounds."""
    memories = run.workers.memories()
    if run.config.rule == "oracle":
        others = run.config.workers - 1
        memories = [run.encoder.memory, *[Memory()] * others]
    return {
        "kind": "run",
        "version": VERSION,
        "config": json.dumps(run.config.as_dict(), sort_keys=True),
        "round": run.round,
        "model": {name: p.detach() for name, p in run.model.state_dict().items()},
        "server": None if run.server is None else run.server.state_dict(),
        "averages": [memory.average for memory in memories],
        "residuals": [memory.residual for memory in memories],
        "decision": None if run.last_decision is None else list(run.last_decision),
        "history": run.history,
        "seconds": run.seconds,
        "machines": run.machines,
    }


def load_state(run: Run, state: dict[str, Any]) -> None:
    """Resume a new run from a state of the same configuration."""
    check_state(state, kind="run")
    state = upgraded(state, "the checkpoint", VERSION)
    mine = run.config.as_dict()
    its = json.loads(state["config"])
    differing = [
        f"{name} {its.get(name)!r} instead of {mine.get(name)!r}"
        for name in mine | its
        if mine.get(name) != its.get(name)
    ]
    if differing:
        raise StateError(f"the checkpoint is of another run: {', '.join(differing)}")
    run.round = state["round"]
    run.history = state["history"]
    run.phases.seconds = state["seconds"]
    run.machines = state["machines"]
    run.last_decision = None
    if state["decision"] is not None:
        run.last_decision = Planes(*state["decision"])
    run.model.load_state_dict(state["model"])
    memories = [
        Memory(average, residual)
        for average, residual in zip(state["averages"], state["residuals"], strict=True)
    ]
    run.workers.load_memories(memories)
    device = run.gradients.x.device
    run.encoder.memory = memories[0].map(lambda kept: kept.to(device))
    if run.server is not None:
        run.server.load_state_dict(state["server"])
