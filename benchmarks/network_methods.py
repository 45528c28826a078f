"""The methods of `network.py`: how each turns the gradients of four hosts into steps, and the settings it may try.

All methods of a task have the same number of settings: 4 for the perceptron, 3 for the GPT. `rate` is the learning
rate. float32, fp16, PowerSGD and local steps, with votes or without, use the own optimizer of the task: SGD with
momentum 0.9 for the perceptron, AdamW for the GPT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from benchmarks.network_tasks import Goal
from signvote.engines.ddp import LocalVote, Vote, VoteState, noop_hook, vote_hook

Setting = dict[str, float]


class Made:
    """A model that trains, and everything that a script would add for the method.

    Args:
        module: to be called.
        optimizer: or a LocalVote; its step is the whole step.
        every: steps between two rounds of communication; parameters agree after each such round.

    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | LocalVote, every: int = 1) -> None:
        self.module = module
        self.optimizer = optimizer
        self.every = every

    @property
    def inside(self) -> nn.Module:
        """The model itself."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def scale(self, factor: float) -> None:
        """Scale the learning rate."""
        for group in self.optimizer.param_groups:
            group.setdefault("full_lr", group["lr"])
            group["lr"] = group["full_lr"] * factor


# ---- gradients in floating point ---------------------------------------------------------------------


def float32(model: nn.Module, goal: Goal, setting: Setting, seed: int) -> Made:
    ddp = DistributedDataParallel(model)
    return Made(ddp, goal.inner(ddp.parameters(), setting["rate"]))


def hooked(
    model: nn.Module,
    goal: Goal,
    setting: Setting,
    seed: int,
    *,
    hook: Callable[..., Any],
    state: object = None,
) -> Made:
    """DDP with a hook of PyTorch's, or with one that sends nothing."""
    made = float32(model, goal, setting, seed)
    made.module.register_comm_hook(state, hook)  # type: ignore[operator]
    return made


def powersgd(model: nn.Module, goal: Goal, setting: Setting, seed: int, *, rank: int) -> Made:
    """In one bucket: with several, callbacks start collectives in different orders on different ranks, and gloo ends
    the process.
    """
    ddp = DistributedDataParallel(model, bucket_cap_mb=200)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    return Made(ddp, goal.inner(ddp.parameters(), setting["rate"]))


# ---- local steps in floating point -------------------------------------------------------------------


class Averaging(Optimizer):
    """Every host steps by itself; every so often the mean of what they moved is an outer gradient (DiLoCo).

    With an outer step of 1 and no momentum the parameters are averaged.

    Args:
        inner: the optimizer of a host.
        every: steps between two rounds.
        step: the outer one.
        momentum: Nesterov's, of the outer step.

    """

    def __init__(self, inner: Optimizer, every: int, step: float, momentum: float) -> None:
        self.inner = inner
        self.every = every
        self.param_groups = inner.param_groups
        self.parameters = [p for group in inner.param_groups for p in group["params"]]
        self.anchor = self._flat()
        self.velocity = torch.zeros_like(self.anchor)
        self.outer = step, momentum
        self.taken = 0

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See Optimizer."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """An inner step, and after the last of a round the outer one."""
        self.inner.step()
        self.taken += 1
        if self.taken % self.every:
            return
        moved = self.anchor - self._flat()
        dist.all_reduce(moved)
        moved /= dist.get_world_size()
        step, momentum = self.outer
        self.velocity.mul_(momentum).add_(moved)
        self.anchor.sub_(moved.add_(self.velocity, alpha=momentum), alpha=step)
        places = torch.split(self.anchor, [p.numel() for p in self.parameters])
        for parameter, place in zip(self.parameters, places, strict=True):
            parameter.copy_(place.view_as(parameter))


def local(model: nn.Module, goal: Goal, setting: Setting, seed: int, *, every: int) -> Made:
    inner = goal.inner(model.parameters(), setting["rate"])
    return Made(model, Averaging(inner, every, setting["outer"], setting["momentum"]), every)


# ---- votes -------------------------------------------------------------------------------------------


def vote(model: nn.Module, goal: Goal, setting: Setting, seed: int, *, overlap: bool = False) -> Made:
    ddp = DistributedDataParallel(model)
    optimizer = Vote(ddp.parameters(), setting["rate"], setting["momentum"], run=seed, overlap=overlap)
    return Made(ddp, optimizer)


def sparse(model: nn.Module, goal: Goal, setting: Setting, seed: int) -> Made:
    """Votes on few coordinates; what is not voted on is kept for later."""
    ddp = DistributedDataParallel(model)
    optimizer = Vote(
        ddp.parameters(),
        setting["rate"],
        setting["momentum"],
        top=setting["top"],
        feedback=True,
        zeros="abstain",
        run=seed,
    )
    return Made(ddp, optimizer)


def local_vote(model: nn.Module, goal: Goal, setting: Setting, seed: int, *, every: int) -> Made:
    """Local steps, and then a vote."""
    inner = goal.inner(model.parameters(), setting["rate"])
    optimizer = LocalVote(inner, every, step=setting["outer"], momentum=setting["momentum"], run=seed)
    return Made(model, optimizer, every)


def hook(model: nn.Module, goal: Goal, setting: Setting, seed: int) -> Made:
    """Votes have the momentum, so SGD has none."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(VoteState(ddp, rule="weighted", momentum=setting["momentum"], run=seed), vote_hook)
    return Made(ddp, SGD(ddp.parameters(), lr=setting["rate"]))


