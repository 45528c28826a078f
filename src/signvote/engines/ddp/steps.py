"""Watches the optimizer's step: what a script does with a decision, no vote can see.

After a vote every `.grad` is +1, -1 or 0, and the `lr` of SGD is the step. A script written for gradients spoils that
without an error of its own:

    another optimizer, or momentum in it       rescales or averages signs                      a warning
    a learning rate for gradients, as 0.1      moves every weight by 0.1 in each step          a warning
    gradients changed before the step          clip_grad_norm_(1.0) divides by sqrt(N)         an error
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from signvote.errors import EngineError

LARGE = 0.03  # a learning rate above this is no step of a sign
FIRST = 3  # rounds after the start that are looked at


class StepWatch:
    """Looks at every optimizer that steps by a decision.

    Args:
        parameters: that the votes are about.
        check_every: rounds between two looks, after the first three rounds; 0: gradients are never looked at.

    """

    def __init__(self, parameters: Iterable[Tensor], check_every: int) -> None:
        self._mine = {id(parameter) for parameter in parameters}
        self._check_every = check_every
        self._rounds = 0
        self._sizes: tuple[float, ...] = ()  # that a decision may have; none: no decision waits for a step
        self._told: set[str] = set()
        _call_before_steps(self)

    def voted(self, scale: float) -> None:
        """Note a decision; `scale` is AMP's, which the scaler or the optimizer divides by."""
        self._rounds += 1
        self._sizes = (1.0, scale)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that is about to step."""
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [p for p in everything if id(p) in self._mine]
        if not parameters or not self._sizes:
            return
        allowed = self._sizes
        self._sizes = ()
        if not self._is_due():
            return
        for text in _unusual(optimizer):
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, stacklevel=4)
        if self._check_every:
            _check_gradients(parameters, allowed)

    def _is_due(self) -> bool:
        """Whether this round is looked at: a look waits for the GPU."""
        every = self._check_every
        return self._rounds <= FIRST or (every > 0 and self._rounds % every == 0)


def _call_before_steps(watch: StepWatch) -> None:
    """Have torch call `look` before every step, as long as the watch lives."""
    alive = weakref.ref(watch)

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = alive()
        if found is not None:
            found.look(optimizer)

    handle = register_optimizer_step_pre_hook(before)
    weakref.finalize(watch, handle.remove)


def _unusual(optimizer: torch.optim.Optimizer) -> list[str]:
    """What will not do with a decision what it does with a gradient."""
    found = []
    if not isinstance(optimizer, torch.optim.SGD):
        name = type(optimizer).__name__
        found.append(
            f"{name} rescales a decision, which is +1 or -1; use torch.optim.SGD, whose lr is the step"
        )
    elif any(group["momentum"] for group in optimizer.param_groups):
        found.append(
            "the optimizer's momentum averages decisions; leave it at 0, and give momentum to VoteState"
        )
    largest = max(float(group["lr"]) for group in optimizer.param_groups)
    if largest > LARGE:
        found.append(too_large(largest))
    return found


def too_large(lr: float) -> str:
    """What a learning rate that is meant for gradients does with signs."""
    return f"an lr of {lr:g} moves every weight by {lr:g} in each step; 1e-3 is a good start"


def _check_gradients(parameters: Iterable[Tensor], allowed: tuple[float, ...]) -> None:
    """Raise if the smallest tensor's gradients are not what the vote left."""
    gradients = [p.grad for p in parameters if p.grad is not None and p.numel()]
    if not gradients:
        return
    sizes = min(gradients, key=Tensor.numel).detach().abs()
    sizes = sizes[sizes > 0].double()  # 0: not decided
    if not sizes.numel():
        return
    smallest, largest = (float(size) for size in sizes.aminmax())
    for size in allowed:
        if _is_near(smallest, size) and _is_near(largest, size):
            return
    span = f"{largest:.3g}"
    if smallest < largest:
        span = f"{smallest:.3g} to {span}"
    raise EngineError(
        f"gradients were changed between the vote and the step: their size is {span}, the vote left 1. Remove"
        " clip_grad_norm_ and the like: a sign has no scale, and the optimizer's lr is the step"
    )


def _is_near(size: float, wanted: float) -> bool:
    """Whether two sizes differ by rounding only, as after AMP's scale."""
    return math.isclose(size, wanted, rel_tol=0.01)
