"""The outer step of local training: everybody moves from the parameters of the last vote.

    b <- momentum b + d                 d: what was decided, S sign(q)
    x <- x - step (d + momentum b)      Nesterov, as torch.optim.SGD(nesterov=True)

Every worker takes the same steps from the same decisions, so b is the same everywhere and is never sent.
Multiplications and additions are separate operations: a fused one would round differently on another device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.layout import Layout
from signvote.core.scales import spread, values
from signvote.core.trust import State
from signvote.errors import ConfigError, StateError
from signvote.kernels import Planes


class Outer:
    """The outer step, and its momentum.

    Args:
        step: how much of what was decided is applied.
        momentum: of what was decided, in [0, 1).

    >>> outer = Outer(step=0.5, momentum=0.5)
    >>> x = torch.zeros(1)
    >>> for _ in range(2):
    ...     outer.move_(x, torch.ones(1))
    >>> x
    tensor([-1.6250])

    """

    def __init__(self, *, step: float = 0.7, momentum: float = 0.6) -> None:
        if not 0 < step < math.inf:
            raise ConfigError(f"the outer step is {step}; it must be above 0")
        if not 0 <= momentum < 1:
            raise ConfigError(f"the outer momentum is {momentum}; it must lie in [0, 1)")
        self.step = step
        self.momentum = momentum
        self.average: Tensor | None = None  # b; None: nothing was decided yet

    def step_(self, x: Tensor, decision: Planes, codes: Tensor, layout: Layout) -> None:
        """Move all parameters by a decision and the scales of its tensors."""
        scale = spread(values(codes).to(x.device), layout, 0, layout.size)
        signs = unpack_signs(decision, layout.size)
        self.move_(x, scale.to(x.dtype) * signs)

    def move_(self, x: Tensor, direction: Tensor) -> None:
        """Move all parameters by a vector."""
        if self.average is None:
            self.average = torch.zeros_like(x)
        self.average = self.average.to(x)
        self.average.mul_(self.momentum).add_(direction)
        ahead = direction + self.momentum * self.average
        x.sub_(self.step * ahead)

    def state_dict(self) -> State:
        """The momentum's average, if there is one."""
        return {"average": None if self.average is None else self.average.clone()}

    def load_state_dict(self, state: State, like: Tensor) -> None:
        """Resume from a state.

        Args:
            state: of `state_dict`.
            like: the parameters.

        """
        average: Tensor | None = state["average"]
        if average is not None and average.shape != like.shape:
            raise StateError(
                f"the outer momentum has {average.numel()} numbers; the parameters have {like.numel()}"
            )
        self.average = None if average is None else average.to(like).clone()
