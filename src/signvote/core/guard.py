"""Who may be believed at all: what pairwise agreement says, without looking at the decision.

    Sample          the words of coordinates on which pairs are compared: all, or a secret few
    judge           pair counts -> a Verdict: who agrees with the others, and who are copies of each other
    GuardedTrust    pooled counts and pair counts of all workers, and the verdict on them
    capped          keeps positive weights within a ratio of each other: the security knob

The model: C_ij = mean of Y_i Y_j = a_i a_j where errors are independent, a = 1 - 2 p. So C has one large
eigenvalue, whose vector is a up to its sign; that is fixed by majority. Where no eigenvalue stands out of
the noise, fewer than three are left to compare, or most would not be believed, there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from signvote.core.bits import check_number, coin_for
from signvote.core.trust import CountTrust, Evidence, PairCounts, State
from signvote.core.vote import LARGEST, Votes
from signvote.errors import ConfigError
from signvote.kernels import WORD, backend, upload, words_for
from signvote.kernels.reference import chances

Groups = Sequence[tuple[int, int]]  # ranges of coordinates

SIGNIFICANT = 3.0  # standard deviations that agreement must stand out of chance
COPIES = 0.5  # correlation above which two may be copies of each other
SAME = 0.98  # correlation above which they are, however well others explain it
THIRDS = 16  # workers that are asked whether they are


class Sample:
    """The words of coordinates on which pairs of workers are compared, for each group.

    A word belongs to the sample by a hash of (secret, its number), so chunks and shards compare what one
    server would. It belongs to the group of its first coordinate: nearly the group's own coordinates.

    Args:
        groups: disjoint ranges in order; a group shorter than a word may have none of its own.
        size: expected number of coordinates; a shorter vector is compared whole.
        secret: below 2^64. Whoever does not know it cannot behave where it is looked at only.

    """

    def __init__(self, groups: Groups, size: int, secret: int) -> None:
        check_number("secret", secret)
        if size < WORD:
            raise ConfigError(f"sample is {size}; it must be {WORD} coordinates or more")
        self.groups, self.share = groups, size / groups[-1][1]
        coin = coin_for("coin", secret, 0)
        assert coin is not None
        self._key = coin
        self._known: dict[tuple[int, int, torch.device], list[tuple[Tensor | slice, int]]] = {}

    def pairs(self, votes: Votes) -> tuple[Tensor, Tensor]:
        """On how many coordinates two workers differ, and on how many both voted: (groups, M, M) each."""
        if votes.first % WORD:
            raise ConfigError(f"votes begin at coordinate {votes.first}; it must be a multiple of {WORD}")
        kernels, m = backend(votes.planes.signs.device), len(votes.workers)
        counts = torch.zeros(2, len(self.groups), m, m, dtype=torch.int64, device=votes.planes.signs.device)
        for g, (words, n) in enumerate(self._chosen(votes)):
            if n:
                planes = votes.planes.map(lambda p: p[:, words])  # noqa: B023
                counts[0, g], counts[1, g] = kernels.disagreements(planes, n)
        return counts[0], counts[1]

    def _chosen(self, votes: Votes) -> list[tuple[Tensor | slice, int]]:
        """For each group the words to compare, and how many coordinates they hold; the last may be short."""
        device = votes.planes.signs.device
        key = votes.first, votes.n, device
        if key not in self._known:
            first, count = votes.first // WORD, words_for(votes.n)
            words = (chances(self._key.after(first), count) < self.share).nonzero()[:, 0]
            at = (first + words) * WORD
            found: list[tuple[Tensor | slice, int]] = []
            for start, stop in self.groups:
                mine = words[(start <= at) & (at < stop)]
                cut = count * WORD - votes.n if len(mine) and mine[-1] == count - 1 else 0
                found.append((_at(mine, device), len(mine) * WORD - cut))
            self._known[key] = found
        return self._known[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What agreement says of workers."""

    believable: Tensor  # (workers, groups) bool
    unit: Tensor  # (workers,) int64: copies of each other share a number


