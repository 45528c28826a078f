"""Pairs of workers: how often two of them agree, and what that shows. No function here looks at a decision.

    PairCounts    on how many coordinates two workers differ, over the rounds
    agreement     pair counts -> C, the mean of Y_i Y_j
    usual         C -> what each worker has in common with half of the others
    noise         rounds remembered -> what two workers have in common by chance
    sharing       C where votes are contested -> by how much workers that err together divide their votes
    hostile       C everywhere -> who contradicts the workers that agree with one another

The model: if errors are independent, C_ij = a_i a_j with a = 1 - 2 p. Coordinates are not independent: a hidden
unit moves all its weights at once. So what counts is for how many rounds C was counted, not on how many coordinates.

Row i of C is a worker, column j a witness: one of the same workers, with whom all are compared (witnesses.py).
`at` has the row of each witness. Few workers are all witnesses; `at` is None then, and C square and symmetric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.core.recent import SLACK
from signvote.core.trust import Evidence, State, check_counts, check_forgetting, numbered, numbered_once
from signvote.errors import ConfigError

NOISE = 0.2  # agreement that one round shows by chance; measured, see `noise`
CLEAR = 0.5  # times the noise: workers that contradict each other by more do so clearly
STEEP = 2.0  # how fast votes shrink that err together; 1 would make one vote of k copies
CHANCE = 0.01  # agreement where votes are contested that is excused, besides the noise
BY_SIZE = 0.05  # agreement there that two strong workers may have, times the product of their sizes
EXPLAINABLE = 0.5  # the most agreement there that anything explains
# Times the noise: a smaller excess is taken for chance, too. Equal workers keep equal weights, and ties stay ties.
SHARED = 8.0
DOUBT = 1000  # coordinates: agreement counted on fewer is taken for less than it seems
ENOUGH = 5  # fewer workers than this share nothing: where three agree, two have something in common
COLUMNS = 1000  # witnesses that are known at most: those of two rounds that have none in common

# ---- counting pairs ------------------------------------------------------------------------------


class PairCounts:
    """On how many coordinates two workers differ, and on how many both voted, per memory and group of coordinates.

    A row is a worker, a column a witness. A pair is known from either side: a worker that becomes a witness has
    a column as far as its row goes. About COLUMNS witnesses are known, the latest.

    Args:
        groups: how many groups there are.
        memories: factor by which the counts of a pair shrink in each round in which both vote, for each memory.

    """

    def __init__(self, groups: int = 1, memories: Sequence[float] = (1.0,)) -> None:
        for forgetting in memories:
            check_forgetting(forgetting)
        self.groups = groups
        self.memories = tuple(memories)
        self._forgetting = torch.tensor(memories, dtype=torch.float64)[:, None, None, None]
        self.index: dict[int, int] = {}  # worker -> its row
        self.columns: dict[int, int] = {}  # witness -> its column
        shape = (2, len(self.memories), groups, 0, 0)  # 2: differ, common
        self.counts = torch.zeros(shape, dtype=torch.float64)

    @property
    def workers(self) -> list[int]:
        """The workers that were counted."""
        return list(self.index)

    def learn(self, evidence: Evidence) -> None:
        """Count one round of pairs."""
        if evidence.differ is None or evidence.common is None:
            raise ConfigError("agreement needs evidence about pairs; this vote did not count them")
        witnesses = evidence.workers if evidence.witnesses is None else evidence.witnesses
        self._admit(evidence.workers, witnesses)
        rows = _positions(self.index, evidence.workers)
        columns = _positions(self.columns, witnesses)
        shape = (self.groups, len(rows), len(columns))
        seen = (evidence.differ, evidence.common)
        for counts, new in zip(self.counts, seen, strict=True):
            known = _part(counts, rows, columns)
            known.mul_(self._forgetting)
            known.add_(new.view(shape))
            counts[..., rows[:, None], columns] = known
        self._drop(self._too_many(witnesses))

    def _admit(self, workers: Sequence[int], witnesses: Sequence[int]) -> None:
        """Add zero counts for new workers, and for new witnesses what is known of them as workers."""
        for worker in workers:
            self.index.setdefault(worker, len(self.index))
        before = list(self.columns)
        new = [witness for witness in witnesses if witness not in self.columns]
        for witness in new:
            self.columns[witness] = len(self.columns)
        rows, columns = self.counts.shape[-2:]
        new_rows = len(self.index) - rows
        self.counts = pad(self.counts, (0, len(new), 0, new_rows))
        rows_of_new = _positions(self.index, new)
        rows_of_old = _positions(self.index, before)
        columns_of_old = _positions(self.columns, before)
        known = self.counts[..., rows_of_new[:, None], columns_of_old]
        self.counts[..., rows_of_old, columns:] = known.transpose(-1, -2)

    def _too_many(self, witnesses: Sequence[int]) -> list[int]:
        """The first witnesses that are none of these, if there are clearly too many."""
        limit = max(COLUMNS, len(witnesses))
        too_many = len(self.columns) - limit
        if too_many <= limit // SLACK:
            return []
        now = set(witnesses)
        others = [each for each in self.columns if each not in now]
        return others[:too_many]

    def _drop(self, witnesses: Iterable[int]) -> None:
        """Drop these columns."""
        gone = set(witnesses)
        if not gone:
            return
        left = [witness for witness in self.columns if witness not in gone]
        self.counts = self.counts[..., _positions(self.columns, left)]
        self.columns = numbered(left)

    def among(self, workers: Sequence[int], witnesses: Sequence[int] | None = None) -> Tensor:
        """The counts of these workers with these witnesses, (2, memories, groups, workers, witnesses).

        Counts of pairs that never met are 0. Without witnesses all of the workers are.
        """
        if witnesses is None:
            witnesses = workers
        rows = _positions(self.index, workers)
        columns = _positions(self.columns, witnesses)
        parts = [_part(counts, rows, columns) for counts in self.counts]
        return torch.stack(parts)

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        gone = set(workers)
        left = [worker for worker in self.index if worker not in gone]
        rows = _positions(self.index, left)
        self.counts = self.counts[..., rows, :]
        self.index = numbered(left)
        self._drop(gone & self.columns.keys())

    def state_dict(self) -> State:
        """Everything needed to resume."""
        state: State = {"workers": self.workers, "counts": self.counts.clone()}
        witnesses = list(self.columns)
        if witnesses != self.workers:
            state["witnesses"] = witnesses
        return state

    def load_state_dict(self, state: State) -> None:
        """Resume from a state. In one without witnesses all workers are."""
        index = numbered_once(state["workers"])
        columns = numbered_once(state["witnesses"]) if "witnesses" in state else dict(index)
        shape = (2, len(self.memories), self.groups, len(index), len(columns))
        counts = state["counts"].double().view(shape)
        differ, common = counts
        check_counts(differ, common)
        self.index = index
        self.columns = columns
        self.counts = counts.clone()


def _positions(index: dict[int, int], ids: Sequence[int]) -> Tensor:
    """The position of each id; one beyond the last for those that are not in the index."""
    beyond = len(index)
    positions = [index.get(each, beyond) for each in ids]
    return torch.tensor(positions, dtype=torch.int64)


def _part(counts: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Some rows and columns of the last two dimensions, as a copy; zeros beyond the last."""
    known = counts
    last_row, last_column = counts.shape[-2:]
    if len(rows) and len(columns):
        is_beyond = rows.max() >= last_row or columns.max() >= last_column
        known = pad(counts, (0, 1, 0, 1)) if is_beyond else counts
    return known[..., rows[:, None], columns]


