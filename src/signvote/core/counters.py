"""Counters per worker and coordinate, for the rule `it-signsgd`: p[m,n] = mismatches / rounds, 2 bytes each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.trust import Evidence, State, check_counts, check_forgetting, numbered, numbered_once
from signvote.core.vote import ONE, fixed_point, llr_weights
from signvote.errors import ConfigError
from signvote.kernels import WORD, CoordinateWeights, upload, words_for


class Past(NamedTuple):
    """The part of a worker's history that selects its table of weights; workers with equal pasts share one."""

    rounds: int  # in its counters
    is_plain: bool  # its vote counts one: it warms up, or was never counted

    @property
    def values(self) -> int:
        """How many values a counter can have."""
        return 2 * self.rounds + 1


class CoordinateTrust:
    """p[m,n] = mismatches / rounds, counted per worker and coordinate (paper, eq. 4).

    A counter is a uint16 in units of half a mismatch. The kernels add to it:

        2    a vote differs from the decision
        1    exactly one of vote and decision is missing, as a fair coin in its place would on average;
             2 with `zero_is_symbol`, which compares zero like a third sign, as the authors' code does
        0    vote and decision agree, or both are missing; while a coordinate has no gradient, p falls

    When the counters of a worker are full, after `capacity` rounds, they are halved together with its
    number of rounds: p stays, and the past counts half. The capacity is even, so that a counter cannot
    exceed its rounds. Forgetting is a smaller capacity, twice the number of rounds in which forgetting^t
    falls to 1/2.

    Args:
        n: number of coordinates.
        warmup: rounds in which a worker's weight is 1.
        max_llr: largest weight.
        forgetting: in (0, 1]; 1 keeps everything.
        zero_is_symbol: see above.

    """

    FULL = 16382  # rounds: 2 halves each, doubled once more for the lookup by sign, fill 16 bits

    def __init__(
        self,
        n: int,
        *,
        warmup: int,
        max_llr: float,
        forgetting: float = 1.0,
        zero_is_symbol: bool = False,
    ) -> None:
        check_forgetting(forgetting)
        if warmup < 0:
            raise ConfigError(f"warmup is {warmup}; it must be 0 or more rounds")
        self.n = n
        self.warmup = warmup
        self.max_llr = max_llr
        self.capacity = self._capacity(forgetting)
        self.zero_is_symbol = zero_is_symbol
        self.slots: dict[int, int] = {}  # worker -> column of counters
        self.counters = torch.zeros(words_for(n), 0, WORD, dtype=torch.uint16)
        self._rounds: dict[int, int] = {}  # worker -> rounds in its counters
        self._seen: dict[int, int] = {}  # worker -> rounds in which it ever voted

    def _capacity(self, forgetting: float) -> int:
        """The number of rounds after which counters are halved."""
        if forgetting == 1:
            return self.FULL
        half_life = math.log(0.5) / math.log(forgetting)
        rounds = 2 * round(half_life)
        fitting = min(rounds, self.FULL)
        return max(2, fitting)

    @property
    def workers(self) -> list[int]:
        """The workers that have counters."""
        return list(self.slots)

    def admit(self, workers: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Add counters for new workers, and move all counters to this device."""
        self.counters = self.counters.to(device)
        new = [worker for worker in workers if worker not in self.slots]
        if not new:
            return
        known = self.counters
        words, old_slots, _ = known.shape
        slots = old_slots + len(new)
        self.counters = known.new_zeros(words, slots, WORD)
        self.counters[:, :old_slots] = known
        for worker in new:
            self.slots[worker] = len(self.slots)
            self._rounds[worker] = 0
            self._seen[worker] = 0

    def weights(self, workers: Sequence[int], word: int, words: int) -> CoordinateWeights:
        """The counters of a range of words, and tables with the weight for each value of a counter."""
        pasts = [self._past(worker) for worker in workers]
        distinct = dict.fromkeys(pasts)
        rows = {past: row for row, past in enumerate(distinct)}
        tables = [self._table(past) for past in rows]
        table_of = [rows[past] for past in pasts]
        sizes = [past.values for past in pasts]
        slots = [self.slots[worker] for worker in workers]
        device = self.counters.device
        return CoordinateWeights(
            counters=self.counters[word : word + words],
            slots=upload(torch.tensor(slots, dtype=torch.int64), device),
            tables=upload(_padded(tables), device),
            table_of=upload(torch.tensor(table_of, dtype=torch.int64), device),
            sizes=upload(torch.tensor(sizes, dtype=torch.int32), device),
            zero_is_symbol=self.zero_is_symbol,
        )

    def _past(self, worker: int) -> Past:
        return Past(
            rounds=self._rounds[worker],
            is_plain=self._seen[worker] < self.warmup or self._rounds[worker] == 0,
        )

    def _table(self, past: Past) -> Tensor:
        """-w for each value of a counter, then +w: what a vote of -1 or +1 adds to the tally."""
        halves = torch.arange(past.values, dtype=torch.float64)
        rounds = max(1, past.rounds)
        p = halves / (2 * rounds)  # (paper, eq. 4)
        weights = fixed_point(llr_weights(p, max_llr=self.max_llr))  # (paper, eq. 3)
        if past.is_plain:
            weights.fill_(ONE)
        return torch.cat([-weights, weights])

    def learn(self, evidence: Evidence) -> None:
        """Count a round whose votes the kernel has already added to the counters."""
        for worker in evidence.workers:
            if worker not in self.slots:
                continue  # a relay has its counters
            self._seen[worker] += 1
            self._rounds[worker] += 1
            if self._rounds[worker] >= self.capacity:
                self._halve(worker)

    def _halve(self, worker: int) -> None:
        slot = self.slots[worker]
        counters = self.counters[:, slot]
        halved = counters.to(torch.int32) >> 1
        counters.copy_(halved)
        self._rounds[worker] = -(-self._rounds[worker] // 2)

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers, their counters included."""
        gone = self.slots.keys() & set(workers)
        if not gone:
            return
        for worker in gone:
            del self.slots[worker]
            del self._rounds[worker]
            del self._seen[worker]
        columns = list(self.slots.values())
        bits = self.counters.view(torch.int16)  # CUDA indexes no uint16
        left = bits[:, columns].contiguous()
        self.counters = left.view(torch.uint16)
        self.slots = numbered(self.slots)

    def state_dict(self) -> State:
        """Everything needed to resume."""
        workers = self.workers
        return {
            "workers": workers,
            "rounds": [self._rounds[worker] for worker in workers],
            "seen": [self._seen[worker] for worker in workers],
            "counters": self.counters.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        workers = state["workers"]
        rounds = state["rounds"]
        seen = state["seen"]
        slots = numbered_once(workers)
        self._check(rounds, seen, state["counters"])
        self.slots = slots
        self._rounds = dict(zip(workers, rounds, strict=True))
        self._seen = dict(zip(workers, seen, strict=True))
        self.counters = state["counters"].clone()

    def _check(self, rounds: Sequence[int], seen: Sequence[int], counters: Tensor) -> None:
        """Raise unless every worker was seen as often as it was counted, and no counter exceeds its rounds."""
        counted = torch.tensor(rounds, dtype=torch.int64)
        ever = torch.tensor(seen, dtype=torch.int64)
        check_counts(counted, ever.clamp_max(self.capacity))
        bits = counters.view(torch.int16)
        if bits.numel():
            check_counts(bits.amin((0, 2)), 2 * counted)
            check_counts(bits.amax((0, 2)), 2 * counted)


def _padded(tables: Sequence[Tensor]) -> Tensor:
    """Tables as rows, followed by zeros: at least one, the weight of a missing vote."""
    longest = max(len(table) for table in tables)
    width = longest + 1
    rows = torch.zeros(len(tables), width, dtype=torch.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return rows
