"""Random changes of training images. The draws come from the CPU, so every device makes the same changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4


class Augment(NamedTuple):
    """A random change in two steps, so that the second one fits into a CUDA graph."""

    draw: Callable[[int, torch.Generator], Tensor]  # (k, n) integers for n images
    change: Callable[[Tensor, Tensor], Tensor]  # uint8 images and their draws -> uint8 images


def _draw(n: int, generator: torch.Generator) -> Tensor:
    places = 2 * PADDING + 1
    shifts = torch.randint(places, (2, n), generator=generator)
    flips = torch.randint(2, (n, 1), generator=generator)
    return torch.cat([shifts, flips.T])


def _crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Shift each image by up to 4 pixels each way, fill with black, and mirror it with probability 1/2.

    Args:
        images: (n, C, H, W) uint8, on any device.
        draws: (3, n): shifts down and to the right, 0 to 8 with 4 for no shift, and 1 to mirror.

    """
    n, _, height, width = images.shape
    device = images.device
    down, right, flips = draws[:, :, None]
    x = torch.arange(width, device=device)
    y = torch.arange(height, device=device)
    mirrored = width - 1 - x
    rows = down + y  # (n, H) into the padded image
    columns = right + torch.where(flips == 1, mirrored, x)  # (n, W)
    padded = F.pad(images, [PADDING] * 4)
    sample = torch.arange(n, device=device)
    # A slice between indices moves their dimensions to the front: (n, H, W, C), the image's own byte order.
    changed = padded[
        sample[:, None, None],
        :,
        rows[:, :, None],
        columns[:, None, :],
    ]
    return changed.permute(0, 3, 1, 2)


crop_and_flip = Augment(_draw, _crop_and_flip)
