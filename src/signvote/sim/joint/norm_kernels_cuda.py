"""The kernels of `norms_cuda` in Triton: no tensor is read more often than necessary.

Images lie channels last, so a tensor is rows of pixels with C channels side by side. A program computes
the partial sums of one sample. A second, small kernel adds up the partial sums of each worker, always in
the same order: nothing depends on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, at, end, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr = 1):
    """Rows at, at + 1, ... before end as float32 (0 outside), and where they lie: each STEP * C after the last."""
    row = at + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    where = row[:, None] * (STEP * C) + channel[None, :]
    mask = (row < end)[:, None] & (channel < C)[None, :]
    value = tl.load(pointer + where, mask=mask, other=0.0)
    return value.to(tl.float32), where, mask


@triton.jit
def sample_moments(x, out, pixels, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of one sample, per channel.

    All values are relative to the first pixel, so that nothing large cancels.
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
    squares = tl.sum(square, 0) - moved * moved * pixels
    out += sample * 2 * C + channel
    tl.store(out, start + moved, mask=channel < C)
    tl.store(out + C, squares, mask=channel < C)


@triton.jit
def worker_moments(
    partial,
    first,
    mean_out,
    scale_out,
    pixels,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and 1 / deviation of all samples of a worker, from those of each sample."""
    worker = tl.program_id(0)
    begin = tl.load(first + worker)
    end = tl.load(first + worker + 1)
    channel = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        total += _tile(partial, at, end, C, ROWS, BLOCK, 2)[0]
    mean = tl.sum(total, 0) / (end - begin)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        value, _, mask = _tile(partial, at, end, C, ROWS, BLOCK, 2)
        away = tl.where(mask, value - mean[None, :], 0.0)
        squares = _tile(partial + C, at, end, C, ROWS, BLOCK, 2)[0]
        total += squares + away * away * pixels
    variance = tl.sum(total, 0) / ((end - begin) * pixels)
    scale = 1 / tl.sqrt(variance + eps)
    tl.store(mean_out + worker * C + channel, mean, mask=channel < C)
    tl.store(scale_out + worker * C + channel, scale, mask=channel < C)


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
def normalize_sample(
    x,
    shortcut,
    y,
    owner,
    mean,
    scale,
    weight,
    bias,
    pixels,
    C: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize one sample."""
    sample = tl.program_id(0).to(tl.int64)
    worker = tl.load(owner + sample)
    m, s, w, b = _constants(worker, mean, scale, weight, bias, C, BLOCK)
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
    g,
    x,
    y,
    at,
    pixels,
    m,
    s,
    w,
    b,
    C: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient before the relu and the normal x of some rows; without a shortcut y need not be read."""
    grad, where, mask = _tile(g, at, pixels, C, ROWS, BLOCK)
    value = _tile(x, at, pixels, C, ROWS, BLOCK)[0]
    normal = (value - m) * s
    if RELU:
        out = (value - m) * s * w + b  # as normalize_sample has it, to the bit
        if SHORTCUT:
            out = _tile(y, at, pixels, C, ROWS, BLOCK)[0]
        grad = tl.where(out > 0, grad, 0.0)
    return grad, tl.where(mask, normal, 0.0), where, mask


@triton.jit
def sample_sums(
    g,
    x,
    y,
    out,
    owner,
    mean,
    scale,
    weight,
    bias,
    pixels,
    C: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the gradient, and of the gradient times the normal x, over one sample."""
    sample = tl.program_id(0).to(tl.int64)
    worker = tl.load(owner + sample)
    m, s, w, b = _constants(worker, mean, scale, weight, bias, C, BLOCK)
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
def worker_sums(
    partial,
    first,
    sums,
    bias_grad,
    weight_grad,
    stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the sums of each worker's samples."""
    worker = tl.program_id(0)
    begin = tl.load(first + worker)
    end = tl.load(first + worker + 1)
    channel = tl.arange(0, BLOCK)
    known = channel < C
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    times = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        plain += _tile(partial, at, end, C, ROWS, BLOCK, 2)[0]
        times += _tile(partial + C, at, end, C, ROWS, BLOCK, 2)[0]
    a = tl.sum(plain, 0)
    b = tl.sum(times, 0)
    tl.store(sums + worker * 2 * C + channel, a, mask=known)
    tl.store(sums + worker * 2 * C + C + channel, b, mask=known)
    place = worker.to(tl.int64) * stride + channel
    tl.store(bias_grad + place, a, mask=known)
    tl.store(weight_grad + place, b, mask=known)


@triton.jit
def input_gradient(
    g,
    x,
    y,
    back,
    through,
    owner,
    first,
    mean,
    scale,
    weight,
    bias,
    sums,
    pixels,
    C: tl.constexpr,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gamma / deviation * (g - mean of g - normal x * mean of g times normal x), means over the worker's."""
    sample = tl.program_id(0).to(tl.int64)
    worker = tl.load(owner + sample)
    m, s, w, b = _constants(worker, mean, scale, weight, bias, C, BLOCK)
    begin = tl.load(first + worker)
    end = tl.load(first + worker + 1)
    each = ((end - begin) * pixels).to(tl.float32)
    channel = tl.arange(0, BLOCK)
    known = channel < C
    plain_sum = tl.load(sums + worker * 2 * C + channel, mask=known, other=0.0)
    times_sum = tl.load(sums + worker * 2 * C + C + channel, mask=known, other=0.0)
    plain = plain_sum[None, :] / each
    times = times_sum[None, :] / each
    skip = sample * pixels * C
    for at in range(0, pixels, ROWS):
        grad, normal, where, mask = _behind_relu(
            g + skip, x + skip, y + skip, at, pixels, m, s, w, b, C, RELU, SHORTCUT, ROWS, BLOCK
        )
        value = (grad - plain - normal * times) * (s * w)
        tl.store(back + skip + where, value, mask=mask)
        if SHORTCUT:
            tl.store(through + skip + where, grad, mask=mask)
