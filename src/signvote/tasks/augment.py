"""Random changes of training images: drawn on the CPU, so that every device sees the same, made on any."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4


class Augment(NamedTuple):
    """A random change in two steps, so that the second can be part of a CUDA graph."""

    draw: Callable[[int, torch.Generator], Tensor]  # (k, n) integers for n images
    change: Callable[[Tensor, Tensor], Tensor]  # uint8 images and their draws -> uint8 images


def _draw(n: int, generator: torch.Generator) -> Tensor:
    shifts = torch.randint(2 * PADDING + 1, (2, n), generator=generator)
    flips = torch.randint(2, (n, 1), generator=generator)
    return torch.cat([shifts, flips.T])


def _crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Each image shifted by up to 4 pixels each way, black coming in, and mirrored with probability 1/2.

    Args:
        images: (n, C, H, W) uint8, on any device.
        draws: (3, n): shift down and right, 0 to 8 with 4 for none, and whether to mirror.

    """
    n, _, height, width = images.shape
    down, right, flips = draws[:, :, None]
    x = torch.arange(width, device=images.device)
    rows = down + torch.arange(height, device=images.device)  # (n, H) into the padded image
    columns = right + torch.where(flips == 1, width - 1 - x, x)  # (n, W)
    padded = F.pad(images, [PADDING] * 4)
    sample = torch.arange(n, device=images.device)[:, None, None]
    # Indices apart from each other put their dimensions first: (n, H, W, C), an image's own order of bytes.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


crop_and_flip = Augment(_draw, _crop_and_flip)
