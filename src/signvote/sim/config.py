"""The configuration of a run: its settings, complete and checked. It is enough to repeat a result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from signvote.core.bits import check_zeros
from signvote.core.rules import RULES, current
from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.settings import RECIPES, SETTINGS, Schedule, Settings, recipe_of
from signvote.sim.attacks import parse_attack
from signvote.sim.population import mode_batch_sizes, parse_absences

YARDSTICKS = ("oracle", "sgd", "median", "adamw")  # see sim/yardsticks.py


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """One run. A setting that is not given comes from the recipe, or has its default.

    `Settings` has the fields. A setting without a value there (`FROM_RECIPE`) has one here.
    """

    def __post_init__(self) -> None:
        self._fill("rule", current(self.rule))
        check_name("rule", self.rule, (*RULES, *YARDSTICKS))
        check_name("recipe", self.recipe, RECIPES)
        recipe = recipe_of({"recipe": self.recipe, "rule": self.rule})
        for name, value in recipe.items():
            if getattr(self, name) is None:
                self._fill(name, value)
        self._fill_batch_sizes()
        self._check()

    def _fill(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _fill_batch_sizes(self) -> None:
        if self.batch_sizes and self.mode is not None:
            raise ConfigError("give a mode or batch_sizes, not both")
        if not self.batch_sizes:
            mode = 1 if self.mode is None else self.mode
            sizes = mode_batch_sizes(mode, self.workers, self.total)
            self._fill("mode", mode)
            self._fill("batch_sizes", tuple(sizes))
        self._fill("workers", len(self.batch_sizes))

    def _check(self) -> None:
        check_zeros(self.zeros)
        parse_attack(self.attack, self.workers)
        parse_absences(self.absent, self.workers)
        self._require("rounds", self.rounds >= 1, "1 or more")
        self._require("seed", 0 <= self.seed < 2**63, "in 0..2^63-1")
        self._require("step", 0 < self.step < math.inf, "above 0")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self._require("ramp", 0 <= self.ramp <= 1, "in [0, 1]")
        self._require("decay", 0 <= self.decay < math.inf, "0 or more")
        self._require("top", self.top is None or 0 < self.top <= 1, "in (0, 1]")
        self._require("miss", 0 <= self.miss <= 1, "in [0, 1]")
        self._require(
            "min_voters", 1 <= self.min_voters <= self.workers, f"in 1..{self.workers}, the workers"
        )
        self._require("evaluate_every", self.evaluate_every >= 1, "1 or more")
        self._require("test_batch", self.test_batch >= 1, "1 or more")
        self._require("schedule", self.schedule in get_args(Schedule), "constant or cosine")

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be {wanted}")

    def step_at(self, round: int) -> float:
        """The step of a round, from 1: constant, or half a cosine from `step` to 0; smaller in the first rounds."""
        rising = self.ramp * self.rounds
        risen = min(1.0, round / rising) if rising else 1.0
        angle = 0.0 if self.schedule == "constant" else math.pi * (round - 1) / self.rounds
        return self.step * risen * (1 + math.cos(angle)) / 2

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration with the settings of `as_dict`."""
        chosen: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in SETTINGS
        }
        if chosen.get("mode") is not None:
            chosen["batch_sizes"] = ()
        return cls(**chosen)
