"""The measurements of a run, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from signvote.results import FORMAT, lengths
from signvote.sim.gradients import by_class
from signvote.sim.machine import Machine, versions
from signvote.tasks import Task

if TYPE_CHECKING:
    from signvote.sim.run import Run

PER_ROUND = ("voters", "bytes_up", "bytes_down")

History = dict[str, Any]


def empty_history(task: Task) -> History:
    """The history of a run that has not begun."""
    history: History = {
        "evaluations": {"round": [], **{metric.name: [] for metric in task.metrics}},
        "trust": {
            "round": [],
            "weight": [],
            "overruled": [],
        },
        "sign_error": {"round": [], "error": []},
    }
    return history | {name: [] for name in PER_ROUND}


def note(history: History, what: str, **values: object) -> None:
    """Add one measurement."""
    for name, value in values.items():
        history[what][name].append(value)


def note_bytes(history: History, up: int, down: int) -> None:
    """Add the bytes of a round."""
    history["bytes_up"].append(up)
    history["bytes_down"].append(down)


def note_machine(machines: list[dict[str, Any]], machine: Machine, round: int) -> None:
    """Note the machine that computes the rounds from this one on, if it is new."""
    here = machine.named()
    if machines:
        last = {key: machines[-1][key] for key in here}
        if last == here:
            return
    machines.append({"from_round": round, **here})


def result_of(run: Run, status: str) -> dict[str, Any]:
    """The entry of a run in results.json."""
    config = run.config
    task = run.gradients.task
    accuracies: list[float] = []
    if status == "done":
        accuracies = by_class(task, run.model, config.test_batch)
    server = run.server
    undecided = sum(voters < config.min_voters for voters in run.history["voters"])
    trust = {"workers": list(range(config.workers)), **run.history["trust"]}
    return {
        "format": FORMAT,
        "config": config.as_dict(),
        "versions": versions(),
        "status": status,
        "coordinates": run.layout.size,
        "rounds_done": run.round,
        "machine": run.machines,
        "seconds": run.seconds,
        "metrics": [metric.as_dict() for metric in task.metrics],
        **run.history,
        "accuracy_by_class": accuracies,
        **{name: lengths.pack(run.history[name]) for name in PER_ROUND},
        "undecided": undecided if server is None else server.watch.undecided,
        "notices": [] if server is None else server.watch.notices,
        "trust": lengths.short(trust) if trust["round"] else {},
        "sign_error": lengths.short(run.history["sign_error"]) if config.sign_error else {},
        **({"data": dict(task.about)} if task.about else {}),
    }