METHODS: dict[str, Callable[[nn.Module, Goal, Setting, int], Made]] = {
    "float32": float32,
    "fp16": partial(hooked, hook=fp16_compress_hook),
    "powersgd-1": partial(powersgd, rank=1),
    "powersgd-2": partial(powersgd, rank=2),
    "powersgd-4": partial(powersgd, rank=4),
    "local-8": partial(local, every=8),
    "local-32": partial(local, every=32),
    "vote": vote,
    "sparse": sparse,
    "vote-8": partial(local_vote, every=8),
    "vote-32": partial(local_vote, every=32),
    # Only their speed is measured:
    "vote-overlap": partial(vote, overlap=True),
    "hook": hook,
    "noop": partial(hooked, hook=noop_hook),  # sends nothing: how fast a step could be
}

# ---- what each may try -------------------------------------------------------------------------------


def rates(*values: float) -> list[Setting]:
    return [{"rate": rate} for rate in values]


def grid(**values: tuple[float, ...]) -> list[Setting]:
    """All combinations."""
    settings: list[Setting] = [{}]
    for name, its_values in values.items():
        settings = [{**setting, name: value} for setting in settings for value in its_values]
    return settings


def outer(*its_rates: float) -> list[Setting]:
    """Plain averaging, and an outer step with momentum."""
    forms = ({"outer": 1.0, "momentum": 0.0}, {"outer": 0.7, "momentum": 0.6})
    return [{"rate": rate, **form} for rate in its_rates for form in forms]


def averages(*its_rates: float) -> list[Setting]:
    return [{"rate": rate, "outer": 1.0, "momentum": 0.0} for rate in its_rates]


SGD_RATES = rates(0.02, 0.05, 0.1, 0.2)
ADAMW_RATES = rates(1.5e-3, 3e-3, 6e-3)
GRIDS: dict[str, dict[str, list[Setting]]] = {
    "mnist": {
        **dict.fromkeys(("float32", "fp16", "powersgd-1", "powersgd-2", "powersgd-4"), SGD_RATES),
        **dict.fromkeys(("local-8", "local-32", "vote-8", "vote-32"), outer(0.05, 0.1)),
        "vote": grid(rate=(3e-4, 6e-4), momentum=(0.8, 0.9)),
        "sparse": grid(top=(0.01, 0.03), rate=(1e-3, 3e-3), momentum=(0.8,)),
    },
    "gpt": {
        **dict.fromkeys(("float32", "fp16", "powersgd-1", "powersgd-2", "powersgd-4"), ADAMW_RATES),
        **dict.fromkeys(("local-8", "local-32"), averages(1.5e-3, 3e-3, 6e-3)),
        **dict.fromkeys(("vote-8", "vote-32"), averages(5e-4, 1e-3, 2e-3)),
        "vote": grid(rate=(6e-4, 1.2e-3, 2.4e-3), momentum=(0.8,)),
        "sparse": grid(top=(0.03,), rate=(1e-3, 3e-3, 9e-3), momentum=(0.8,)),
    },
}
GRIDS["mnist-large"] = GRIDS["mnist"]
SPEED_ONLY = {"vote-overlap": "vote", "hook": "vote", "noop": "float32"}  # whose settings these have


def settings_of(goal: str, method: str) -> list[Setting]:
    """What a method may try on a task."""
    return GRIDS[goal][SPEED_ONLY.get(method, method)]
