"""What a rule learns about workers: the evidence of a round, and counts pooled over coordinates.

    Evidence      integer counts of one vote; counts of disjoint coordinates add
    Trust         what a rule keeps between rounds
    CountTrust    p = mismatches / votes cast, per worker and group of coordinates

Counts per coordinate are in `counters.py`, counts of pairs of workers in `pairs.py`. All are keyed by
worker id. A new worker starts with a prior. A worker that returns continues with its own counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.errors import ConfigError, StateError
from signvote.kernels import download

State = dict[str, Any]

FEW = 3  # two voters are either of one mind or tied: neither is ever overruled
PRIOR = 0.25  # p of every worker before the first evidence; any p < 1/2 makes the first vote a majority


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What one vote shows about its workers; evidence of disjoint coordinates adds."""

    workers: tuple[int, ...]
    mismatches: Tensor  # (workers, groups) int64: votes that differ from the decision
    cast: Tensor  # (workers, groups) int64: votes cast where there is a decision, and no tie
    differ: Tensor | None = None  # (..., workers, witnesses) int64: coordinates on which two workers differ
    common: Tensor | None = None  # (..., workers, witnesses) int64: coordinates on which both voted
    magnitudes: Tensor | None = None  # (tensors,) int64: of scaled votes, the sums of |q|; see scaled.py
    beliefs: Tensor | None = None  # (workers, 1) int64: of corrections, the sums of |h| / S; see loudness.py
    present: Tensor | None = None  # (workers,) bool, False: did not vote; None: all voted
    witnesses: tuple[int, ...] | None = None  # with whom workers are compared; None: all with one another

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            workers=self.workers,
            mismatches=self.mismatches + other.mismatches,
            cast=self.cast + other.cast,
            differ=_sum(self.differ, other.differ),
            common=_sum(self.common, other.common),
            magnitudes=_sum(self.magnitudes, other.magnitudes),
            beliefs=_sum(self.beliefs, other.beliefs),
            present=self.present,
            witnesses=self.witnesses,
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
            evidence = Evidence(workers=self.workers, witnesses=self.witnesses, **counts)
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
            differ=self._pairs_of(self.differ, rows),
            common=self._pairs_of(self.common, rows),
            witnesses=self.witnesses,
            magnitudes=self.magnitudes,
            beliefs=None if self.beliefs is None else self.beliefs[rows],
        )

    def _pairs_of(self, counts: Tensor | None, rows: Tensor) -> Tensor | None:
        """The counts of pairs of the workers in these rows, of whom are the witnesses."""
        if counts is None:
            return None
        theirs = counts[..., rows, :]
        return theirs[..., rows] if self.witnesses is None else theirs


NOTHING = Evidence(
    workers=(),
    mismatches=torch.zeros(0, 1, dtype=torch.int64),
    cast=torch.zeros(0, 1, dtype=torch.int64),
)  # of a round that decided nothing


def total(parts: Iterable[Evidence]) -> Evidence:
    """The sum of at least one."""
    return reduce(add, parts)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two counts, where None counts nothing."""
    if a is None:
        return b
    if b is None:
        return a
    return a + b


class Trust(Protocol):
    """What a rule keeps between rounds."""

    @property
    def workers(self) -> list[int]:
        """The workers about which something is known."""

    def learn(self, evidence: Evidence) -> None:
        """Add the evidence of a whole round."""

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers; others may be named, too."""

    def state_dict(self) -> State:
        """Everything needed to resume."""

    def load_state_dict(self, state: State) -> None:
        """Resume from a state. Raises a StateError, and changes nothing, if its counts are impossible."""


def check_forgetting(forgetting: float) -> None:
    """Raise unless 0 < forgetting <= 1."""
    if not 0 < forgetting <= 1:
        raise ConfigError(f"forgetting is {forgetting}; it must lie in (0, 1], 1 = remember all")


def numbered(workers: Iterable[int]) -> dict[int, int]:
    """The position of each worker."""
    return {worker: position for position, worker in enumerate(workers)}


def numbered_once(workers: Sequence[int]) -> dict[int, int]:
    """The position of each worker of a state; a StateError if one is named twice."""
    index = numbered(workers)
    if len(index) != len(workers):
        raise StateError(f"{len(workers)} workers in the state, but only {len(index)} different ones")
    return index


def check_counts(part: Tensor, whole: Tensor) -> None:
    """Raise unless 0 <= part <= whole everywhere, all of it finite: a part cannot exceed the whole."""
    possible = (part >= 0) & (part <= whole) & whole.isfinite()
    if not possible.all():
        wrong = int((~possible).sum())
        raise StateError(
            f"{wrong} counts of the state are impossible: negative, NaN, or a part above its whole"
        )


class CountTrust:
    """p = mismatches / votes cast, over the rounds before this one (paper, eq. 4), pooled over coordinates.

    There is one count per worker and group. A group is one tensor, or all coordinates. A worker without
    votes in a group gets the average p of the other workers there.

    Args:
        groups: how many groups there are.
        forgetting: factor by which the counts of a worker shrink in each round in which it votes;
            1 keeps everything.

    """

    def __init__(self, groups: int, forgetting: float = 1.0) -> None:
        check_forgetting(forgetting)
        self.groups = groups
        self.forgetting = forgetting
        self.index: dict[int, int] = {}  # worker -> its row
        self.counts = torch.zeros(0, 2, groups, dtype=torch.float64)  # mismatches, cast

    @property
    def workers(self) -> list[int]:
        """The workers that were counted."""
        return list(self.index)

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The p of these workers, (workers, groups) float64."""
        total = self.counts.sum(0)
        average = _crossover(total, PRIOR)
        nothing = torch.zeros_like(total)
        table = torch.cat([self.counts, nothing[None]])
        unknown = len(self.index)  # the row of nothing
        rows = [self.index.get(worker, unknown) for worker in workers]
        counts = table[rows].transpose(0, 1)
        return _crossover(counts, average)

    def learn(self, evidence: Evidence) -> None:
        """Count one round."""
        for worker in evidence.workers:
            self.index.setdefault(worker, len(self.index))
        new_rows = len(self.index) - len(self.counts)
        self.counts = pad(self.counts, (0, 0, 0, 0, 0, new_rows))
        rows = [self.index[worker] for worker in evidence.workers]
        seen = torch.stack([evidence.mismatches, evidence.cast], 1)  # (workers, 2, groups)
        self.counts[rows] = self.counts[rows] * self.forgetting + seen

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        gone = set(workers)
        left = [worker for worker in self.index if worker not in gone]
        rows = [self.index[worker] for worker in left]
        self.counts = self.counts[rows]
        self.index = numbered(left)

    def state_dict(self) -> State:
        """Everything needed to resume."""
        return {
            "workers": self.workers,
            "counts": self.counts.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        index = numbered_once(state["workers"])
        counts = state["counts"].double().view(len(index), 2, self.groups)
        mismatches, cast = counts.unbind(1)
        check_counts(mismatches, cast)
        self.index = index
        self.counts = counts.clone()


def _crossover(counts: Tensor, otherwise: Tensor | float) -> Tensor:
    """Counts (2, ...) of mismatches and of votes cast to p; `otherwise` where no vote was cast."""
    mismatches, cast = counts
    p = mismatches / cast  # (paper, eq. 4)
    return torch.where(cast > 0, p, otherwise)
