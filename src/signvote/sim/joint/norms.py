"""Norms for all workers at once: layer norm, RMS norm, group norm, and batch norm by worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from signvote.sim.joint.by_worker import check_rows, sum_rows, sums_of
from signvote.sim.joint.crew import Crew, NotTogetherError


def layer_norm(
    crew: Crew,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, in float32."""
    normal = F.layer_norm(input.float(), tuple(normalized_shape), eps=eps)
    return _scaled(crew, normal, weight, bias)


def rms_norm(
    crew: Crew,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm, in float32."""
    normal = F.rms_norm(input.float(), list(normalized_shape), eps=eps)
    return _scaled(crew, normal, weight, None)


def group_norm(
    crew: Crew,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm, in float32."""
    normal = F.group_norm(input.float(), num_groups, eps=eps)
    return _scaled(crew, normal.movedim(1, -1), weight, bias).movedim(-1, 1)


def _scaled(crew: Crew, normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift, as far as there are a weight and a bias."""
    if weight is None:
        return normal.to(crew.dtype)
    check_rows(crew, normal, "a norm")
    if weight.ndim != 1:
        raise NotTogetherError(f"its norm has a weight of {tuple(weight.shape)}; one dimension is supported")
    out: Tensor = _Scale.apply(normal, weight, bias, crew)  # type: ignore[no-untyped-call]
    return out


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, crew: Crew) -> Tensor:
        ctx.crew = crew
        ctx.bias = bias
        ctx.save_for_backward(x, weight)
        y = x * weight
        if bias is not None:
            y = y + bias
        return y.to(crew.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        g = g.float()
        sum_rows(ctx.crew, ctx.crew.room(weight), g * x)
        if ctx.bias is not None:
            sum_rows(ctx.crew, ctx.crew.room(ctx.bias), g)
        return g * weight, None, None, None


def batch_norm(
    crew: Crew,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm of images without running statistics; each worker's samples have their own."""
    if running_mean is not None or weight is None or bias is None or input.ndim != 4:
        raise NotTogetherError(
            "its batch norm keeps running statistics, has no weight and bias, or is not of images"
        )
    return _normed(crew, input, None, weight, bias, eps, relu=False)


def norm_relu(
    crew: Crew, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """relu(batch norm + shortcut)."""
    return _normed(crew, x, shortcut, weight, bias, eps, relu=True)


def _normed(
    crew: Crew, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, eps: float, *, relu: bool
) -> Tensor:
    """Normalize each worker's samples by themselves."""
    check_rows(crew, x, "batch norm")
    x = x.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    out: Tensor = _Norm.apply(x, shortcut, weight, bias, eps, relu, crew)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        relu: bool,
        crew: Crew,
    ) -> Tensor:
        sums = sums_of(crew)
        mean, scale = sums.moments(x, crew.parts, eps)
        y: Tensor = sums.normalize(
            x,
            shortcut,
            mean,
            scale,
            weight,
            bias,
            crew.parts,
            relu,
        )
        ctx.crew = crew
        ctx.relu = relu
        ctx.has_shortcut = shortcut is not None
        ctx.parameters = (weight, bias)
        ctx.save_for_backward(x, y, mean, scale, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        weight, bias = ctx.parameters
        g = g.contiguous(memory_format=torch.channels_last)
        back, through = sums_of(ctx.crew).normalize_backward_(
            ctx.crew.room(weight),
            ctx.crew.room(bias),
            g,
            *ctx.saved_tensors,
            ctx.crew.parts,
            ctx.relu,
            ctx.has_shortcut,
        )
        return back, through, None, None, None, None, None