def judge(differ: Tensor, common: Tensor) -> Verdict | None:
    """Who may be believed, from counts of pairs (groups, workers, workers); None: they do not tell.

        z_i = sum_u e_u C_iu / sqrt(sum_u e_u^2 / n_iu)       u: units other than i's own

    e is the leading eigenvector of C among units, a unit being a worker or copies of one, oriented so
    that most workers are positive; n counts coordinates. Believable is z > 3; in a group of several also
    z >= -3 there, because a small tensor alone shows little. A worker that met nobody yet is believable.
    Where those believable are no majority, few may be misleading many: there is no verdict.
    """
    counts = torch.stack([differ, common]).double()
    whole = counts.sum(1, keepdim=True)
    d, n = whole if len(differ) == 1 else torch.cat([whole, counts], 1)
    c = torch.where(n > 0, 1 - 2 * d / n, 0.0)
    c.diagonal(dim1=1, dim2=2).zero_()
    if not c.isfinite().all():
        return None
    unit = copies(c[0])
    overall, *local = _scores(c, n, unit)
    believable = ~(overall <= SIGNIFICANT)
    if overall.isnan().all() or 2 * int(believable.sum()) <= len(unit):
        return None
    if not local:
        return Verdict(believable=believable[:, None], unit=unit)
    return Verdict(believable=believable[:, None] & ~(torch.stack(local, 1) < -SIGNIFICANT), unit=unit)


def copies(c: Tensor) -> Tensor:
    """Number of the unit that each worker is in, that of its first member: copies of each other share one.

    Two are copies if C_ij lies above 1/2 and above the middle between 1 and what their agreement with
    others k, l explains, the median of C_ik C_jl / C_kl: a_i a_j for independent workers; or above 0.98,
    because many copies explain each other. So two strong workers agree, and are none. Fewer than four
    workers explain nothing: none are copies.
    """
    unlike = torch.arange(len(c))
    i, j = (c > COPIES).triu(1).nonzero(as_tuple=True)
    if len(c) < 4 or not len(i):
        return unlike
    met = torch.where(c == 0, torch.nan, c)
    size = c.abs().sum(1)
    thirds = (size - size.median()).abs().argsort()[:THIRDS]  # the most ordinary: enough of them
    own = (thirds == i[:, None]) | (thirds == j[:, None])
    with_i, with_j = (torch.where(own, torch.nan, met[k][:, thirds]) for k in (i, j))
    ratios = with_i[:, :, None] * with_j[:, None] / met[thirds][:, thirds]
    explained = ratios.flatten(1).nanmedian(1).values.nan_to_num(0).clamp(0, 1)
    copied = c[i, j] > ((1 + explained) / 2).clamp_max(SAME)
    linked = torch.zeros_like(c)
    linked[i[copied], j[copied]] = linked[j[copied], i[copied]] = 1
    return _connected(linked)


def capped(weights: Tensor, cap: float, sizes: Tensor | None = None) -> Tensor:
    """Integer weights (workers, groups): positive ones raised until no two differ by more than the cap.

    So L of M workers cannot overturn what all others want, if these have positive weights and
    L < M / (1 + cap): (M - L) / cap > L. Raised, not lowered, because the largest would otherwise be set
    by whoever manages to have a tiny weight. With sizes, (workers,), it is weight / size that is compared.

    >>> capped(torch.tensor([[9], [1], [0]]), 3).tolist()
    [[9], [3], [0]]
    >>> capped(torch.tensor([[9], [1], [0]]), 3, torch.tensor([3.0, 1.0, 1.0])).tolist()
    [[9], [1], [0]]
    """
    if math.isinf(cap):
        return weights
    size = torch.ones(len(weights), 1) if sizes is None else sizes[:, None]
    floor = torch.ceil((weights / size.double()).amax(0, keepdim=True) * size / cap)
    raised = torch.where(weights > 0, weights.maximum(floor), weights)
    fitting = (LARGEST / raised.amax(0, keepdim=True)).clamp(0, 1)
    return torch.ceil(raised * fitting).to(weights.dtype)


