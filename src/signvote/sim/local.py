"""Workers that take local steps: each trains by itself for a while, and votes on the change of its parameters.

    start = x - e               x: the parameters of the last vote, e: what this worker's votes have left out
    change = start - inner(start)       over H steps of its own optimizer

The model is shared: a worker's parameters are copied back before the next worker's turn. The optimizers, with their
state, stay with their workers; they are PyTorch's, so that ranks of torch.distributed compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from signvote.core.ballot import Ballot, limits_of, scales_of
from signvote.core.groups import Factors, factors
from signvote.core.outer import Outer
from signvote.core.parts import clipped
from signvote.core.scales import own_start
from signvote.core.vote import Votes
from signvote.kernels import Planes
from signvote.sim.config import Config
from signvote.sim.gradients import Gradients
from signvote.sim.phases import Phases
from signvote.sim.sparseloco import compressed
from signvote.sim.workers import Assignment, OneByOne


class Locally(OneByOne):
    """Workers one after the other, each with its own optimizer for local steps."""

    def __init__(self, work: Assignment, gradients: Gradients, phases: Phases) -> None:
        super().__init__(work, gradients, phases)
        config = work.config
        self._factors = factors(gradients.model, decays=config.decays, steps=config.steps)
        self.optimizers = [self._optimizer(config) for _ in range(config.workers)]
        self._unsent: dict[int, Tensor] = {}  # worker -> residual, of `sparseloco`
        self._codes: Tensor | None = None  # scales of the last decision; None: it decided nothing

    def _optimizer(self, config: Config) -> Optimizer:
        """The optimizer of one worker: groups of parameters with the same factors."""
        groups: dict[Factors, list[Tensor]] = {}
        for name, its in self._factors.items():
            groups.setdefault(its, []).append(self.gradients.parameters[name])
        settings = [
            {"params": params, "weight_decay": config.decay * its.decay} for its, params in groups.items()
        ]
        if config.inner == "sgd":
            return SGD(settings, lr=config.step, momentum=config.momentum)
        return AdamW(settings, lr=config.step, betas=(config.momentum, config.beta2))

    def votes(self, t: int, voters: Sequence[int]) -> Votes:
        """See Workers. The optimizer of a worker whose change is not finite starts anew."""
        votes = super().votes(t, voters)
        for row, m in enumerate(votes.workers):
            if votes.present is not None and not votes.present[row]:
                self.optimizers[m].state.clear()
        return votes

    def _gradient(self, worker: int, t: int) -> Tensor:
        """The change over the local steps of a worker, in place of a gradient: a view, valid until the next call."""
        x = self.gradients.x
        voted = x.clone()
        start = own_start(voted, self.encoders[worker].memory.residual)
        x.copy_(start)
        steps = self.work.config.local_steps or 1
        for number in range((t - 1) * steps + 1, t * steps + 1):
            self._local_step(worker, number, t)
        change = start - x
        x.copy_(voted)
        if self.work.config.rule == "sparseloco":
            residual = self._unsent.get(worker, torch.zeros_like(change))
            change, self._unsent[worker] = compressed(change, residual)
        return self.gradients.flat.copy_(change)

    def _local_step(self, worker: int, number: int, t: int) -> None:
        """One step of a worker's optimizer; steps are counted over all rounds, from 1."""
        config = self.work.config
        with self.phases.timed("gradients"):
            gradient = self.gradients.of(
                self.work.batch(worker, number),
                self.work.seed(worker, number),
                self.work.relabels(worker, t),
            )
            if config.clip is not None:
                gradient.copy_(clipped(gradient, config.clip))
            optimizer = self.optimizers[worker]
            step = config.local_step_at(number)
            for group, its in zip(optimizer.param_groups, dict.fromkeys(self._factors.values()), strict=True):
                group["lr"] = step * its.step
            optimizer.step()

    def _follow(self, votes: Votes, decision: Ballot) -> None:
        """Note the scales of a decision. What was not counted goes back to its worker."""
        is_decided = decision.claims is not None
        self._codes = scales_of(decision) if is_decided else None
        for row, m in enumerate(votes.workers):
            if votes.present is None or votes.present[row]:
                planes = votes.planes.map(lambda plane: plane[row])  # noqa: B023
                self.encoders[m].hear(planes, limits_of(decision) if m in decision.counted else None)

    def move_(self, outer: Outer, decision: Planes) -> None:
        """See Workers. If nothing was decided, nothing moves."""
        if self._codes is not None:
            outer.step_(self.gradients.x, decision, self._codes, self.layout)

    def local_state(self) -> dict[str, Any]:
        """See Workers."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "unsent": dict(self._unsent),
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """See Workers."""
        saved: Sequence[dict[str, Any]] = state["optimizers"]
        for optimizer, its in zip(self.optimizers, saved, strict=True):
            optimizer.load_state_dict(its)
        like = self.gradients.x
        self._unsent = {int(m): residual.to(like) for m, residual in state["unsent"].items()}
