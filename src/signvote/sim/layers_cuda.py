"""The sums of `layers.Plain` in Triton: each reads its tensors once and nothing depends on timing.

Images lie channels last, so a tensor is rows of pixels with C channels side by side. A program takes one
sample (batch norm) or one piece of a worker's samples (convolutions) and leaves partial sums; a second,
small kernel adds up what belongs to each worker, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from signvote.sim.layers import Parts

TILE = 4096  # elements that a program of batch norm holds at a time
PROGRAMS = 600  # of a convolution's sums, about: enough to fill a large GPU, few partial sums


# ---- convolutions --------------------------------------------------------------------------------


def _products(x: Tensor) -> str:
    """How exactly products of float32 are taken: as convolutions of cuDNN take them."""
    exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "ieee" if exact else "tf32"


@triton.jit
def _convolve(
    x, weight, y, pixels,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[pixel, c] = sum over taps and c_in of x[pixel + tap, c_in] * weight[tap, c_in, c]."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, C)
    row, col = pixel // W % H, pixel % W
    total = tl.zeros([BLOCK, C], tl.float32)
    for tap in range(SIDE * SIDE):
        down, right = tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2
        fits = (
            (row + down >= 0) & (row + down < H) & (col + right >= 0) & (col + right < W) & (pixel < pixels)
        )
        where = (pixel + down * W + right).to(tl.int64)[:, None] * C + channel[None, :]
        mine = tl.load(x + where, mask=fits[:, None], other=0.0)
        its = tl.load(weight + (tap * C + channel[:, None]) * C + channel[None, :])
        total = tl.dot(mine, its, total, input_precision=PRECISION)
    where = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y + where, total, mask=(pixel < pixels)[:, None])


def is_narrow(weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> bool:
    """Whether `narrow` does this convolution, faster than cuDNN, half of whose tile 16 channels leave empty."""
    c, c_in, k_h, k_w = weight.shape
    same = k_h == k_w and k_h % 2 == 1 and padding == (k_h // 2, k_h // 2) and stride == (1, 1)
    return same and c == c_in == 16


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of 16 channels to 16 that keeps the size of the image."""
    y, (samples, c, h, w) = torch.empty_like(x), x.shape
    by_tap = weight.permute(2, 3, 1, 0).contiguous()
    pixels = samples * h * w
    grid = (triton.cdiv(pixels, 128),)
    _convolve[grid](
        x, by_tap, y, pixels, h, w, c, weight.shape[2], 128, _products(x), num_warps=4, num_stages=3
    )
    return y


