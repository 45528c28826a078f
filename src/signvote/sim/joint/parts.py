"""Which rows of a batch belong to which worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor


class Parts:
    """Which rows of a batch belong to which worker: worker m has `sizes[m]` samples, one after the other."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts = [0, *accumulate(sizes)]
        self.sizes = list(sizes)
        self.samples = starts[-1]
        self.device = device
        self.first = torch.tensor(starts, dtype=torch.int32, device=device)  # (workers + 1,)
        workers = torch.arange(len(sizes))
        owner = torch.repeat_interleave(workers, torch.tensor(sizes))
        self.owner = owner.to(device, torch.int32)  # (samples,)
        self._pieces: dict[int, tuple[Tensor, Tensor]] = {}

    def equals(self) -> list[tuple[slice, slice]]:
        """Neighbors with batches of equal size: (which workers, which samples)."""
        found = []
        worker = 0
        sample = 0
        for size, members in groupby(self.sizes):
            next_worker = worker + len(list(members))
            next_sample = sample + (next_worker - worker) * size
            found.append((slice(worker, next_worker), slice(sample, next_sample)))
            worker = next_worker
            sample = next_sample
        return found

    def pieces(self, most: int) -> tuple[Tensor, Tensor]:
        """Every worker's samples cut into pieces of at most `most`.

        Returns (pieces, 2) with the first sample and the one after the last, and (workers + 1,) with
        each worker's first piece.
        """
        if most not in self._pieces:
            self._pieces[most] = self._cut(most)
        return self._pieces[most]

    def _cut(self, most: int) -> tuple[Tensor, Tensor]:
        spans = []
        starts = [0]
        end = 0
        for size in self.sizes:
            begin = end
            end = begin + size
            spans += [(at, min(at + most, end)) for at in range(begin, end, most)]
            starts.append(len(spans))
        return self._table(spans), self._table(starts)

    def _table(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def sums(self, per_sample: Tensor) -> Tensor:
        """(samples, ...) added up to (workers, ...)."""
        by_worker = torch.split(per_sample, self.sizes)
        return torch.stack([part.sum(0) for part in by_worker])
