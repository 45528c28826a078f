"""The sums of `layers_plain` over a convolution's weights in Triton, and the convolution of 16 channels.

Images lie channels last, so a tensor is rows of pixels with C channels side by side. A program takes one
piece of a worker's samples and leaves partial sums; a second, small kernel adds up what belongs to each
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
    """How exactly products of float32 are taken: as convolutions of cuDNN take them."""
    old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)  # before tf32
    exact = x.dtype == torch.float32 and (old or not torch.backends.cudnn.allow_tf32)
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
    """Write the gradient of a convolution's weights into `out`, by worker: x its input, g that of its output.

    Pieces of a worker's samples are summed first, then the pieces, both in a fixed order.
    """
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
