"""Pairs of workers: how often two of them agree, and what that shows. No function here looks at a decision.

    PairCounts             on how many coordinates two workers differ, over the rounds
    correlation            pair counts -> C, the mean of Y_i Y_j
    leading_eigenvector    of C: which workers agree with the rest
    agreement_crossover    C -> p of each worker; AgreementTrust keeps the counts for it
    copies                 C -> which workers are copies of each other
    judge                  pair counts -> a Verdict: which workers are believable

The model: if errors are independent, C_ij = a_i a_j with a = 1 - 2 p. So C is a matrix of rank one, apart
from its diagonal and from noise. Its leading eigenvector is a up to a sign, which the majority fixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from signvote.core.trust import (
    FEW,
    PRIOR,
    Evidence,
    State,
    check_counts,
    check_forgetting,
    numbered,
    numbered_once,
)
from signvote.errors import ConfigError

SIGNIFICANT = 3.0  # standard deviations by which agreement must exceed chance
COPIES = 0.5  # correlation above which two workers may be copies
SAME = 0.98  # correlation above which they are copies, however well other workers explain it
THIRDS = 16  # number of other workers used to explain a correlation

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


# ---- the rank-one fit ----------------------------------------------------------------------------


def correlation(differ: Tensor, common: Tensor) -> Tensor:
    """C_ij = mean of Y_i Y_j over the coordinates on which both voted; NaN if there are none."""
    return 1 - 2 * differ / common


def leading_eigenvector(c: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of symmetric matrices (..., n, n), and its vector, of either sign."""
    values, vectors = torch.linalg.eigh(c)
    largest = values[..., -1]
    vector = vectors[..., -1]
    return largest, vector


def oriented(e: Tensor) -> Tensor:
    """Vectors (..., workers) times +1 or -1, so that most workers are positive; in a tie, their sum is."""
    signs = e.sign()
    balance = signs.sum(-1, keepdim=True)
    total = e.sum(-1, keepdim=True)
    tie = balance == 0
    wrong_in_tie = tie & (total < 0)
    wrong = (balance < 0) | wrong_in_tie
    return torch.where(wrong, -e, e)


class AgreementTrust(PairCounts):
    """p from pairwise agreement: see `agreement_crossover`."""

    def __init__(self, forgetting: float = 1.0) -> None:
        super().__init__(1, forgetting)

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The p of these workers, (workers,) float64; a new worker gets the average of the others."""
        known = [worker for worker in workers if worker in self.index]
        if not known:
            return _prior(len(workers))
        at = self.rows(known)
        counts = self.counts[:, 0]
        differ, common = counts[:, at][:, :, at]
        c = correlation(differ, common)
        fitted = agreement_crossover(c).tolist()
        average = sum(fitted) / len(fitted)
        p_of = dict(zip(known, fitted, strict=True))
        p = [p_of.get(worker, average) for worker in workers]
        return torch.tensor(p, dtype=torch.float64)


def agreement_crossover(c: Tensor) -> Tensor:
    """Fit a matrix of rank one to C, (workers, workers), whose diagonal is ignored: the p of each worker.

        |a_i| = sqrt(|C_ij C_ik / C_jk|)      a = 1 - 2 p; j, k: any two other workers

    The median over j, k is weighted with |C_jk|: two workers that hardly agree show little about a third.
    The signs of a are those of the leading eigenvector, oriented by the majority of workers.

    Fewer than three workers cannot be told apart: all get the prior. NaN marks a pair that never met and is
    ignored. A worker without any usable pair gets 1/2, which is a weight of 0.
    """
    m = len(c)
    if m < FEW:
        return _prior(m)
    c = c.double().clone()
    c.fill_diagonal_(torch.nan)
    size = c.abs()
    squares = torch.empty(m, dtype=torch.float64)
    for i in range(m):
        with_i = c[i]
        ratios = (with_i[:, None] * with_i / c).abs()  # over j, k; NaN where two of i, j, k are equal
        usable = ratios.isfinite()
        squares[i] = _weighted_median(
            ratios[usable],
            weights=size[usable],
        )
    _, vector = leading_eigenvector(c.nan_to_num())
    signs = oriented(vector).sign()
    magnitude = squares.sqrt().clamp(max=1)
    a = signs * magnitude
    return (1 - a) / 2


def _prior(workers: int) -> Tensor:
    """The p of workers about which nothing is known."""
    return torch.full((workers,), PRIOR, dtype=torch.float64)


def _weighted_median(values: Tensor, weights: Tensor) -> float:
    """The value at which half of the weight is reached; 0 without values."""
    if not values.numel():
        return 0.0
    order = values.argsort()
    ordered = values[order]
    reached = weights[order].cumsum(0)
    half = reached[-1] / 2
    middle = torch.searchsorted(reached, half)
    return float(ordered[middle])


# ---- copies --------------------------------------------------------------------------------------


def copies(c: Tensor) -> Tensor:
    """The unit of each worker, the number of its first member: copies of each other are one unit.

    Two workers are copies if C_ij exceeds 1/2, and also the middle between 1 and a_i a_j, the correlation
    of independent workers. The size of a_i follows from other workers k, l: a_i^2 = C_ik C_il / C_kl.
    So two strong workers that agree are no copies. Above 0.98 they are copies in any case, because many
    copies explain each other. Fewer than four workers explain nothing: then there are no copies.
    """
    workers = len(c)
    alike = (c > COPIES).fill_diagonal_(False)
    if workers < 4 or not alike.any():
        return torch.arange(workers)
    strength = _strengths(c)
    explained = strength[:, None] * strength
    middle = (1 + explained) / 2
    limit = middle.clamp_max(SAME)
    return _connected(alike & (c > limit))


def _strengths(c: Tensor) -> Tensor:
    """|a| of each worker: its square is the median of C_ik C_il / C_kl over a few other workers k, l."""
    never_met = c == 0
    met = torch.where(never_met, torch.nan, c)
    thirds = _most_typical(c)
    with_thirds = met[:, thirds]
    among = with_thirds[thirds]  # NaN on its diagonal, as on that of c
    products = with_thirds[:, :, None] * with_thirds[:, None]
    squares = (products / among).flatten(1).nanmedian(1).values
    return squares.nan_to_num(0).clamp(0, 1).sqrt()


def _most_typical(c: Tensor) -> Tensor:
    """The workers whose correlations are nearest to the median size; a few of them suffice."""
    size = c.abs().sum(1)
    distance = (size - size.median()).abs()
    return distance.argsort()[:THIRDS]


def _connected(linked: Tensor) -> Tensor:
    """The first member of each worker's connected part of a graph, given as a symmetric matrix of bools."""
    workers = len(linked)
    first = torch.arange(workers)
    while True:
        of_neighbors = torch.where(linked, first, workers).amin(1)
        earlier = first.minimum(of_neighbors)
        earlier = earlier[earlier]  # what a neighbor has found, too
        if torch.equal(earlier, first):
            return first
        first = earlier