def narrow_backward(g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input: the same with taps mirrored and channels exchanged."""
    return narrow(g, weight.transpose(0, 1).flip(2, 3))


@triton.jit
def _weight_pieces(
    x, g, out, pieces,
    H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    KERNEL_W: tl.constexpr, C_IN: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_PIXELS: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Sum over a piece's pixels of g[pixel, c] * x[the input pixel that column j of the kernel meets]."""
    piece = tl.program_id(0)
    begin = tl.load(pieces + 2 * piece).to(tl.int64)
    samples = tl.load(pieces + 2 * piece + 1).to(tl.int64) - begin
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(
        0, BLOCK_COLUMNS
    )  # (kernel row, kernel column, c_in)
    tap = column // C_IN
    down, right = tap // KERNEL_W - PAD_H, tap % KERNEL_W - PAD_W
    reach = (down * W + right) * C_IN + column % C_IN
    if C_IN % 16 == 0:
        reach = tl.max_contiguous(tl.multiple_of(reach, 16), 16)
    channel = tl.arange(0, BLOCK_C)
    x += begin * H * W * C_IN
    g += begin * OUT_H * OUT_W * C
    total = tl.zeros([BLOCK_C, BLOCK_COLUMNS], tl.float32)
    pixels = (samples * OUT_H * OUT_W).to(tl.int32)
    for at in range(0, pixels, BLOCK_PIXELS):
        pixel = at + tl.arange(0, BLOCK_PIXELS)
        sample, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
        row, col = place // OUT_W * STRIDE_H, place % OUT_W * STRIDE_W
        inside = pixel < pixels
        its = tl.load(
            g + pixel[:, None] * C + channel[None, :],
            mask=inside[:, None] & (channel < C)[None, :], other=0.0,
        )  # fmt: skip
        home = (sample * (H * W) + row * W + col) * C_IN
        fits_down = (row[:, None] + down[None, :] >= 0) & (row[:, None] + down[None, :] < H)
        fits_right = (col[:, None] + right[None, :] >= 0) & (col[:, None] + right[None, :] < W)
        known = inside[:, None] & (column < COLUMNS)[None, :]
        mine = tl.load(x + home[:, None] + reach[None, :], mask=known & fits_down & fits_right, other=0.0)
        if SPLIT:  # a float32 as the sum of two bfloat16: three products, far less traffic than one of tf32
            its_head, mine_head = its.to(tl.bfloat16), mine.to(tl.bfloat16)
            its_tail = (its - its_head.to(tl.float32)).to(tl.bfloat16)
            mine_tail = (mine - mine_head.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(tl.trans(its_head), mine_head, total)
            total = tl.dot(tl.trans(its_tail), mine_head, total)
            total = tl.dot(tl.trans(its_head), mine_tail, total)
        else:
            total = tl.dot(tl.trans(its), mine, total, input_precision=PRECISION)
    where = (piece.to(tl.int64) * C + channel[:, None]) * COLUMNS + column[None, :]
    tl.store(out + where, total, mask=(channel < C)[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _weight_sums(
    partial, first, out, stride,
    C_IN: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of a worker; (c, tap, c_in) becomes (c, c_in, tap)."""
    worker = tl.program_id(0)
    begin, end = tl.load(first + worker), tl.load(first + worker + 1)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        where = (at + row).to(tl.int64)[:, None] * SIZE + e[None, :]
        total += tl.load(partial + where, mask=(at + row < end)[:, None] & (e < SIZE)[None, :], other=0.0)
    c, column = e // (TAPS * C_IN), e % (TAPS * C_IN)
    place = (c * C_IN + column % C_IN) * TAPS + column // C_IN
    tl.store(out + worker.to(tl.int64) * stride + place, tl.sum(total, 0), mask=e < SIZE)


def conv_weights_(
    out: Tensor, x: Tensor, g: Tensor, stride: tuple[int, int], padding: tuple[int, int], parts: Parts
) -> None:
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
    workers, c, c_in, k_h, k_w = out.shape
    columns = c_in * k_h * k_w
    block = min(128, max(16, triton.next_power_of_2(columns)))
    blocks = triton.cdiv(columns, block)
    pieces, first = parts.pieces(max(1, parts.samples * blocks // PROGRAMS))
    partial = torch.empty(len(pieces), c * columns, device=x.device)
    products, channels = _products(x), max(16, triton.next_power_of_2(c))
    split = x.dtype == torch.float32 and products == "tf32" and channels >= 64
    _weight_pieces[len(pieces), blocks](
        x, g, partial, pieces,
        *x.shape[2:], *g.shape[2:], *stride, *padding, k_w, c_in, c, columns,
        channels, block, 32, products, split,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    size = c * columns
    _weight_sums[workers, triton.cdiv(size, 256)](
        partial, first, out, out.stride(0), c_in, k_h * k_w, size, 16, 256, num_warps=4
    )


# ---- batch norm ----------------------------------------------------------------------------------


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
def _normalise(
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
        out = (value - m) * s * w + b  # as _normalise has it, to the bit
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


def moments(x: Tensor, parts: Parts, eps: float) -> tuple[Tensor, Tensor]:
    (pixels, shape), c = _shape(x), x.shape[1]
    partial = torch.empty(parts.samples, 2, c, device=x.device)
    mean, scale = torch.empty(2, len(parts.sizes), c, device=x.device)
    _sample_moments[parts.samples,](x, partial, pixels, **shape)
    _worker_moments[len(parts.sizes),](
        partial, parts.first, mean, scale, pixels, eps, C=c, ROWS=64, BLOCK=shape["BLOCK"]
    )
    return mean, scale


def normalise(
    x: Tensor, shortcut: Tensor | None, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor,
    parts: Parts, relu: bool,
) -> Tensor:  # fmt: skip
    (pixels, shape), y = _shape(x), torch.empty_like(x)
    constants = parts.owner, mean, scale, weight, bias
    _normalise[parts.samples,](
        x, x if shortcut is None else shortcut, y, *constants, pixels,
        RELU=relu, SHORTCUT=shortcut is not None, **shape,
    )  # fmt: skip
    return y


def normalise_backward_(
    weight_grad: Tensor, bias_grad: Tensor, g: Tensor, x: Tensor, y: Tensor, mean: Tensor, scale: Tensor,
    weight: Tensor, bias: Tensor, parts: Parts, relu: bool, shortcut: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    (pixels, shape), c, workers = _shape(x), x.shape[1], len(parts.sizes)
    kind = {"RELU": relu, "SHORTCUT": shortcut, **shape}
    constants = mean, scale, weight, bias
    partial = torch.empty(parts.samples, 2, c, device=x.device)
    sums = torch.empty(workers, 2, c, device=x.device)
    _sample_sums[parts.samples,](g, x, y, partial, parts.owner, *constants, pixels, **kind)
    _worker_sums[workers,](
        partial, parts.first, sums, bias_grad, weight_grad, weight_grad.stride(0),
        C=c, ROWS=64, BLOCK=shape["BLOCK"],
    )  # fmt: skip
    back, through = torch.empty_like(x), torch.empty_like(x) if shortcut else None
    _input_gradient[parts.samples,](
        g, x, y, back, x if through is None else through, parts.owner, parts.first, *constants, sums, pixels,
        **kind,
    )  # fmt: skip
    return back, through
