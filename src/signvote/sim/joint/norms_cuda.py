"""The sums of `layers_plain` for batch norm in Triton: every tensor is read as often as the mathematics asks.

Images lie channels last, so a tensor is rows of pixels with C channels side by side. A program takes one
sample and leaves partial sums; a second, small kernel adds up what belongs to each worker, always in the
same order: nothing depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from signvote.sim.joint.parts import Parts

TILE = 4096  # elements that a program holds at a time


@triton.jit
def _tile(pointer, at, end, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr = 1):
    """Rows at, at + 1, ... before end as float32 (0 outside), and where they lie: each STEP * C after the last."""
    row, channel = at + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = row[:, None] * (STEP * C) + channel[None, :]
    mask = (row < end)[:, None] & (channel < C)[None, :]
    return tl.load(pointer + where, mask=mask, other=0.0).to(tl.float32), where, mask


@triton.jit
def _sample_moments(x, out, pixels, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of one sample, per channel.

    Everything is taken relative to the first pixel, so that nothing large cancels.
    """
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    x += sample * pixels * C
    start = tl.load(x + channel, mask=channel < C, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    square = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, pixels, ROWS):
        value, _, mask = _tile(x, at, pixels, C, ROWS, BLOCK)
        value = tl.where(mask, value - start[None, :], 0.0)
        total += value
        square += value * value
    moved = tl.sum(total, 0) / pixels
    out += sample * 2 * C + channel
    tl.store(out, start + moved, mask=channel < C)
    tl.store(out + C, tl.sum(square, 0) - moved * moved * pixels, mask=channel < C)