# ---- what agreement shows ------------------------------------------------------------------------


def agreement(differ: Tensor, common: Tensor, at: Tensor | None = None) -> Tensor:
    """C_ij = mean of Y_i Y_j over the coordinates on which both voted, nearer to 0 if these are few.

    It is 0 for a worker with itself.
    """
    agreed_less_differed = common - 2 * differ
    c = agreed_less_differed / (common + DOUBT)
    c[..., _itself(c, at)] = 0
    return c


def _rows(c: Tensor, at: Tensor | None) -> Tensor:
    """The row of each column."""
    return torch.arange(c.shape[-1]) if at is None else at


def _itself(c: Tensor, at: Tensor | None) -> Tensor:
    """Where a worker meets itself, (workers, witnesses)."""
    workers = torch.arange(c.shape[-2])
    return workers[:, None] == _rows(c, at)


def usual(c: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What each worker has in common with half of the other witnesses at least, and what most workers have so.

    A minority moves neither far: of M workers, half of the others are never all in it.

    >>> c = torch.tensor([[0.0, 0.3, 0.3, 0.9], [0.3, 0.0, 0.3, 0.1], [0.3, 0.3, 0.0, 0.1], [0.9, 0.1, 0.1, 0.0]])
    >>> each, most = usual(c)
    >>> each.tolist(), float(most)
    ([0.3..., 0.3..., 0.3..., 0.1...], 0.3...)
    """
    workers, witnesses = c.shape
    rows = _rows(c, at)
    itself = _itself(c, at)
    others = c.masked_fill(itself, -torch.inf)
    half = witnesses // 2
    half_and_one = (witnesses + 1) // 2
    each = _largest(others, half_and_one)
    each[rows] = _largest(others[rows], half)  # a witness is none of its own
    most = _largest(each[None], (workers + 1) // 2)
    return each, most[0]


def _largest(c: Tensor, k: int) -> Tensor:
    """The k-th largest number of each row."""
    from_below = c.shape[1] - k + 1
    return c.kthvalue(from_below, 1).values


def noise(rounds: Tensor, memory: float) -> Tensor:
    """What two workers have in common by chance: NOISE / sqrt(rounds remembered); infinite before the first round.

    Args:
        rounds: in which each worker voted.
        memory: factor by which what was counted shrinks per round.

    >>> noise(torch.tensor([0.0, 1.0, 1e6]), 0.99).tolist()
    [inf, 0.20..., 0.02...]

    """
    remembered = rounds if memory == 1 else (1 - memory**rounds) / (1 - memory)
    return NOISE / remembered.sqrt()


def sharing(c: Tensor, sizes: Tensor, chance: Tensor, at: Tensor | None = None) -> Tensor:
    """The number of votes that each worker's vote is divided by, from C where votes are contested.

        1 + 2 sum_j max(0, C_ij - explained_ij)        over the others j; witnesses stand for all of them

    Explained is what most workers have in common, chance, and the strength of two workers that have shown
    theirs: strong workers see the same small signal. There is no threshold to hide below: k workers whose
    pushes have correlation x^2 have a common push of k x, and divide it by about 1 + 2 (k - 1) x^2.

    Args:
        c: C where votes are contested.
        sizes: the relative sqrt(B) that each worker has shown.
        chance: of each worker, see `noise`.
        at: the row of each witness; None: all are.

    """
    workers, witnesses = c.shape
    if workers < ENOUGH:
        return torch.ones(workers, dtype=c.dtype)
    itself = _itself(c, at)
    rows = _rows(c, at)
    _, most = usual(c, at)
    product = sizes[:, None] * sizes[rows]
    strong = (product - 4).clamp_min(0)  # twice the usual strength explains nothing
    by_chance = CHANCE + chance[:, None].maximum(chance[rows])
    explained = most + by_chance + BY_SIZE * strong
    explained = explained.clamp_max(EXPLAINABLE)
    excess = (c - explained).clamp_min(0)
    excess[itself] = 0
    is_witness = itself.sum(1).double()
    others = witnesses - is_witness
    each_stands_for = (workers - 1) / others
    divided_by = 1 + STEEP * excess.sum(1) * each_stands_for
    return torch.where(divided_by < 1 + SHARED * chance, 1.0, divided_by)


def hostile(c: Tensor, chance: Tensor, at: Tensor | None = None) -> Tensor:
    """Who contradicts the workers that agree with one another, from C everywhere; nobody if most do not agree.

    Those who agree: each of them agrees with more than half of all workers, itself included. Who is none
    of them, and clearly contradicts more than four of five of them, is hostile. Where workers own different
    data hardly anybody agrees with half of the others, and who knows something rare contradicts not so many.
    Of many workers the witnesses among those who agree are known, and stand for them.
    """
    rows = _rows(c, at)
    agrees = (c > 0) | _itself(c, at)
    agree = 2 * agrees.sum(0) > len(c)
    clear = CLEAR * chance[:, None].maximum(chance[rows])
    contradicts = c < -clear
    contradicted = (contradicts & agree).sum(1)
    is_hostile = 5 * contradicted > 4 * agree.sum()
    is_hostile[rows[agree]] = False
    return is_hostile
