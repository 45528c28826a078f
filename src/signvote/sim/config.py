"""The whole configuration of a run: checked when made, and all that a result needs to be repeated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from signvote.core.bits import Zeros, check_zeros
from signvote.core.rules import RULES
from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.sim.attacks import parse_attack
from signvote.sim.population import mode_batch_sizes, parse_absences

Schedule = Literal["constant", "cosine"]
YARDSTICKS = ("oracle", "sgd", "median")  # see sim/yardsticks.py
FLOATS = ("sgd", "median")  # they move by gradients, not signs: another scale
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"step": 1e-3, "momentum": 0.0, "schedule": "constant", "zeros": "abstain"},
    "tuned": {"step": 1e-3, "momentum": 0.9, "schedule": "cosine", "zeros": "coin"},
}
SGD_STEP = 0.1


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. What a recipe sets may be set by hand as well."""

    task: str
    rule: str
    recipe: str = "tuned"
    model: str | None = None  # None: the task's own
    mode: int | None = None  # the paper's batch modes, 1 to 4
    workers: int = 15
    total: int = 960  # samples a round, in a mode
    batch_sizes: tuple[int, ...] = ()  # instead of a mode
    rounds: int = 300
    seed: int = 0
    step: float | None = None
    momentum: float | None = None
    schedule: Schedule | None = None
    zeros: Zeros | None = None
    decay: float = 0.0  # of weights
    feedback: bool = False  # error feedback
    top: float | None = None  # vote on this share of the coordinates only
    split: str = "shared"
    attack: str | None = None
    miss: float = 0.0
    absent: tuple[str, ...] = ()
    evaluate_every: int = 50
    test_batch: int = 64
    sign_error: bool = False  # compare decisions with the true gradient at each evaluation
    options: dict[str, Any] = field(default_factory=dict)  # of the rule

    def __post_init__(self) -> None:
        check_name("rule", self.rule, (*RULES, *YARDSTICKS))
        check_name("recipe", self.recipe, RECIPES)
        for name, value in RECIPES[self.recipe].items():
            if getattr(self, name) is None:
                value = SGD_STEP if name == "step" and self.rule in FLOATS else value
                object.__setattr__(self, name, value)
        if not self.batch_sizes:
            mode = 1 if self.mode is None else self.mode
            object.__setattr__(self, "mode", mode)
            object.__setattr__(self, "batch_sizes", tuple(mode_batch_sizes(mode, self.workers, self.total)))
        elif self.mode is not None:
            raise ConfigError("give a mode or batch_sizes, not both")
        object.__setattr__(self, "workers", len(self.batch_sizes))
        self._check()

    def _check(self) -> None:
        assert self.step is not None
        assert self.momentum is not None
        assert self.zeros is not None
        check_zeros(self.zeros)
        parse_attack(self.attack, self.workers)
        parse_absences(self.absent, self.workers)
        for name, value, right, wanted in (
            ("rounds", self.rounds, self.rounds >= 1, "1 or more"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "in 0..2^63-1"),
            ("step", self.step, 0 < self.step < math.inf, "above 0"),
            ("momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)"),
            ("decay", self.decay, 0 <= self.decay < math.inf, "0 or more"),
            ("top", self.top, self.top is None or 0 < self.top <= 1, "in (0, 1]"),
            ("miss", self.miss, 0 <= self.miss <= 1, "in [0, 1]"),
            ("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "1 or more"),
            ("test_batch", self.test_batch, self.test_batch >= 1, "1 or more"),
            ("schedule", self.schedule, self.schedule in ("constant", "cosine"), "constant or cosine"),
        ):
            if not right:
                raise ConfigError(f"{name} is {value}; it must be {wanted}")

    def step_at(self, round: int) -> float:
        """The step of a round, from 1: constant, or half a cosine from `step` to 0."""
        assert self.step is not None
        if self.schedule == "constant":
            return self.step
        return self.step * (1 + math.cos(math.pi * (round - 1) / self.rounds)) / 2

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as results.json holds them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration that `as_dict` gave."""
        known = {f.name for f in fields(cls)}
        chosen: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known
        }
        if chosen.get("mode") is not None:
            chosen["batch_sizes"] = ()
        return cls(**chosen)
