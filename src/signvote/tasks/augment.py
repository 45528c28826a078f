"""Random changes of training images, drawn for a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to 4 pixels each way, black coming in, and mirrored with probability 1/2.

    Args:
        images: (n, C, H, W) uint8, on any device.
        generator: where the draws come from; one on the CPU gives the same images on every device.

    """
    n, _, height, width = images.shape
    draws = torch.randint(2 * PADDING + 1, (2, n), generator=generator, device=generator.device)
    flips = torch.randint(2, (n, 1), generator=generator, device=generator.device)
    down, right, flips = (t.to(images.device) for t in (*draws, flips))
    x = torch.arange(width, device=images.device)
    rows = down[:, None] + torch.arange(height, device=images.device)  # (n, H) into the padded image
    columns = right[:, None] + torch.where(flips == 1, width - 1 - x, x)  # (n, W)
    padded = F.pad(images, [PADDING] * 4)
    sample = torch.arange(n, device=images.device)[:, None, None]
    # Indices apart from each other put their dimensions first: (n, H, W, C), an image's own order of bytes.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
