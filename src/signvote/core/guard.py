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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from signvote.core.bits import check_number, coin_for
from signvote.core.trust import CountTrust, Evidence, PairCounts, State
from signvote.core.vote import Votes
from signvote.errors import ConfigError
from signvote.kernels import WORD, backend, upload
from signvote.kernels.reference import chances

Groups = Sequence[tuple[int, int]]  # ranges of coordinates

SIGNIFICANT = 3.0  # standard deviations that agreement must stand out of chance
COPIES = 0.5  # correlation above which two may be copies of each other
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
        self._known: dict[tuple[int, int, torch.device], list[tuple[Tensor, int]]] = {}

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

    def _chosen(self, votes: Votes) -> list[tuple[Tensor, int]]:
        """For each group the words to compare, and how many coordinates they hold; the last may be short."""
        device = votes.planes.signs.device
        key = votes.first, votes.n, device
        if key not in self._known:
            first, count = votes.first // WORD, -(-votes.n // WORD)
            words = (chances(self._key.after(first), count) < self.share).nonzero()[:, 0]
            at = (first + words) * WORD
            found = []
            for start, stop in self.groups:
                mine = words[(start <= at) & (at < stop)]
                cut = count * WORD - votes.n if len(mine) and mine[-1] == count - 1 else 0
                found.append((upload(mine, device), len(mine) * WORD - cut))
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
    c, n = _whole(differ, common)
    unit = copies(c)
    overall = _scores(c, n, unit)
    if overall is None:
        return None
    believable = ~(overall <= SIGNIFICANT)[:, None].repeat(1, len(differ))
    if 2 * int(believable[:, 0].sum()) <= len(unit):
        return None
    for g in range(len(differ)) if len(differ) > 1 else ():
        local = _scores(*_whole(differ[g : g + 1], common[g : g + 1]), unit)
        if local is not None:
            believable[:, g] &= ~(local < -SIGNIFICANT)
    return Verdict(believable=believable, unit=unit)


def _whole(differ: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """(C, n): C_ij = 1 - 2 differ / common of all groups; 0 if a pair never met, and on the diagonal."""
    d, n = differ.double().sum(0), common.double().sum(0)
    return torch.where(n > 0, 1 - 2 * d / n, 0.0).fill_diagonal_(0), n


def copies(c: Tensor) -> Tensor:
    """Number of the unit that each worker is in, that of its first member: copies of each other share one.

    Two are copies if C_ij lies above 1/2 and above the middle between 1 and what their agreement with
    others k, l explains, the median of C_ik C_jl / C_kl: a_i a_j for independent workers. So two strong
    workers agree, and are none. Fewer than four workers explain nothing: none are copies.
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
    copied = c[i, j] > (1 + explained) / 2
    linked = torch.zeros_like(c)
    linked[i[copied], j[copied]] = linked[j[copied], i[copied]] = 1
    return _connected(linked)


def capped(weights: Tensor, cap: float) -> Tensor:
    """Integer weights (workers, groups), none negative: positive ones raised to the largest / cap.

    So L of M workers cannot overturn what all others want, if these have positive weights and
    L < M / (1 + cap): (M - L) / cap > L. Raised, not lowered, because the largest would otherwise be set
    by whoever manages to have a tiny weight.

    >>> capped(torch.tensor([[9], [1], [0]]), 3).tolist()
    [[9], [3], [0]]
    """
    floor = torch.ceil(weights.double().amax(0, keepdim=True) / cap).to(weights.dtype)
    return torch.where(weights > 0, weights.maximum(floor), weights)


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


def _typical(common: Tensor) -> Tensor:
    """The mean number of coordinates on which a pair that met was compared; 1 if none did."""
    met = (common > 0).fill_diagonal_(False)
    return common[met].mean() if met.any() else torch.ones((), dtype=torch.float64)


def _connected(linked: Tensor) -> Tensor:
    """The first member of each worker's connected part of a graph."""
    reach = linked.clone().fill_diagonal_(1)
    for _ in range(len(linked).bit_length()):
        reach = ((reach @ reach) > 0).double()
    return reach.argmax(1)


def _members(unit: Tensor) -> Tensor:
    """(workers, units): 1 / size of its unit for each worker, in the unit's column."""
    columns = torch.unique(unit, return_inverse=True)[1]
    one = torch.nn.functional.one_hot(columns).double()
    return one / one.sum(0)


def _leading(c: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of C among units; its vector, given to all their members, most positive."""
    members = _members(unit)
    values, vectors = torch.linalg.eigh((members.T @ c @ members).fill_diagonal_(0))
    vector = vectors[:, -1][members.argmax(1)]
    balance = vector.sign().sum()
    return values[-1], -vector if balance < 0 or (balance == 0 and vector.sum() < 0) else vector


def _scores(c: Tensor, n: Tensor, unit: Tensor) -> Tensor | None:
    """The z of each worker, see `judge`; NaN for one that met nobody.

    None where fewer than three units are left, something is not finite, or the eigenvalue does not stand
    out of chance, which gives about 2 sqrt(units / n).
    """
    units = _members(unit).shape[1]
    if units < 3 or not c.isfinite().all():
        return None
    value, vector = _leading(c, unit)
    if value <= SIGNIFICANT * (units / _typical(n)).sqrt():
        return None
    weights = _members(unit).sum(1) * vector  # copies share one say
    foreign = unit != unit[:, None]
    spread = (torch.where(n > 0, 1 / n, 0.0) * foreign) @ (weights * vector)  # and err alike
    return ((c * foreign) @ weights) / spread.sqrt()
