"""Pairs of workers: how often two of them agree, and what that shows. No function here looks at a decision.

    PairCounts    on how many coordinates two workers differ, over the rounds
    agreement     pair counts -> C, the mean of Y_i Y_j
    usual         C -> what each worker has in common with half of the others
    sharing       C where votes are contested -> by how much workers that err together divide their votes
    hostile       C everywhere -> who contradicts the workers that agree with one another

The model: if errors are independent, C_ij = a_i a_j with a = 1 - 2 p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.core.trust import Evidence, State, check_counts, check_forgetting, numbered, numbered_once
from signvote.errors import ConfigError

CLEAR = 0.02  # agreement by which two workers clearly agree, or contradict each other
STEEP = 2.0  # how fast votes shrink that err together; 1 would make one vote of k copies
CHANCE = 0.02  # agreement where votes are contested that is taken for chance
BY_SIZE = 0.05  # agreement there that two strong workers may have, times the product of their sizes
EXPLAINABLE = 0.5  # the most agreement there that anything explains
SHARED = (
    1.5  # a smaller divisor is taken for chance, too: equal workers keep equal weights, and ties stay ties
)
DOUBT = 1000  # coordinates: agreement counted on fewer is taken for less than it seems
ENOUGH = 5  # fewer workers than this share nothing: where three agree, two have something in common

# ---- counting pairs ------------------------------------------------------------------------------


class PairCounts:
    """On how many coordinates two workers differ, and on how many both voted, per group of coordinates.

    Args:
        groups: how many groups there are.
        forgetting: factor by which the counts of a pair shrink in each round in which both vote.

    """

    def __init__(self, groups: int = 1, forgetting: float = 1.0) -> None:
        check_forgetting(forgetting)
        self.groups = groups
        self.forgetting = forgetting
        self.index: dict[int, int] = {}  # worker -> its row and column
        self.counts = torch.zeros(2, groups, 0, 0, dtype=torch.float64)  # differ, common

    @property
    def workers(self) -> list[int]:
        """The workers that were counted."""
        return list(self.index)

    def learn(self, evidence: Evidence) -> None:
        """Count one round of pairs."""
        if evidence.differ is None or evidence.common is None:
            raise ConfigError("agreement needs evidence about pairs; this vote did not count them")
        self._admit(evidence.workers)
        workers = len(evidence.workers)
        columns = self.rows(evidence.workers)
        rows = columns[:, None]
        new = torch.stack([evidence.differ, evidence.common])
        new = new.view(2, self.groups, workers, workers)
        known = self.counts[:, :, rows, columns]
        kept = known * self.forgetting
        self.counts[:, :, rows, columns] = kept + new

    def _admit(self, workers: Sequence[int]) -> None:
        """Add zero counts for new workers."""
        for worker in workers:
            self.index.setdefault(worker, len(self.index))
        known = self.counts.shape[-1]
        more = len(self.index) - known
        self.counts = pad(self.counts, (0, more, 0, more))

    def rows(self, workers: Sequence[int]) -> Tensor:
        """The rows of these workers, which are their columns, too."""
        rows = [self.index[worker] for worker in workers]
        return torch.tensor(rows, dtype=torch.int64)

    def among(self, workers: Sequence[int]) -> Tensor:
        """The counts of pairs of these workers, (2, groups, workers, workers); 0 for pairs that never met."""
        stranger = len(self.index)
        at = torch.tensor([self.index.get(worker, stranger) for worker in workers], dtype=torch.int64)
        known = pad(self.counts, (0, 1, 0, 1))
        return known[:, :, at][..., at]

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        gone = set(workers)
        left = [worker for worker in self.index if worker not in gone]
        at = self.rows(left)
        counts = self.counts[:, :, at]
        self.counts = counts[..., at]
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
        workers = len(index)
        counts = state["counts"].double().view(2, self.groups, workers, workers)
        differ, common = counts
        check_counts(differ, common)
        self.index = index
        self.counts = counts.clone()


# ---- what agreement shows ------------------------------------------------------------------------


def agreement(differ: Tensor, common: Tensor) -> Tensor:
    """C_ij = mean of Y_i Y_j over the coordinates on which both voted, nearer to 0 if these are few.

    The diagonal is 0.
    """
    c = (common - 2 * differ) / (common + DOUBT)
    c.diagonal(dim1=-2, dim2=-1).zero_()
    return c


def usual(c: Tensor) -> tuple[Tensor, Tensor]:
    """What each worker has in common with half of the others at least, and what most workers have so.

    A minority moves neither far: of M workers, half of the others are never all in it.

    >>> c = torch.tensor([[0.0, 0.3, 0.3, 0.9], [0.3, 0.0, 0.3, 0.1], [0.3, 0.3, 0.0, 0.1], [0.9, 0.1, 0.1, 0.0]])
    >>> each, most = usual(c)
    >>> each.tolist(), float(most)
    ([0.3..., 0.3..., 0.3..., 0.1...], 0.3...)
    """
    workers = len(c)
    others = c.clone().fill_diagonal_(-torch.inf)
    half_of_others = workers // 2
    each = others.sort(1, descending=True).values[:, half_of_others - 1]
    half = (workers + 1) // 2
    most = each.sort(descending=True).values[half - 1]
    return each, most


def sharing(c: Tensor, sizes: Tensor) -> Tensor:
    """The number of votes that each worker's vote is divided by, from C where votes are contested.

        1 + 2 sum_j max(0, C_ij - explained_ij)

    Explained is what most workers have in common, chance, and the strength of two workers that have shown
    theirs: strong workers see the same small signal. There is no threshold to hide below: k workers whose
    pushes have correlation x^2 have a common push of k x, and divide it by about 1 + 2 (k - 1) x^2.

    Args:
        c: C where votes are contested.
        sizes: the relative sqrt(B) that each worker has shown.

    """
    workers = len(c)
    if workers < ENOUGH:
        return torch.ones(workers, dtype=c.dtype)
    _, most = usual(c)
    strong = (sizes[:, None] * sizes - 4).clamp_min(0)  # twice the usual strength explains nothing yet
    explained = most.clamp_min(0) + CHANCE + BY_SIZE * strong
    explained = explained.clamp_max(EXPLAINABLE)
    excess = (c - explained).clamp_min(0)
    excess.fill_diagonal_(0)
    divided_by = 1 + STEEP * excess.sum(1)
    return torch.where(divided_by < SHARED, 1.0, divided_by)


def hostile(c: Tensor) -> Tensor:
    """Who contradicts the workers that agree with one another, from C everywhere; nobody if most do not agree.

    Those who agree: each of them clearly agrees with more than half of all workers, itself included. Who is none
    of them, and clearly contradicts more than four of five of them, is hostile. Where workers own different
    data hardly anybody agrees with half of the others, and who knows something rare contradicts not so many.
    """
    itself = torch.eye(len(c), dtype=torch.bool)
    friends = ((c > CLEAR) | itself).sum(1)
    agree = 2 * friends > len(c)
    contradicted = ((c < -CLEAR) & agree).sum(1)
    return ~agree & (5 * contradicted > 4 * agree.sum())
