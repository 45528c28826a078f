"""A run's state: everything needed to continue it bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from signvote.core.encoding import Memory
from signvote.errors import StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes
from signvote.settings import completed
from signvote.sim.history import PER_ROUND
from signvote.sim.phases import PHASES

if TYPE_CHECKING:
    from signvote.sim.run import Run

VERSION = 3
State = dict[str, Any]
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, RuntimeError)


class HasState(Protocol):
    """A part of a run."""

    def state_dict(self) -> State:
        """Everything needed to resume."""


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
        "server": _state_of(run.server),
        "adam": _state_of(run.adam),
        "local": run.workers.local_state(),
        "outer": _state_of(run.outer),
        "averages": [memory.average for memory in memories],
        "residuals": [memory.residual for memory in memories],
        "beliefs": [memory.belief for memory in memories],
        "decision": None if run.last_decision is None else list(run.last_decision),
        "history": run.history,
        "seconds": run.seconds,
        "machines": run.machines,
        "data": dict(run.gradients.task.about),
    }


def _state_of(part: HasState | None) -> State | None:
    """The state of a part that a run may lack."""
    return None if part is None else part.state_dict()


def load_state(run: Run, state: dict[str, Any]) -> None:
    """Resume a new run from a state of the same configuration. Anything else raises StateError."""
    check_state(state, kind="run")
    state = upgraded(state, "the checkpoint", VERSION)
    try:
        _check_config(run, json.loads(state["config"]))
        _check_data(run, dict(state.get("data", {})))
        _check_history(run, state)
        _load(run, state)
    except StateError:
        raise
    except DAMAGE as error:
        raise StateError(f"the checkpoint is damaged ({type(error).__name__}: {error})") from error


def _check_config(run: Run, saved: dict[str, Any]) -> None:
    """Raise if a setting differs. One that did not exist yet is at its default."""
    mine = run.config.as_dict()
    its = completed(saved) | saved
    if run.config.extends(its):
        return
    differing = []
    for name in mine | its:
        saved_value = its.get(name)
        value = mine.get(name)
        if saved_value != value:
            differing.append(f"{name} {saved_value!r} instead of {value!r}")
    if differing:
        raise StateError(f"the checkpoint is of another run: {', '.join(differing)}")


def _check_data(run: Run, saved: dict[str, str]) -> None:
    """Raise if the task had other data. Earlier checkpoints do not say."""
    mine = dict(run.gradients.task.about)
    if saved and saved != mine:
        raise StateError(f"the checkpoint is of other data: {_words(saved)} instead of {_words(mine)}")


def _words(about: dict[str, str]) -> str:
    described = [f"{name} {text}" for name, text in about.items()]
    return ", ".join(described) or "none that are described"


def _check_history(run: Run, state: dict[str, Any]) -> None:
    """Raise unless the history has every list, as long as its neighbors."""
    history = state["history"]
    round = state["round"]
    if _lists(history) != _lists(run.history):
        raise StateError("the checkpoint is damaged: its history does not have the measurements of a run")
    for name in PER_ROUND:
        found = len(history[name])
        if found != round:
            raise StateError(f"the checkpoint is damaged: it has {found} {name} of {round} rounds")
    for what in history.keys() - set(PER_ROUND):
        lengths = {len(values) for values in history[what].values()}
        if len(lengths) != 1:
            raise StateError(f"the checkpoint is damaged: its {what} have unequal lengths")


def _lists(history: Any) -> Any:
    """A history with empty lists."""
    if isinstance(history, dict):
        return {name: _lists(values) for name, values in history.items()}
    return [] if isinstance(history, list) else None


def _load(run: Run, state: dict[str, Any]) -> None:
    memories = []
    for kept in zip(state["averages"], state["residuals"], _beliefs(state), strict=True):
        average, residual, belief = (_memory(run, each) for each in kept)
        memories.append(Memory(average, residual, belief))
    decision = state["decision"]
    last_decision = None if decision is None else Planes(*decision)
    seconds = {phase: float(state["seconds"][phase]) for phase in PHASES}
    described = {"from_round", *run.machine.named()}
    if not all(described <= machine.keys() for machine in state["machines"]):
        raise StateError("the checkpoint is damaged: it does not describe its machines")
    if run.adam is not None:
        for name in ("m", "v"):
            _memory(run, state["adam"][name])
    run.model.load_state_dict(state["model"])
    run.workers.load_memories(memories)
    device = run.gradients.x.device
    run.encoder.memory = memories[0].map(lambda kept: kept.to(device))
    if run.server is not None:
        run.server.load_state_dict(state["server"])
    if run.adam is not None:
        run.adam.load_state_dict(state["adam"])
    if run.outer is not None:
        run.workers.load_local_state(state["local"])
        run.outer.load_state_dict(state["outer"], run.gradients.x)
    run.round = state["round"]
    run.history = state["history"]
    run.phases.seconds = seconds
    run.machines = state["machines"]
    run.last_decision = last_decision


def _beliefs(state: dict[str, Any]) -> list[Tensor | None]:
    """Of each worker; earlier versions had none."""
    nothing: list[Tensor | None] = [None] * len(state["averages"])
    beliefs: list[Tensor | None] = state.get("beliefs", nothing)
    return beliefs


def _memory(run: Run, kept: Tensor | None) -> Tensor | None:
    """A memory that has the shape of a gradient."""
    if kept is None:
        return None
    if kept.shape != run.gradients.x.shape or not kept.is_floating_point():
        raise StateError(
            f"the checkpoint is damaged: a memory is {tuple(kept.shape)} numbers of {kept.dtype}"
        )
    return kept
