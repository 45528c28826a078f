"""The sums per worker in plain torch, which run anywhere. `layers_cuda` must equal them up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from signvote.sim.joint.parts import Parts


def conv_weights_(
    out: Tensor, x: Tensor, g: Tensor, stride: tuple[int, int], padding: tuple[int, int], parts: Parts
) -> None:
    """Write each worker's gradient of a convolution's weight into `out`, (workers, C, C_in, K, K)."""
    inputs = torch.split(x.float(), parts.sizes)
    outputs = torch.split(g.float(), parts.sizes)
    for row, mine, its in zip(out, inputs, outputs, strict=True):
        gradient = conv2d_weight(mine, row.shape, its, stride, padding)  # type: ignore[no-untyped-call]
        row.copy_(gradient)


def moments(x: Tensor, parts: Parts, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation, (workers, C), of each worker's samples and pixels."""
    split = torch.split(x.float(), parts.sizes)
    mean = torch.stack([part.mean((0, 2, 3)) for part in split])
    var = torch.stack([part.var((0, 2, 3), correction=0) for part in split])
    return mean, torch.rsqrt(var + eps)


def normalize(
    x: Tensor,
    shortcut: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    parts: Parts,
    relu: bool,
) -> Tensor:
    """relu((x - mean) * scale * weight + bias + shortcut); relu and shortcut are optional."""
    normal = _normal(x, mean, scale, parts)
    y = normal * _channels(weight) + _channels(bias)
    if shortcut is not None:
        y = y + shortcut
    if relu:
        y = y.relu()
    return y.to(x.dtype)


def normalize_backward_(
    weight_grad: Tensor,
    bias_grad: Tensor,
    g: Tensor,
    x: Tensor,
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    parts: Parts,
    relu: bool,
    shortcut: bool,
) -> tuple[Tensor, Tensor | None]:
    """Write the gradients of weight and bias. Returns those of x and of the shortcut."""
    g = g.float()
    if relu:
        g = torch.where(y > 0, g, 0)
    normal = _normal(x, mean, scale, parts)
    by_sample = g.sum((2, 3))
    bias_grad.copy_(parts.sums(by_sample))
    by_sample_times_normal = (g * normal).sum((2, 3))
    weight_grad.copy_(parts.sums(by_sample_times_normal))
    pixels = x.shape[2] * x.shape[3]
    each = torch.tensor(parts.sizes, device=x.device)[:, None] * pixels
    owner = parts.owner.long()
    mean_g = (bias_grad / each)[owner]
    mean_times_normal = (weight_grad / each)[owner]
    back = g - _channels(mean_g) - normal * _channels(mean_times_normal)
    back = back * _channels(scale[owner] * weight)
    through = g.to(x.dtype) if shortcut else None
    return back.to(x.dtype), through


def _normal(x: Tensor, mean: Tensor, scale: Tensor, parts: Parts) -> Tensor:
    """(x - mean) * scale, with each sample's worker's own."""
    owner = parts.owner.long()
    centered = x.float() - _channels(mean[owner])
    return centered * _channels(scale[owner])


def _channels(values: Tensor) -> Tensor:
    """(C,) or (n, C) so that it multiplies (n, C, H, W)."""
    return values[..., None, None]
