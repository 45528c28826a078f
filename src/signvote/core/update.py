"""Parameters step by a decision: x <- (1 - step * decay) x - step * decision (paper, eq. 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.groups import USUAL, Factors
from signvote.kernels import Planes, backend

HALVES = (torch.float16, torch.bfloat16)
RANGE = 2**22  # coordinates that are stepped at a time


@torch.no_grad()
def apply_decision(
    parameters: Mapping[str, Tensor],
    decision: Ballot,
    step: float,
    decay: float = 0.0,
    factors: Mapping[str, Factors] = MappingProxyType({}),
) -> None:
    """Step x <- (1 - step * decay) x - step * decision (paper, eq. 5), each parameter by its own factors.

    Tensors may have any stride; coordinates are counted in row-major order. A decision of no coordinate
    moves nothing, and takes no step of weight decay either.
    """
    if decision.count == 0:
        return
    for segment in decision.layout.segments:
        parameter = parameters[segment.name]
        flat = parameter.detach().contiguous().view(-1)
        its = factors.get(segment.name, USUAL)
        _step_ranges_(flat, decision, segment.start, step * its.step, decay * its.decay)
        if not parameter.is_contiguous():
            parameter.copy_(flat.view(parameter.shape))


def _step_ranges_(
    flat: Tensor,
    decision: Ballot,
    start: int,
    step: float,
    decay: float,
) -> None:
    """Step a vector whose decision starts at a coordinate: planes are copied for one range at a time."""
    for begin in range(0, flat.numel(), RANGE):
        some = flat[begin : begin + RANGE]
        first = start + begin
        skipped = first % 8  # planes start at a byte
        planes = decision.planes(first - skipped, skipped + some.numel())
        there = planes.map(lambda plane: plane.to(flat.device))
        step_(some, there, skipped, step, decay)


def step_(
    parameter: Tensor,
    decision: Planes,
    begin: int,
    step: float,
    decay: float = 0.0,
) -> None:
    """Step one parameter, whose decision starts at coordinate `begin` (paper, eq. 5)."""
    step_each_([(parameter, begin)], decision, step, decay)


@torch.no_grad()
def step_each_(
    targets: Iterable[tuple[Tensor, int]],
    decision: Planes,
    step: float,
    decay: float = 0.0,
) -> None:
    """Step parameters on the decision's device one by one (paper, eq. 5).

    Args:
        targets: each parameter, and the coordinate at which its decision starts.
        decision: of all of them.
        step: by which every coordinate moves.
        decay: the weight decay.

    """
    kernels = backend(decision.signs.device)
    keep = 1 - step * decay
    for parameter, begin in targets:
        flat = parameter.reshape(-1)
        kernels.step_(flat, decision, begin, step, keep)
        if not parameter.is_contiguous():
            parameter.copy_(flat.view(parameter.shape))