class GuardedTrust:
    """Pooled counts, which say how much a worker is believed, and pair counts, which say whether.

    The verdict is on all workers known, whoever votes next; it changes when a round is learnt.
    """

    def __init__(self, groups: int, forgetting: float, memory: float) -> None:
        self.counts, self.pairs = CountTrust(1, forgetting), PairCounts(groups, memory)
        self._verdict: Verdict | None = None

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The pooled p of these workers, (workers, 1)."""
        return self.counts.crossover(workers)

    def verdict(self, workers: Sequence[int]) -> Verdict | None:
        """On these workers; one that is new is believable, and no copy. None: there is none."""
        if self._verdict is None:
            return None
        known, size = self.pairs.index, len(self.pairs.index)
        at = torch.tensor([known.get(w, size) for w in workers])
        believable = torch.nn.functional.pad(self._verdict.believable, (0, 0, 0, 1), value=True)[at]
        unit = torch.nn.functional.pad(self._verdict.unit, (0, 1))[at]
        return Verdict(believable=believable, unit=torch.where(at < size, unit, size + torch.arange(len(at))))

    def learn(self, evidence: Evidence) -> None:
        """Take in a whole round."""
        whole = {name: getattr(evidence, name).sum(1, keepdim=True) for name in ("mismatches", "cast")}
        self.counts.learn(replace(evidence, **whole))
        self.pairs.learn(evidence)
        self._judge()

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker."""
        self.counts.forget(worker)
        self.pairs.forget(worker)
        self._judge()

    def state_dict(self) -> State:
        """Everything needed to go on."""
        return {"counts": self.counts.state_dict(), "pairs": self.pairs.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state."""
        self.counts.load_state_dict(state["counts"])
        self.pairs.load_state_dict(state["pairs"])
        self._judge()

    def _judge(self) -> None:
        self._verdict = judge(*self.pairs.counts)


def _at(words: Tensor, device: torch.device) -> Tensor | slice:
    """An index of these words, in order: a slice, which copies nothing, if none is left out."""
    if len(words) and len(words) == words[-1] - words[0] + 1:
        return slice(int(words[0]), int(words[-1]) + 1)
    return upload(words, device)


def _connected(linked: Tensor) -> Tensor:
    """The first member of each worker's connected part of a graph."""
    reach = linked.clone().fill_diagonal_(1)
    for _ in range(len(linked).bit_length()):
        reach = ((reach @ reach) > 0).double()
    return reach.argmax(1)


def _scores(c: Tensor, n: Tensor, unit: Tensor) -> Tensor:
    """The z of each worker, see `judge`, from each of several (C, n); NaN for one that met nobody.

    All are NaN where fewer than three units are left, or where the eigenvalue does not stand out of
    chance, which gives about 2 sqrt(units / n).
    """
    one = torch.nn.functional.one_hot(torch.unique(unit, return_inverse=True)[1]).double()  # worker x unit
    share = one / one.sum(0)
    if (units := one.shape[1]) < 3:
        return torch.full(c.shape[:2], torch.nan, dtype=torch.float64)
    among = share.T @ c @ share
    among.diagonal(dim1=1, dim2=2).zero_()
    values, vectors = torch.linalg.eigh(among)
    e = vectors[:, :, -1] @ one.T
    balance, total = e.sign().sum(1, keepdim=True), e.sum(1, keepdim=True)
    e = torch.where((balance < 0) | ((balance == 0) & (total < 0)), -e, e)
    mine = e * share.sum(1)  # copies share one say
    foreign = unit != unit[:, None]
    variance = torch.where((n > 0) & foreign, 1 / n, 0.0) @ (mine * e)[:, :, None]  # and err alike
    z = ((c * foreign) @ mine[:, :, None] / variance.sqrt())[:, :, 0]
    met = (n > 0).double() * ~torch.eye(len(unit), dtype=torch.bool)
    typical = (met * n).sum((1, 2)) / met.sum((1, 2)).clamp_min(1)  # coordinates on which a pair was compared
    told = values[:, -1] > SIGNIFICANT * (units / typical.clamp_min(1)).sqrt()
    return torch.where(told[:, None], z, torch.nan)
