"""The paper's round in plain torch, written from its equations: an oracle, and what one would write first.

Every user has a model of its own; signs, weights and counts are dense tensors; nothing is packed. As in
signvote, weights are rounded to 1 / 1024, and a missing sign counts half a mismatch.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor

from signvote.sim import Config, Run
from signvote.sim.population import generator
from signvote.tasks import Task


class Textbook:
    """M users and a server; takes batches and the first model from a Run, so that both do the same."""

    def __init__(self, config: Config, task: Task, *, warmup: int = 100) -> None:
        like = Run(config, task)
        self.task, self.config, self.sampler, self.warmup = task, config, like.workers.work.sampler, warmup
        self.models = [copy.deepcopy(like.model) for _ in config.batch_sizes]
        for model in self.models:
            model.zero_grad(set_to_none=True)
        self.mismatches = torch.zeros(config.workers, like.layout.size, dtype=torch.float64)
        self.t = 0
        self.seconds = {"gradients": 0.0, "server": 0.0, "apply": 0.0}

    def round(self) -> Tensor:
        """One round; returns the decision."""
        start = time.perf_counter()
        y = torch.stack([self._signs(m) for m in range(self.config.workers)])  # (M, N)
        encoded = time.perf_counter()
        decision = self._decide(y)
        decided = time.perf_counter()
        self._apply(decision)
        for phase, seconds in zip(
            self.seconds, (encoded - start, decided - encoded, time.perf_counter() - decided), strict=True
        ):
            self.seconds[phase] += seconds
        return decision

    def _signs(self, m: int) -> Tensor:
        """Sign of user m's gradient on its own batch."""
        model, indices = self.models[m], self.sampler.batch(m, self.t)
        model.train()
        model.zero_grad(set_to_none=True)
        draws = self.task.draw(len(indices), generator(self.config.seed, 6, self.t + 1, m, 1))
        batch = self.task.batch(self.task.train, indices, draws)
        self.task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([torch.sign(p.grad).flatten() for p in model.parameters() if p.grad is not None])

    def _decide(self, y: Tensor) -> Tensor:
        """Equations (3) and (4)."""
        if self.t < self.warmup:
            weights = torch.ones_like(self.mismatches)
        else:
            p = self.mismatches / self.t  # (4): over the rounds before this one
            llr = torch.log((1 - p) / p).clamp(-10, 10)
            weights = torch.round(llr * 1024) / 1024
        decision = torch.sign((weights * y).sum(0))  # (3)
        half = (y == 0) ^ (decision == 0)
        self.mismatches += torch.where(half, 0.5, (y != decision).double())
        self.t += 1
        return decision

    def _apply(self, decision: Tensor) -> None:
        """Equation (5), for every user."""
        with torch.no_grad():
            for model in self.models:
                at = 0
                for p in model.parameters():
                    move = decision[at : at + p.numel()].view_as(p)
                    p.sub_(move.to(p.dtype), alpha=self.config.step_at(self.t))
                    at += p.numel()
