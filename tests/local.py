"""Training with local steps for the tests: a rank as the simulator's worker of the same number."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from signvote import LocalVote
from signvote.sim import Config
from tests.ranks import Batches, checksum, config, fresh

H = 3
ROUNDS = 6


def settings(rule: str, world: int, **more: Any) -> Config:
    usual = {"local_steps": H, "decays": "all", "decay": 0.1, "step": 1e-2}
    return config(rule, world, ROUNDS, **{**usual, **more})


def inner(model: nn.Module, config: Config) -> Optimizer:
    """The optimizer of the simulator's worker."""
    if config.inner == "sgd":
        return SGD(model.parameters(), lr=1.0, momentum=config.momentum, weight_decay=config.decay)
    betas = (config.momentum, config.beta2)
    return AdamW(model.parameters(), lr=1.0, betas=betas, weight_decay=config.decay)


class LocalScript:
    """A training script around `LocalVote`."""

    def __init__(self, rank: int, config: Config, **more: Any) -> None:
        self.config = config
        self.model = fresh(config)
        self.net: nn.Module = self.model
        self.batches = Batches(rank, config)
        self.inner = inner(self.model, config)
        every = config.local_steps or 1
        usual: dict[str, Any] = {"step": config.outer_step, "momentum": config.outer_momentum}
        usual |= {"rule": config.rule, "run": config.seed, "chunk": 1280, "every": every, **config.options}
        self.optimizer = LocalVote(self.inner, **(usual | more))
        self.number = 0

    def step(self) -> None:
        """One local step."""
        self.number += 1
        for group in self.inner.param_groups:
            group["lr"] = self.config.local_step_at(self.number)
        self.optimizer.zero_grad()
        self.batches.loss(self.net, self.number).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def round(self) -> int:
        """The steps until the next vote; a checksum of the parameters after it."""
        before = self.optimizer.round
        while self.optimizer.round == before:
            self.step()
        return checksum(self.model)

    def train(self, rounds: int) -> list[int]:
        """A checksum of the parameters after every vote."""
        return [self.round() for _ in range(rounds)]


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