# ---- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What pairwise agreement shows about workers."""

    believable: Tensor  # (workers, groups) bool
    unit: Tensor  # (workers,) int64: copies of each other have the same number


def judge(differ: Tensor, common: Tensor) -> Verdict | None:
    """Which workers are believable, from pair counts (groups, workers, workers); None: no verdict.

        z_i = sum_u e_u C_iu / sqrt(sum_u e_u^2 / n_iu)       u: units other than that of i

    e is the leading eigenvector of C among units. A unit is a worker, or copies of one. e is oriented so
    that most workers are positive; n counts coordinates. A worker is believable if z > 3. In one of several
    groups z >= -3 is also required there; not more, because a small tensor alone shows little. A worker
    that has met no other worker is believable.

    There is no verdict if no eigenvalue exceeds the noise, if fewer than three units are left, or if the
    believable workers are no majority: then a few may be misleading many.
    """
    if differ.shape[-1] < FEW:
        return None
    d, n = _with_whole(differ, common)
    met = n > 0
    c = torch.where(met, correlation(d, n), 0.0)
    _clear_diagonal_(c)
    if not c.isfinite().all():
        return None
    unit = copies(c[0])
    overall, *local = _scores(c, n, unit)
    if overall.isnan().all():
        return None
    believable = ~(overall <= SIGNIFICANT)  # NaN is believable
    count = int(believable.sum())
    if 2 * count <= len(unit):
        return None
    believable = believable[:, None]
    if local:
        hostile = torch.stack(local, 1) < -SIGNIFICANT
        believable = believable & ~hostile
    return Verdict(believable=believable, unit=unit)


def _with_whole(differ: Tensor, common: Tensor) -> Tensor:
    """Both counts over all groups, followed by those of each group if there are several."""
    groups = torch.stack([differ, common]).double()
    whole = groups.sum(1, keepdim=True)
    if len(differ) == 1:
        return whole
    return torch.cat([whole, groups], 1)


def _clear_diagonal_(matrices: Tensor) -> None:
    matrices.diagonal(dim1=1, dim2=2).zero_()


def _scores(c: Tensor, n: Tensor, unit: Tensor) -> Tensor:
    """The z of each worker, see `judge`, for several pairs of C and n; NaN for a worker that has met nobody.

    All are NaN if there are fewer than three units, or if the eigenvalue does not exceed the noise, which
    is about 2 sqrt(units / n).
    """
    _, numbers = torch.unique(unit, return_inverse=True)
    members = one_hot(numbers).double()  # (workers, units)
    share = members / members.sum(0)  # of each worker in its unit
    units = members.shape[1]
    if units < FEW:
        return torch.full_like(c[:, 0], torch.nan)
    among = share.T @ c @ share
    _clear_diagonal_(among)
    value, vector = leading_eigenvector(among)
    e = oriented(vector @ members.T)
    own_share = share.sum(1)
    z = _standardized(c, n, e, own_share, unit)
    noise = (units / _compared(n)).sqrt()
    significant = value > SIGNIFICANT * noise
    return torch.where(significant[:, None], z, torch.nan)


def _standardized(
    c: Tensor,
    n: Tensor,
    e: Tensor,
    share: Tensor,
    unit: Tensor,
) -> Tensor:
    """Agreement with the other units in standard deviations: the equation of `judge`."""
    foreign = unit != unit[:, None]
    mine = e * share  # copies share one vote
    with_others = c * foreign
    agreement = with_others @ mine[:, :, None]
    compared = (n > 0) & foreign
    variances = torch.where(compared, 1 / n, 0.0)
    squares = mine * e  # copies err alike
    variance = variances @ squares[:, :, None]
    z = agreement / variance.sqrt()
    return z[:, :, 0]


def _compared(n: Tensor) -> Tensor:
    """The mean number of coordinates on which two workers that met were compared, at least 1."""
    met = (n > 0).double()
    _clear_diagonal_(met)
    pairs = met.sum((1, 2)).clamp_min(1)
    coordinates = (met * n).sum((1, 2))
    mean = coordinates / pairs
    return mean.clamp_min(1)
