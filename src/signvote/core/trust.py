"""What a rule learns about workers: the evidence of a round, and counts pooled over coordinates.

    Evidence      integer counts of one vote; counts of disjoint coordinates add
    Trust         what a rule keeps between rounds
    CountTrust    p = mismatches / votes cast, per worker and group of coordinates

Counts per coordinate are in `it_signsgd.py`, counts of pairs of workers in `pairs.py`. All are keyed by
worker id. A new worker starts with a prior. A worker that returns continues with its own counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from signvote.errors import ConfigError
from signvote.kernels import download

State = dict[str, Any]

PRIOR = 0.25  # p of every worker before the first evidence; any p < 1/2 makes the first vote a majority


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What one vote shows about its workers; evidence of disjoint coordinates adds."""

    workers: tuple[int, ...]
    mismatches: Tensor  # (workers, groups) int64: votes that differ from the decision
    cast: Tensor  # (workers, groups) int64: votes cast where there is a decision
    differ: Tensor | None = None  # (..., workers, workers) int64: coordinates on which two workers differ
    common: Tensor | None = None  # (..., workers, workers) int64: coordinates on which both voted
    present: Tensor | None = None  # (workers,) bool, False: did not vote; None: all voted

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            workers=self.workers,
            mismatches=self.mismatches + other.mismatches,
            cast=self.cast + other.cast,
            differ=_sum(self.differ, other.differ),
            common=_sum(self.common, other.common),
            present=self.present,
        )

    def sent(self) -> Callable[[], Evidence]:
        """Start an asynchronous copy to the CPU.

        Calling the result waits for the copy and drops workers that did not vote.
        """
        fields = vars(self).items()
        tensors = {name: value for name, value in fields if isinstance(value, Tensor)}
        copied = download(*tensors.values())

        def arrived() -> Evidence:
            counts = dict(zip(tensors, copied(), strict=True))
            present = counts.pop("present", None)
            evidence = Evidence(workers=self.workers, **counts)
            if present is None or bool(present.all()):
                return evidence
            rows = present.nonzero()[:, 0]
            return evidence._of(rows)

        return arrived

    def _of(self, rows: Tensor) -> Evidence:
        """The evidence about the workers in these rows."""
        return Evidence(
            workers=tuple(self.workers[row] for row in rows.tolist()),
            mismatches=self.mismatches[rows],
            cast=self.cast[rows],
            differ=_pairs_among(self.differ, rows),
            common=_pairs_among(self.common, rows),
        )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two counts, where None counts nothing."""
    if a is None:
        return b
    if b is None:
        return a
    return a + b


def _pairs_among(counts: Tensor | None, rows: Tensor) -> Tensor | None:
    """The counts of pairs in which both workers are in these rows."""
    if counts is None:
        return None
    return counts[..., rows, :][..., rows]


class Trust(Protocol):
    """What a rule keeps between rounds."""

    def learn(self, evidence: Evidence) -> None:
        """Add the evidence of a whole round."""

    def forget(self, worker: int) -> None:
        """Drop everything about a worker."""

    def state_dict(self) -> State:
        """Everything needed to resume."""

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""


def check_forgetting(forgetting: float) -> None:
    """Raise unless 0 < forgetting <= 1."""
    if not 0 < forgetting <= 1:
        raise ConfigError(f"forgetting is {forgetting}; it must lie in (0, 1], 1 = remember all")


def numbered(workers: Iterable[int]) -> dict[int, int]:
    """The position of each worker."""
    return {worker: position for position, worker in enumerate(workers)}


class CountTrust:
    """p = mismatches / votes cast, over the rounds before this one (paper, eq. 4), pooled over coordinates.

    There is one count per worker and group. A group is one tensor, or all coordinates. A worker without
    votes in a group gets the average p of the other workers there.

    Args:
        groups: how many groups there are.
        forgetting: factor by which all counts shrink in each round; 1 keeps everything.

    """

    def __init__(self, groups: int, forgetting: float = 1.0) -> None:
        check_forgetting(forgetting)
        self.groups = groups
        self.forgetting = forgetting
        self._counts: dict[int, Tensor] = {}  # worker -> (2, groups) float64: mismatches, cast

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The p of these workers, (workers, groups) float64."""
        nothing = torch.zeros(2, self.groups, dtype=torch.float64)
        total = sum(self._counts.values(), nothing)
        average = _crossover(total, PRIOR)
        counts = [self._counts.get(worker, nothing) for worker in workers]
        return _crossover(torch.stack(counts, 1), average)

    def learn(self, evidence: Evidence) -> None:
        """Count one round."""
        for counts in self._counts.values():
            counts *= self.forgetting
        both = torch.stack([evidence.mismatches, evidence.cast], 1)  # (workers, 2, groups)
        for worker, new in zip(evidence.workers, both.double(), strict=True):
            known = self._counts.get(worker, 0)
            self._counts[worker] = known + new

    def forget(self, worker: int) -> None:
        """Drop everything about a worker."""
        self._counts.pop(worker, None)

    def state_dict(self) -> State:
        """Everything needed to resume."""
        workers = len(self._counts)
        counts = torch.zeros(workers, 2, self.groups, dtype=torch.float64)
        for row, known in zip(counts, self._counts.values(), strict=True):
            row.copy_(known)
        return {
            "workers": list(self._counts),
            "counts": counts,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        workers = state["workers"]
        counts = state["counts"].clone()
        self._counts = dict(zip(workers, counts, strict=True))


def _crossover(counts: Tensor, otherwise: Tensor | float) -> Tensor:
    """Counts (2, ...) of mismatches and of votes cast to p; `otherwise` where no vote was cast."""
    mismatches, cast = counts
    p = mismatches / cast  # (paper, eq. 4)
    return torch.where(cast > 0, p, otherwise)
