"""The sums of `layers_plain` over a convolution's weights in Triton, and the convolution of 16 channels.

Images lie channels last, so a tensor is rows of pixels with C channels side by side. A program computes
the partial sums of one piece of a worker's samples. A second, small kernel adds up the partial sums of each
worker, always in the same order: nothing depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from signvote.sim.joint.parts import Parts

PROGRAMS = 600  # about: enough to fill a large GPU, few partial sums


def _products(x: Tensor) -> str:
    """The precision of float32 products: the same as in cuDNN's convolutions."""
    old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)  # before tf32
    exact = x.dtype == torch.float32 and (old or not torch.backends.cudnn.allow_tf32)
    return "ieee" if exact else "tf32"


@triton.jit
def _convolve(
    x,
    weight,
    y,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[pixel, c] = sum over taps and c_in of x[pixel + tap, c_in] * weight[tap, c_in, c]."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, C)
    row = pixel // W % H
    col = pixel % W
    total = tl.zeros([BLOCK, C], tl.float32)
    for tap in range(SIDE * SIDE):
        down = tap // SIDE - SIDE // 2
        right = tap % SIDE - SIDE // 2
        fits_down = (row + down >= 0) & (row + down < H)
        fits_right = (col + right >= 0) & (col + right < W)
        fits = fits_down & fits_right & (pixel < pixels)
        source = (pixel + down * W + right).to(tl.int64)
        where = source[:, None] * C + channel[None, :]
        mine = tl.load(x + where, mask=fits[:, None], other=0.0)
        entry = (tap * C + channel[:, None]) * C + channel[None, :]
        its = tl.load(weight + entry)
        total = tl.dot(mine, its, total, input_precision=PRECISION)
    where = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y + where, total, mask=(pixel < pixels)[:, None])


def is_narrow(weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> bool:
    """Whether `narrow` does this convolution. It is faster than cuDNN, which uses half a tile for 16 channels."""
    c, c_in, k_h, k_w = weight.shape
    if c != 16 or c_in != 16 or k_h != k_w or k_h % 2 == 0:
        return False
    return padding == (k_h // 2, k_h // 2) and stride == (1, 1)


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of 16 channels to 16 that keeps the size of the image."""
    y = torch.empty_like(x)
    samples, c, h, w = x.shape
    by_tap = weight.permute(2, 3, 1, 0).contiguous()
    pixels = samples * h * w
    grid = (triton.cdiv(pixels, 128),)
    _convolve[grid](
        x,
        by_tap,
        y,
        pixels,
        h,
        w,
        c,
        weight.shape[2],
        128,
        _products(x),
        num_warps=4,
        num_stages=3,
    )
    return y


def narrow_backward(g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input: the same with taps mirrored and channels exchanged."""
    return narrow(g, weight.transpose(0, 1).flip(2, 3))


@triton.jit
def _weight_pieces(
    x,
    g,
    out,
    pieces,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    KERNEL_W: tl.constexpr,
    C_IN: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sum over a piece's pixels of g[pixel, c] * x[the input pixel that column j of the kernel meets]."""
    piece = tl.program_id(0)
    begin = tl.load(pieces + 2 * piece).to(tl.int64)
    end = tl.load(pieces + 2 * piece + 1).to(tl.int64)
    samples = end - begin
    # A column stands for (kernel row, kernel column, c_in).
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    tap = column // C_IN
    down = tap // KERNEL_W - PAD_H
    right = tap % KERNEL_W - PAD_W
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
        sample = pixel // (OUT_H * OUT_W)
        place = pixel % (OUT_H * OUT_W)
        row = place // OUT_W * STRIDE_H
        col = place % OUT_W * STRIDE_W
        inside = pixel < pixels
        its = tl.load(
            g + pixel[:, None] * C + channel[None, :],
            mask=inside[:, None] & (channel < C)[None, :],
            other=0.0,
        )
        home = (sample * (H * W) + row * W + col) * C_IN
        image_row = row[:, None] + down[None, :]
        image_col = col[:, None] + right[None, :]
        fits_down = (image_row >= 0) & (image_row < H)
        fits_right = (image_col >= 0) & (image_col < W)
        known = inside[:, None] & (column < COLUMNS)[None, :]
        fits = known & fits_down & fits_right
        mine = tl.load(x + home[:, None] + reach[None, :], mask=fits, other=0.0)
        if SPLIT:  # a float32 as the sum of two bfloat16: three products, far less traffic than one of tf32
            its_head = its.to(tl.bfloat16)
            mine_head = mine.to(tl.bfloat16)
            its_tail = (its - its_head.to(tl.float32)).to(tl.bfloat16)
            mine_tail = (mine - mine_head.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(tl.trans(its_head), mine_head, total)
            total = tl.dot(tl.trans(its_tail), mine_head, total)
            total = tl.dot(tl.trans(its_head), mine_tail, total)
        else:
            total = tl.dot(tl.trans(its), mine, total, input_precision=PRECISION)
    where = (piece.to(tl.int64) * C + channel[:, None]) * COLUMNS + column[None, :]
    mask = (channel < C)[:, None] & (column < COLUMNS)[None, :]
    tl.store(out + where, total, mask=mask)


@triton.jit
def _weight_sums(
    partial,
    first,
    out,
    stride,
    C_IN: tl.constexpr,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the pieces of a worker; (c, tap, c_in) becomes (c, c_in, tap)."""
    worker = tl.program_id(0)
    begin = tl.load(first + worker)
    end = tl.load(first + worker + 1)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(begin, end, ROWS):
        where = (at + row).to(tl.int64)[:, None] * SIZE + e[None, :]
        mask = (at + row < end)[:, None] & (e < SIZE)[None, :]
        total += tl.load(partial + where, mask=mask, other=0.0)
    c = e // (TAPS * C_IN)
    column = e % (TAPS * C_IN)
    place = (c * C_IN + column % C_IN) * TAPS + column // C_IN
    start = out + worker.to(tl.int64) * stride
    tl.store(start + place, tl.sum(total, 0), mask=e < SIZE)


def conv_weights_(
    out: Tensor, x: Tensor, g: Tensor, stride: tuple[int, int], padding: tuple[int, int], parts: Parts
) -> None:
    """Write the gradient of a convolution's weights into `out`, by worker: x its input, g that of its output.

    Pieces of a worker's samples are summed first, then the pieces, both in a fixed order.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    g = g.contiguous(memory_format=torch.channels_last)
    workers, c, c_in, k_h, k_w = out.shape
    columns = c_in * k_h * k_w
    block = min(128, max(16, triton.next_power_of_2(columns)))
    blocks = triton.cdiv(columns, block)
    most = max(1, parts.samples * blocks // PROGRAMS)
    pieces, first = parts.pieces(most)
    size = c * columns
    partial = torch.empty(len(pieces), size, device=x.device)
    products = _products(x)
    channels = max(16, triton.next_power_of_2(c))
    split = x.dtype == torch.float32 and products == "tf32" and channels >= 64
    _weight_pieces[len(pieces), blocks](
        x,
        g,
        partial,
        pieces,
        *x.shape[2:],
        *g.shape[2:],
        *stride,
        *padding,
        k_w,
        c_in,
        c,
        columns,
        channels,
        block,
        32,
        products,
        split,
        num_warps=4,
        num_stages=3,
    )
    _weight_sums[workers, triton.cdiv(size, 256)](
        partial,
        first,
        out,
        out.stride(0),
        c_in,
        k_h * k_w,
        size,
        16,
        256,
        num_warps=4,
    )
