"""The sums of `layers_plain` for batch norm in Triton: this module launches `norm_kernels_cuda`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from signvote.sim.joint import norm_kernels_cuda as kernels
from signvote.sim.joint.parts import Parts

TILE = 4096  # elements that a program holds at a time


class Tiles(NamedTuple):
    """The sizes that kernels are compiled for."""

    channels: int
    rows: int  # pixels, or samples, that a program holds at a time
    block: int  # channels, rounded up to a power of 2

    def of_workers(self) -> Tiles:
        """For a program per worker instead of per sample: there are few of them, so each holds more rows."""
        rows = max(1, 2 * TILE // self.block)
        return self._replace(rows=rows)


def _tiles(x: Tensor, pixels: int) -> Tiles:
    channels = x.shape[1]
    block = triton.next_power_of_2(channels)
    rows = min(max(1, TILE // block), triton.next_power_of_2(pixels))
    return Tiles(channels, rows, block)


def _pixels(x: Tensor) -> int:
    """Pixels of a sample."""
    return x.shape[2] * x.shape[3]


def moments(x: Tensor, parts: Parts, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation of each channel over each worker's own samples: (workers, channels) each."""
    pixels = _pixels(x)
    tiles = _tiles(x, pixels)
    of_workers = tiles.of_workers()
    channels = tiles.channels
    workers = len(parts.sizes)
    partial = torch.empty(parts.samples, 2, channels, device=x.device)
    mean, scale = torch.empty(2, workers, channels, device=x.device)
    kernels.sample_moments[parts.samples,](
        x,
        partial,
        pixels,
        C=channels,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
    )
    kernels.worker_moments[workers,](
        partial,
        parts.first,
        mean,
        scale,
        pixels,
        eps,
        C=channels,
        ROWS=of_workers.rows,
        BLOCK=of_workers.block,
        num_warps=8,
    )
    return mean, scale


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
    """Batch norm by worker, then the shortcut if there is one, then relu if asked for, in one pass."""
    pixels = _pixels(x)
    tiles = _tiles(x, pixels)
    y = torch.empty_like(x)
    kernels.normalize_sample[parts.samples,](
        x,
        x if shortcut is None else shortcut,
        y,
        parts.owner,
        mean,
        scale,
        weight,
        bias,
        pixels,
        C=tiles.channels,
        RELU=relu,
        SHORTCUT=shortcut is not None,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
    )
    return y


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
    """Gradients of input and shortcut from that of the output, g. Those of weight and bias are written by worker."""
    pixels = _pixels(x)
    tiles = _tiles(x, pixels)
    of_workers = tiles.of_workers()
    channels = tiles.channels
    workers = len(parts.sizes)
    partial = torch.empty(parts.samples, 2, channels, device=x.device)
    sums = torch.empty(workers, 2, channels, device=x.device)
    kernels.sample_sums[parts.samples,](
        g,
        x,
        y,
        partial,
        parts.owner,
        mean,
        scale,
        weight,
        bias,
        pixels,
        C=channels,
        RELU=relu,
        SHORTCUT=shortcut,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
    )
    kernels.worker_sums[workers,](
        partial,
        parts.first,
        sums,
        bias_grad,
        weight_grad,
        weight_grad.stride(0),
        C=channels,
        ROWS=of_workers.rows,
        BLOCK=of_workers.block,
        num_warps=8,
    )
    back = torch.empty_like(x)
    through = torch.empty_like(x) if shortcut else None
    kernels.input_gradient[parts.samples,](
        g,
        x,
        y,
        back,
        x if through is None else through,
        parts.owner,
        parts.first,
        mean,
        scale,
        weight,
        bias,
        sums,
        pixels,
        C=channels,
        RELU=relu,
        SHORTCUT=shortcut,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
    )
    return back, through
