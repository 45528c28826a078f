"""Memory over many rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_SLOPE = 1024  # KiB for each 1,000 rounds
MOST_GROWTH = 16 * 1024  # KiB; less is what allocators do

Sample = tuple[int, float]  # rounds done, KiB


def resident(pid: int | str = "self") -> float:
    """KiB of memory that a process holds."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * PAGE / 1024


def slope(samples: Sequence[Sample]) -> float:
    """KiB for each 1,000 rounds: a line through the last two thirds of the samples, by least squares."""
    settled = samples[len(samples) // 3 :]
    rounds = [sample[0] for sample in settled]
    kib = [sample[1] for sample in settled]
    middle = sum(rounds) / len(rounds)
    spread = sum((r - middle) ** 2 for r in rounds)
    if not spread:
        return 0.0
    along = sum((r - middle) * k for r, k in zip(rounds, kib, strict=True))
    return 1000 * along / spread


def is_steady(samples: Sequence[Sample]) -> bool:
    """Whether memory stopped growing. A short run may grow by a few MiB."""
    settled = samples[len(samples) // 3 :]
    growth = settled[-1][1] - settled[0][1]
    return slope(samples) < MOST_SLOPE or growth < MOST_GROWTH