@triton.jit
def _worker_moments(
    partial, first, mean_out, scale_out, pixels, eps,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of all samples of a worker, from those of each sample."""
    worker = tl.program_id(0)
    begin, end = tl.load(first + worker), tl.load(first + worker + 1)
    channel = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        total += _tile(partial, at, end, C, ROWS, BLOCK, 2)[0]
    mean = tl.sum(total, 0) / (end - begin)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        value, _, mask = _tile(partial, at, end, C, ROWS, BLOCK, 2)
        away = tl.where(mask, value - mean[None, :], 0.0)
        total += _tile(partial + C, at, end, C, ROWS, BLOCK, 2)[0] + away * away * pixels
    variance = tl.sum(total, 0) / ((end - begin) * pixels)
    tl.store(mean_out + worker * C + channel, mean, mask=channel < C)
    tl.store(scale_out + worker * C + channel, 1 / tl.sqrt(variance + eps), mask=channel < C)


@triton.jit
def _constants(worker, mean, scale, weight, bias, C: tl.constexpr, BLOCK: tl.constexpr):
    """Mean, 1 / deviation, gamma and beta of a worker, each (1, channels)."""
    channel = tl.arange(0, BLOCK)
    known = channel < C
    m = tl.load(mean + worker * C + channel, mask=known, other=0.0)
    s = tl.load(scale + worker * C + channel, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    return m[None, :], s[None, :], w[None, :], b[None, :]


@triton.jit
def _normalize(
    x, shortcut, y, owner, mean, scale, weight, bias, pixels,
    C: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    m, s, w, b = _constants(tl.load(owner + sample), mean, scale, weight, bias, C, BLOCK)
    skip = sample * pixels * C
    for at in range(0, pixels, ROWS):
        value, where, mask = _tile(x + skip, at, pixels, C, ROWS, BLOCK)
        value = (value - m) * s * w + b
        if SHORTCUT:
            value += _tile(shortcut + skip, at, pixels, C, ROWS, BLOCK)[0]
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + skip + where, value, mask=mask)


@triton.jit
def _behind_relu(
    g, x, y, at, pixels, m, s, w, b,
    C: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient before the relu and the normal x of some rows; without a shortcut y need not be read."""
    grad, where, mask = _tile(g, at, pixels, C, ROWS, BLOCK)
    value = _tile(x, at, pixels, C, ROWS, BLOCK)[0]
    normal = (value - m) * s
    if RELU:
        out = (value - m) * s * w + b  # as _normalize has it, to the bit
        if SHORTCUT:
            out = _tile(y, at, pixels, C, ROWS, BLOCK)[0]
        grad = tl.where(out > 0, grad, 0.0)
    return grad, tl.where(mask, normal, 0.0), where, mask


@triton.jit
def _sample_sums(
    g, x, y, out, owner, mean, scale, weight, bias, pixels,
    C: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of the gradient times the normal x, over one sample."""
    sample = tl.program_id(0).to(tl.int64)
    m, s, w, b = _constants(tl.load(owner + sample), mean, scale, weight, bias, C, BLOCK)
    skip = sample * pixels * C
    channel = tl.arange(0, BLOCK)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    times = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, pixels, ROWS):
        grad, normal, _, _ = _behind_relu(
            g + skip, x + skip, y + skip, at, pixels, m, s, w, b, C, RELU, SHORTCUT, ROWS, BLOCK
        )
        plain += grad
        times += grad * normal
    out += sample * 2 * C + channel
    tl.store(out, tl.sum(plain, 0), mask=channel < C)
    tl.store(out + C, tl.sum(times, 0), mask=channel < C)


@triton.jit
def _worker_sums(
    partial, first, sums, bias_grad, weight_grad, stride,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0)
    begin, end = tl.load(first + worker), tl.load(first + worker + 1)
    channel = tl.arange(0, BLOCK)
    known = channel < C
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    times = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        plain += _tile(partial, at, end, C, ROWS, BLOCK, 2)[0]
        times += _tile(partial + C, at, end, C, ROWS, BLOCK, 2)[0]
    a, b = tl.sum(plain, 0), tl.sum(times, 0)
    tl.store(sums + worker * 2 * C + channel, a, mask=known)
    tl.store(sums + worker * 2 * C + C + channel, b, mask=known)
    tl.store(bias_grad + worker.to(tl.int64) * stride + channel, a, mask=known)
    tl.store(weight_grad + worker.to(tl.int64) * stride + channel, b, mask=known)


@triton.jit
def _input_gradient(
    g, x, y, back, through, owner, first, mean, scale, weight, bias, sums, pixels,
    C: tl.constexpr, RELU: tl.constexpr, SHORTCUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gamma / deviation * (g - mean of g - normal x * mean of g times normal x), means over the worker's."""
    sample = tl.program_id(0).to(tl.int64)
    worker = tl.load(owner + sample)
    m, s, w, b = _constants(worker, mean, scale, weight, bias, C, BLOCK)
    each = ((tl.load(first + worker + 1) - tl.load(first + worker)) * pixels).to(tl.float32)
    channel = tl.arange(0, BLOCK)
    plain = tl.load(sums + worker * 2 * C + channel, mask=channel < C, other=0.0)[None, :] / each
    times = tl.load(sums + worker * 2 * C + C + channel, mask=channel < C, other=0.0)[None, :] / each
    skip = sample * pixels * C
    for at in range(0, pixels, ROWS):
        grad, normal, where, mask = _behind_relu(
            g + skip, x + skip, y + skip, at, pixels, m, s, w, b, C, RELU, SHORTCUT, ROWS, BLOCK
        )
        tl.store(back + skip + where, (grad - plain - normal * times) * (s * w), mask=mask)
        if SHORTCUT:
            tl.store(through + skip + where, grad, mask=mask)


def _shape(x: Tensor) -> tuple[int, dict[str, int]]:
    """Pixels of a sample, and the sizes that kernels are compiled for."""
    c, pixels = x.shape[1], x.shape[2] * x.shape[3]
    block = triton.next_power_of_2(c)
    rows = min(max(1, TILE // block), triton.next_power_of_2(pixels))
    return pixels, {"C": c, "ROWS": rows, "BLOCK": block}


def _few(shape: dict[str, int]) -> dict[str, int]:
    """The same for a program that has a worker's samples to itself: few of them, so each takes more."""
    return shape | {"ROWS": max(1, 2 * TILE // shape["BLOCK"])}


def moments(x: Tensor, parts: Parts, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation of each channel over each worker's own samples: (workers, channels) each."""
    (pixels, shape), c = _shape(x), x.shape[1]
    partial = torch.empty(parts.samples, 2, c, device=x.device)
    mean, scale = torch.empty(2, len(parts.sizes), c, device=x.device)
    _sample_moments[parts.samples,](x, partial, pixels, **shape)
    _worker_moments[len(parts.sizes),](
        partial, parts.first, mean, scale, pixels, eps, **_few(shape), num_warps=8
    )
    return mean, scale


def normalize(
    x: Tensor, shortcut: Tensor | None, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor,
    parts: Parts, relu: bool,
) -> Tensor:  # fmt: skip
    """Batch norm by worker, then the shortcut if there is one, then relu if asked for, in one pass."""
    (pixels, shape), y = _shape(x), torch.empty_like(x)
    constants = parts.owner, mean, scale, weight, bias
    _normalize[parts.samples,](
        x, x if shortcut is None else shortcut, y, *constants, pixels,
        RELU=relu, SHORTCUT=shortcut is not None, **shape,
    )  # fmt: skip
    return y


def normalize_backward_(
    weight_grad: Tensor, bias_grad: Tensor, g: Tensor, x: Tensor, y: Tensor, mean: Tensor, scale: Tensor,
    weight: Tensor, bias: Tensor, parts: Parts, relu: bool, shortcut: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of input and shortcut, from that of the output, g; those of weight and bias are written by worker."""
    (pixels, shape), c, workers = _shape(x), x.shape[1], len(parts.sizes)
    kind = {"RELU": relu, "SHORTCUT": shortcut, **shape}
    constants = mean, scale, weight, bias
    partial = torch.empty(parts.samples, 2, c, device=x.device)
    sums = torch.empty(workers, 2, c, device=x.device)
    _sample_sums[parts.samples,](g, x, y, partial, parts.owner, *constants, pixels, **kind)
    _worker_sums[workers,](
        partial, parts.first, sums, bias_grad, weight_grad, weight_grad.stride(0), **_few(shape), num_warps=8
    )
    back, through = torch.empty_like(x), torch.empty_like(x) if shortcut else None
    _input_gradient[parts.samples,](
        g, x, y, back, x if through is None else through, parts.owner, parts.first, *constants, sums, pixels,
        **kind,
    )  # fmt: skip
    return back, through
