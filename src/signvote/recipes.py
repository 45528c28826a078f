"""Recipes: step, momentum, schedule, decay and zeros in one word.

A run that names no recipe gets the one of its task. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "step": 1e-3,
        "momentum": 0.0,
        "polar": False,
        "schedule": "constant",
        "ramp": 0.0,
        "decay": 0.0,
        "decays": "all",
        "zeros": "abstain",
    },
    "text": {
        "step": 4e-3,
        "momentum": 0.9,
        "polar": True,
        "schedule": "cosine",
        "ramp": 0.1,
        "decay": 1.0,
        "decays": "matrices",
        "zeros": "coin",
    },
    "tuned": {
        "step": 3e-3,
        "momentum": 0.9,
        "polar": False,
        "schedule": "cosine",
        "ramp": 0.05,
        "decay": 1.0,
        "decays": "matrices",
        "zeros": "coin",
    },
}
FLOATS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "sgd": {"step": 0.1},
        "median": {"step": 0.1},
        "adamw": {"step": 1e-3},
    },
    "text": {
        "sgd": {"step": 1.0, "polar": False, "decay": 1e-4},
        "median": {"step": 1.0, "polar": False, "decay": 1e-4},
        "adamw": {"step": 4e-3, "polar": False, "decay": 0.1},
        "mean": {"polar": False},
    },
    "tuned": {
        "sgd": {"step": 1.0, "decay": 1e-3},
        "median": {"step": 1.0, "decay": 1e-3},
        "adamw": {"step": 8e-3, "decay": 0.5},
    },
}  # what a recipe means for rules that step by gradients instead of signs: their steps have another scale
USUAL = "tuned"  # the recipe of a task that names no other
OF_TASKS = {"python-source": "text"}  # named tasks with another recipe


def usual_recipe(task: Any) -> str:
    """The recipe of a run of a named task that names no recipe.

    >>> usual_recipe("mnist"), usual_recipe("python-source")
    ('tuned', 'text')
    """
    return OF_TASKS.get(task, USUAL) if isinstance(task, str) else USUAL


def recipe_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the recipe of a run decides; empty if the recipe is unknown.

    >>> recipe_of({"recipe": "paper", "rule": "sgd"})["step"]
    0.1
    """
    name = settings.get("recipe", USUAL)
    if name not in RECIPES:
        return {}
    recipe = dict(RECIPES[name])
    steps_by = settings.get("inner", "adamw") if settings.get("local_steps") else settings.get("rule")
    for rule, scale in FLOATS[name].items():
        if rule == steps_by:  # of a damaged file it may be anything
            recipe |= scale
    return recipe
