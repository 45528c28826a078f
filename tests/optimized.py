"""A model, its batches and a loop around an optimizer that votes: for the tests in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from signvote import Vote
from tests.ranks import INPUTS, deep


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return deep().to(dtype)


def loss(model: nn.Module, t: int, samples: int = 8) -> Tensor:
    random = torch.Generator().manual_seed(t)
    inputs = torch.randn(samples, INPUTS, generator=random)
    labels = torch.randint(3, (samples,), generator=random)
    outputs = model(inputs.to(next(model.parameters()).dtype))
    return nn.functional.cross_entropy(outputs.float(), labels)


def backward(model: nn.Module, t: int) -> None:
    loss(model, t).backward()  # type: ignore[no-untyped-call]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def trained(
    model: nn.Module,
    optimizer: Vote,
    rounds: range,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> Tensor:
    for t in rounds:
        optimizer.zero_grad()
        backward(model, t)
        between(model)
        optimizer.step()
    return flat(model)


def clipped_to(norm: float) -> Callable[[nn.Module], object]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)
