"""What the server has learnt about workers: estimators of the crossover probability p.

    CountTrust         mismatches / votes cast, one count per worker and group of coordinates (eq. 4, pooled)
    CoordinateTrust    the same per worker and coordinate, 2 bytes each                       (eq. 4)
    PairCounts         how often two workers differ, by group of coordinates
    AgreementTrust     p from how workers agree with each other, never looking at the decision

All are keyed by worker id. A newcomer starts with the prior, a returning worker with what was known
of it. Evidence is integers and adds up, so shards of a server learn what one server would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from signvote.core.vote import ONE, fixed_point, llr_weights
from signvote.errors import ConfigError
from signvote.kernels import WORD, CoordinateWeights, download, upload, words_for

State = dict[str, Any]

PRIOR = 0.25  # p of a worker when nothing is known of anybody: any p < 1/2 makes the first vote plain


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What one vote shows about the workers that took part; evidence of disjoint coordinates adds."""

    workers: tuple[int, ...]
    mismatches: Tensor  # (workers, groups) int64: votes that differ from the decision
    cast: Tensor  # (workers, groups) int64: votes cast where there is a decision
    differ: Tensor | None = None  # (..., workers, workers) int64: coordinates on which two differ
    common: Tensor | None = None  # (..., workers, workers) int64: coordinates on which both voted
    present: Tensor | None = None  # (workers,) bool: who took part; None: all did

    def __add__(self, other: Evidence) -> Evidence:
        def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return a if b is None else b if a is None else a + b

        return Evidence(
            workers=self.workers,
            mismatches=self.mismatches + other.mismatches,
            cast=self.cast + other.cast,
            differ=add(self.differ, other.differ),
            common=add(self.common, other.common),
            present=self.present,
        )

    def sent(self) -> Callable[[], Evidence]:
        """Begin to bring it to the CPU; the result waits for it, and leaves out who took no part."""
        known = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        arrive = download(*known.values())

        def arrived() -> Evidence:
            counts = dict(zip(known, arrive(), strict=True))
            present = counts.pop("present", None)
            if present is None or bool(present.all()):
                return Evidence(workers=self.workers, **counts)
            rows = present.nonzero()[:, 0]
            for name, value in counts.items():
                counts[name] = value[..., rows, :][..., rows] if name in ("differ", "common") else value[rows]
            return Evidence(workers=tuple(self.workers[i] for i in rows.tolist()), **counts)

        return arrived


class Trust(Protocol):
    """What a rule keeps between rounds."""

    def learn(self, evidence: Evidence) -> None:
        """Take in the evidence of a whole round."""

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker."""

    def state_dict(self) -> State:
        """Everything needed to go on."""

    def load_state_dict(self, state: State) -> None:
        """Go on from a state."""


def check_forgetting(forgetting: float) -> None:
    """Raise unless 0 < forgetting <= 1."""
    if not 0 < forgetting <= 1:
        raise ConfigError(f"forgetting is {forgetting}; it must lie in (0, 1], 1 = remember all")


class CountTrust:
    """p = mismatches / votes cast over the rounds before this one (paper, eq. 4), pooled.

    One count per worker and group, a group being all coordinates or one tensor: O(workers) numbers.
    With forgetting < 1, counts shrink by that factor each round that teaches something.
    A worker never seen in a group is believed as the average of those who were.
    """

    def __init__(self, groups: int, forgetting: float = 1.0) -> None:
        check_forgetting(forgetting)
        self.groups, self.forgetting = groups, forgetting
        self._counts: dict[int, Tensor] = {}  # worker -> (2, groups) float64: mismatches, cast

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The p of these workers, (workers, groups) float64."""
        nothing = torch.zeros(2, self.groups, dtype=torch.float64)
        known = sum(self._counts.values(), nothing)
        average = torch.where(known[1] > 0, known[0] / known[1], PRIOR)
        counts = torch.stack([self._counts.get(w, nothing) for w in workers], 1)
        return torch.where(counts[1] > 0, counts[0] / counts[1], average)

    def learn(self, evidence: Evidence) -> None:
        """Count one round."""
        for counts in self._counts.values():
            counts *= self.forgetting
        new = torch.stack([evidence.mismatches, evidence.cast]).double()
        for m, worker in enumerate(evidence.workers):
            self._counts[worker] = self._counts.get(worker, 0) + new[:, m]

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker."""
        self._counts.pop(worker, None)

    def state_dict(self) -> State:
        """Everything needed to go on."""
        nothing = torch.zeros(0, 2, self.groups, dtype=torch.float64)
        counts = torch.cat([nothing, *(c[None] for c in self._counts.values())])
        return {"workers": list(self._counts), "counts": counts}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state."""
        self._counts = dict(zip(state["workers"], state["counts"].clone(), strict=True))


