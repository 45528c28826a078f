"""The configuration of a run: its settings, complete and checked. It is enough to repeat a result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from signvote.core.bits import check_zeros
from signvote.core.groups import DECAYS, check_steps
from signvote.core.rules import RULES, current
from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.recipes import RECIPES, recipe_of
from signvote.settings import SETTINGS, Inner, Schedule, Settings, usual_evaluate_every
from signvote.sim.hostility import parse_attack
from signvote.sim.population import mode_batch_sizes, parse_absences
from signvote.tasks.load import recipe_for

LOCAL_YARDSTICKS = ("diloco", "sparseloco")  # with local steps
YARDSTICKS = ("oracle", "sgd", "median", "adamw", *LOCAL_YARDSTICKS)  # see sim/yardsticks.py
LOCAL_RULES = ("majority", "weighted", "robust", *LOCAL_YARDSTICKS)  # that go with local steps
LENGTH = {"rounds", "evaluate_every"}  # settings that a longer run changes


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """One run. A setting that is not given comes from the recipe, or has its default.

    `Settings` has the fields. A setting without a value there (`FROM_RECIPE`) has one here.
    """

    def __post_init__(self) -> None:
        self._fill("rule", current(self.rule))
        check_name("rule", self.rule, (*RULES, *YARDSTICKS))
        if self.recipe is None:
            self._fill("recipe", recipe_for(self.task, self.task_options))
        check_name("recipe", self.recipe, RECIPES)
        recipe = recipe_of(
            {
                "recipe": self.recipe,
                "rule": self.rule,
                "local_steps": self.local_steps,
                "inner": self.inner,
            }
        )
        for name, value in recipe.items():
            if getattr(self, name) is None:
                self._fill(name, value)
        if self.top is None and self.top_end is not None:
            self._fill("top", 1.0)
        if self.evaluate_every is None:
            self._fill("evaluate_every", usual_evaluate_every(self.rounds))
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
        self._require("interpolation", self.interpolation is None or 0 <= self.interpolation < 1, "in [0, 1)")
        self._require("clip", self.clip is None or 0 < self.clip < math.inf, "above 0")
        self._require("ramp", 0 <= self.ramp <= 1, "in [0, 1]")
        self._require("decay", 0 <= self.decay < math.inf, "0 or more")
        check_name("value of decays", self.decays, DECAYS)
        check_steps(self.steps)
        self._require("top", self.top is None or 0 < self.top <= 1, "in (0, 1]")
        self._require("top_end", self.top_end is None or 0 < self.top_end <= 1, "in (0, 1]")
        self._require("miss", 0 <= self.miss <= 1, "in [0, 1]")
        self._require(
            "min_voters",
            1 <= self.min_voters <= self.workers,
            f"in 1..{self.workers}, the workers",
        )
        self._require("evaluate_every", self.evaluate_every >= 1, "1 or more")
        self._require("test_batch", self.test_batch >= 1, "1 or more")
        self._require("schedule", self.schedule in get_args(Schedule), "constant or cosine")
        self._require("inner", self.inner in get_args(Inner), "adamw or sgd")
        self._require("beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        self._require("outer_step", 0 < self.outer_step < math.inf, "above 0")
        self._require("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)")
        if self.local_steps is not None:
            self._check_local()
        elif self.rule in LOCAL_YARDSTICKS:
            raise ConfigError(f"rule is {self.rule!r}, which needs local steps: give local_steps")

    def _check_local(self) -> None:
        self._require("local_steps", self.local_steps is not None and self.local_steps >= 1, "1 or more")
        if self.rule not in LOCAL_RULES:
            raise ConfigError(
                f"rule is {self.rule!r}, which does not go with local steps; use one of {', '.join(LOCAL_RULES)}"
            )
        if self.zeros != "coin":
            raise ConfigError(f"zeros is {self.zeros!r}; votes after local steps need 'coin'")
        if self.feedback or self.top is not None or self.interpolation is not None or self.polar:
            raise ConfigError(
                "votes after local steps are dense and have their own feedback:"
                " use no feedback, top, interpolation or polar"
            )

    def _require(self, name: str, condition: bool, wanted: str) -> None:
        if not condition:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be {wanted}")

    def step_at(self, round: int) -> float:
        """The step of a round, from 1: constant, or half a cosine from `step` to 0; smaller in the first rounds."""
        return self._scheduled(round, self.rounds)

    def local_step_at(self, number: int) -> float:
        """The step of a worker's local step, from 1 and over all rounds: the same schedule."""
        return self._scheduled(number, self.rounds * (self.local_steps or 1))

    def _scheduled(self, number: int, steps: int) -> float:
        risen = 1.0
        rising = self.ramp * steps
        if rising:
            risen = min(1.0, number / rising)
        angle = 0.0
        if self.schedule == "cosine":
            angle = math.pi * (number - 1) / steps
        return self.step * risen * (1 + math.cos(angle)) / 2

    def top_at(self, round: int) -> float | None:
        """The share of the coordinates voted on in a round, from 1: from `top` to `top_end` in equal factors."""
        if self.top is None or self.top_end is None:
            return self.top
        last = max(1, self.rounds - 1)
        done = (round - 1) / last
        factor = self.top_end / self.top
        return self.top * math.pow(factor, done)

    def extends(self, other: dict[str, Any]) -> bool:
        """Whether this run is the other one, given as settings, with more rounds.

        No round may depend on how many follow: the schedule is constant, nothing ramps up or ends.
        """
        mine = self.as_dict()
        different = {name for name in mine | other if mine.get(name) != other.get(name)}
        is_longer = different <= LENGTH and self.rounds > other["rounds"]
        is_steady = self.schedule == "constant" and not self.ramp
        return is_longer and is_steady and self.top_end is None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration with the settings of `as_dict`."""
        chosen: dict[str, Any] = {}
        for name, value in values.items():
            if name in SETTINGS:
                chosen[name] = tuple(value) if isinstance(value, list) else value
        if chosen.get("mode") is not None:
            chosen["batch_sizes"] = ()
        return cls(**chosen)
