"""Steps to a target: each method's grid on a seed of its own, then the best setting on the others.

These do not depend on the links, so they are measured once, on links that are not shaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.progress import Progress

from benchmarks.network_hosts import Crew
from benchmarks.network_methods import Setting, settings_of
from benchmarks.network_tasks import Goal

GRID_SEED = 9
SEEDS = (0, 1, 2)


def curve(
    crew: Crew, goal: Goal, method: str, setting: Setting, seed: int, target: float, patience: int
) -> dict[str, Any]:
    """The metric by step, until two measurements in a row reach the target; the step of the first of them.

    Seconds are those of the steps alone.
    """
    crew.all("make", method, setting, seed)
    every = max(goal.every, crew.all("every", method)[0])
    points, reached, sent, seconds = list[tuple[int, float]](), None, 0.0, 0.0
    for step in range(every, patience + 1, every):
        replies = crew.all("train", method, every)
        sent += max(reply["up"] for reply in replies)
        seconds += max(sum(reply["seconds"]) for reply in replies)
        if step < goal.first:
            continue
        points.append((step, round(crew.all("measure", method)[0], 5)))
        if len(points) > 1 and all(goal.is_reached(value, target) for _, value in points[-2:]):
            reached = points[-2][0]
            break
    crew.all("drop", method)
    return {
        "method": method,
        "setting": setting,
        "seed": seed,
        "reached": reached,
        "bytes_up": round(sent / points[-1][0]),
        "seconds": round(seconds, 2),
        "curve": points,
    }


def curves_of(
    crew: Crew, goal: Goal, name: str, method: str, target: float, progress: Progress
) -> Iterator[dict[str, Any]]:
    """All settings on the grid's seed, one given up once another was faster; then the best on the other seeds."""
    settings = settings_of(name, method)
    best, fastest = None, goal.patience
    for setting in progress.track(settings, description=f"{method}: grid"):
        found = curve(
            crew, goal, method, setting, GRID_SEED, target, min(goal.patience, fastest + 2 * goal.every)
        )
        yield found
        if found["reached"] is not None and (best is None or found["reached"] < fastest):
            best, fastest = setting, found["reached"]
    if best is None:
        return
    for seed in progress.track(SEEDS, description=f"{method}: seeds"):
        yield curve(crew, goal, method, best, seed, target, goal.patience)


def chosen(curves: list[dict[str, Any]], method: str) -> Setting | None:
    """The setting that all seeds ran, or the fastest of the grid."""
    own = [each for each in curves if each["method"] == method]
    finals = [each for each in own if each["seed"] != GRID_SEED]
    if finals:
        setting: Setting = finals[0]["setting"]
        return setting
    done = [each for each in own if each["reached"] is not None]
    return min(done, key=lambda each: each["reached"])["setting"] if done else None


def steps_to_target(curves: list[dict[str, Any]], method: str) -> tuple[float, int, int] | None:
    """Median, least and most of the seeds; None if one of them did not reach the target."""
    own = [each for each in curves if each["method"] == method and each["seed"] != GRID_SEED]
    reached = [each["reached"] for each in own]
    if len(reached) < len(SEEDS) or None in reached:
        return None
    return median(reached), min(reached), max(reached)