class CoordinateTrust:
    """p[m,n] = mismatches / rounds, counted per worker and coordinate (paper, eq. 4).

    One uint16 each, in halves of a mismatch: a vote against the decision counts 2. No vote where there
    is a decision, or a vote where there is none, counts 1, what a fair coin in its place would on
    average; or, with `zero_is_symbol`, 2: zero is compared like a third sign, as the authors' code
    does. No vote and no decision agree: a coordinate dead for long wakes up with everybody trusted.

    A worker whose counters are full (`capacity` rounds) has them halved, together with its number of
    rounds; p stays and the past counts half. Forgetting f is the same with a smaller capacity: twice
    the rounds in which f^t falls to 1/2.
    """

    FULL = 16383  # rounds: 2 halves each, doubled once more for the lookup by sign, fill 16 bits

    def __init__(
        self, n: int, *, warmup: int, max_llr: float, forgetting: float = 1.0, zero_is_symbol: bool = False
    ) -> None:
        check_forgetting(forgetting)
        if warmup < 0:
            raise ConfigError(f"warmup is {warmup}; it must be 0 or more rounds")
        half_life = math.log(0.5) / math.log(forgetting) if forgetting < 1 else self.FULL
        self.n, self.warmup, self.max_llr = n, warmup, max_llr
        self.capacity = max(2, min(self.FULL, round(2 * half_life)))
        self.zero_is_symbol = zero_is_symbol
        self.slots: dict[int, int] = {}  # worker -> column of counters
        self.counters = torch.zeros(words_for(n), 0, WORD, dtype=torch.uint16)
        self._rounds: dict[int, int] = {}  # worker -> rounds in its counters
        self._seen: dict[int, int] = {}  # worker -> rounds it ever took part in

    def admit(self, workers: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Make room for workers not seen before; the counters go where the votes are."""
        self.counters = self.counters.to(device)
        new = [w for w in workers if w not in self.slots]
        if new:
            old = self.counters
            self.counters = old.new_zeros(old.shape[0], old.shape[1] + len(new), WORD)
            self.counters[:, : old.shape[1]] = old
            for worker in new:
                self.slots[worker] = len(self.slots)
                self._rounds[worker] = self._seen[worker] = 0

    def weights(self, workers: Sequence[int], word: int, words: int) -> CoordinateWeights:
        """Everything that gives the weight of these workers in some words of coordinates, eq. (3)."""
        kinds = [(self._rounds[w], self._seen[w] < self.warmup) for w in workers]
        rows = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        sizes = [2 * rounds + 1 for rounds, _ in rows]
        tables = torch.zeros(len(rows), 2 * max(sizes) + 1, dtype=torch.int32)
        for (rounds, in_warmup), i in rows.items():
            halves = torch.arange(2 * rounds + 1, dtype=torch.float64)
            weights = fixed_point(llr_weights(halves / max(1, 2 * rounds), max_llr=self.max_llr))
            if in_warmup:
                weights.fill_(ONE)
            tables[i, : 2 * len(halves)] = torch.cat([-weights, weights])
        table_of = torch.tensor([rows[kind] for kind in kinds], dtype=torch.int64)
        device = self.counters.device
        return CoordinateWeights(
            counters=self.counters[word : word + words],
            slots=upload(torch.tensor([self.slots[w] for w in workers], dtype=torch.int64), device),
            tables=upload(tables, device),
            table_of=upload(table_of, device),
            sizes=upload(torch.tensor(sizes, dtype=torch.int32)[table_of], device),
            zero_is_symbol=self.zero_is_symbol,
        )

    def crossover(self, worker: int) -> Tensor:
        """The p of one worker at every coordinate, (n,) float64; 1/2 before its first round."""
        rounds = self._rounds.get(worker, 0)
        if not rounds:
            return torch.full((self.n,), 0.5, dtype=torch.float64)
        halves = self.counters[:, self.slots[worker]].reshape(-1)[: self.n]
        return halves.cpu().double() / (2 * rounds)

    def learn(self, evidence: Evidence) -> None:
        """Close a round whose votes the kernel has counted."""
        for worker in evidence.workers:
            self._seen[worker] += 1
            self._rounds[worker] += 1
            if self._rounds[worker] == self.capacity:
                halves = self.counters[:, self.slots[worker]]
                halves.copy_(halves.to(torch.int32) >> 1)
                self._rounds[worker] //= 2

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker, and its counters."""
        if worker in self.slots:
            left = [w for w in self.slots if w != worker]
            bits = self.counters.view(torch.int16)  # CUDA indexes no uint16
            self.counters = bits[:, [self.slots[w] for w in left]].contiguous().view(torch.uint16)
            self.slots = {w: i for i, w in enumerate(left)}
            del self._rounds[worker], self._seen[worker]

    def state_dict(self) -> State:
        """Everything needed to go on."""
        workers = list(self.slots)
        return {
            "workers": workers,
            "rounds": [self._rounds[w] for w in workers],
            "seen": [self._seen[w] for w in workers],
            "counters": self.counters.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state."""
        workers = state["workers"]
        self.slots = {w: i for i, w in enumerate(workers)}
        self._rounds = dict(zip(workers, state["rounds"], strict=True))
        self._seen = dict(zip(workers, state["seen"], strict=True))
        self.counters = state["counters"].clone()


class PairCounts:
    """On how many coordinates two workers differ, and on how many both voted, by group of coordinates.

    With forgetting < 1, counts of a pair shrink by that factor each round in which the two meet.
    """

    def __init__(self, groups: int = 1, forgetting: float = 1.0) -> None:
        check_forgetting(forgetting)
        self.groups, self.forgetting = groups, forgetting
        self.index: dict[int, int] = {}  # worker -> its row and column
        self.counts = torch.zeros(2, groups, 0, 0, dtype=torch.float64)  # differ, common

    def learn(self, evidence: Evidence) -> None:
        """Count one round of pairs."""
        if evidence.differ is None or evidence.common is None:
            raise ConfigError("agreement needs evidence about pairs; this vote did not count them")
        for worker in evidence.workers:
            self.index.setdefault(worker, len(self.index))
        more = len(self.index) - self.counts.shape[-1]
        self.counts = torch.nn.functional.pad(self.counts, (0, more, 0, more))
        at = torch.tensor([self.index[w] for w in evidence.workers])
        new = torch.stack([evidence.differ, evidence.common]).view(2, self.groups, len(at), len(at))
        self.counts[:, :, at[:, None], at] = self.counts[:, :, at[:, None], at] * self.forgetting + new

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker."""
        if worker in self.index:
            left = [w for w in self.index if w != worker]
            at = torch.tensor([self.index[w] for w in left], dtype=torch.int64)
            self.counts = self.counts[:, :, at][..., at]
            self.index = {w: i for i, w in enumerate(left)}

    def state_dict(self) -> State:
        """Everything needed to go on."""
        return {"workers": list(self.index), "counts": self.counts.clone()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state."""
        self.index = {w: i for i, w in enumerate(state["workers"])}
        self.counts = state["counts"].clone().view(2, self.groups, len(self.index), len(self.index))


class AgreementTrust(PairCounts):
    """p from pairwise agreement, which never looks at the decision.

    If errors are independent, C_ij = E[Y_i Y_j] = a_i a_j with a = 1 - 2 p, so every pair of others
    gives |a_i| = sqrt(|C_ij C_ik / C_jk|); the median over pairs, weighted with |C_jk|, is kept: two
    workers that hardly agree say little of a third. Signs come from the leading eigenvector of C,
    oriented so that the majority of workers is honest.
    """

    def __init__(self, forgetting: float = 1.0) -> None:
        super().__init__(1, forgetting)

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The p of these workers, (workers,) float64."""
        if any(w not in self.index for w in workers):
            known = [w for w in workers if w in self.index]
            p = dict(zip(known, self.crossover(known).tolist(), strict=True)) if known else {}
            average = sum(p.values()) / len(p) if p else PRIOR
            return torch.tensor([p.get(w, average) for w in workers], dtype=torch.float64)
        at = torch.tensor([self.index[w] for w in workers])
        differ, common = self.counts[:, 0][:, at][:, :, at]
        return agreement_crossover(1 - 2 * differ / common)


def agreement_crossover(agreement: Tensor) -> Tensor:
    """The p of each worker from C_ij = mean of Y_i Y_j, (workers, workers); the diagonal is ignored.

    Fewer than three workers cannot be told apart: all get the prior. A pair that never met is NaN
    in C and left out; a worker with no usable pair gets 1/2, which is no vote.
    """
    m = agreement.shape[0]
    if m < 3:
        return torch.full((m,), PRIOR, dtype=torch.float64)
    c = agreement.double().clone().fill_diagonal_(torch.nan)
    magnitude = torch.empty(m, dtype=torch.float64)
    for i in range(m):
        ratios = (c[i][:, None] * c[i] / c).abs()  # over j, k; NaN where two of i, j, k are equal
        usable = ratios.isfinite()
        magnitude[i] = _weighted_median(ratios[usable], c.abs()[usable])
    leading = torch.linalg.eigh(torch.nan_to_num(c)).eigenvectors[:, -1]
    signs = torch.sign(leading)
    if signs.sum() < 0 or (signs.sum() == 0 and leading.sum() < 0):
        signs = -signs
    return (1 - signs * magnitude.sqrt().clamp(max=1)) / 2


def _weighted_median(values: Tensor, weights: Tensor) -> float:
    """The value at which half of the weight is reached; 0 if there is none."""
    if not values.numel():
        return 0.0
    order = values.argsort()
    reached = weights[order].cumsum(0)
    return float(values[order][torch.searchsorted(reached, reached[-1] / 2)])
