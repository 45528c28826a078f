"""Unequal machines: batch sizes with which all finish a round together, and batches of those sizes.

All ranks are shown the same times, so all compute the same sizes: nothing is sent for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch.utils.data import Sampler

from signvote.core.bits import coin_for
from signvote.core.trust import State
from signvote.errors import ConfigError

WORTH = 0.95  # of a round's time: new sizes that save less are not worth a change


class Balancer:
    """Sets each rank's batch size by its speed, for a given total.

    After every few rounds a rank's share becomes its speed's: samples a second, the median of those rounds.
    If a round has a fixed cost, too, that is repeated until all take equally long; a rank that slows down
    is noticed after as many rounds.

    Args:
        total: samples a round of all ranks together.
        world: how many ranks.
        every: rounds between two looks; 0: sizes stay as they are.
        sizes: to begin with; None: equal.
        lag: rounds that a new plan waits, because a DataLoader with workers draws batches ahead: at least
            num_workers * prefetch_factor.

    >>> balancer = Balancer(total=90, world=2, every=1)
    >>> balancer.observe([0.1, 0.8])             # seconds: the second is 8 times slower
    >>> balancer.sizes(1)
    (79, 11)

    """

    def __init__(
        self, total: int, world: int, *, every: int = 10, sizes: Sequence[int] | None = None, lag: int = 0
    ) -> None:
        if world < 1 or total < world:
            raise ConfigError(f"total is {total}; it must be {world} or more, a sample for each rank")
        if every < 0 or lag < 0:
            raise ConfigError(f"every is {every} and lag {lag}; they must be 0 or more")
        first = shared_out(total, [1.0] * world) if sizes is None else tuple(sizes)
        if len(first) != world or sum(first) != total or min(first) < 1:
            raise ConfigError(f"sizes are {first}; wanted {world}, each 1 or more, {total} in all")
        self.total, self.world, self.every, self.lag = total, world, every, lag
        self.rounds = 0  # observed
        self._plans = [(0, first)]  # from which round on, sizes
        self._speeds: list[list[float]] = []  # samples a second by rank, of the rounds since the last look

    def sizes(self, round: int) -> tuple[int, ...]:
        """Each rank's batch size in a round, counted from 0."""
        if round > self.rounds + self.lag:
            raise ConfigError(
                f"round {round} is {round - self.rounds} ahead of what was observed; give Balancer(lag=...)"
                " what the DataLoader draws ahead, num_workers * prefetch_factor, or take num_workers=0"
            )
        return next(sizes for start, sizes in reversed(self._plans) if start <= round)

    def observe(self, seconds: Sequence[float]) -> None:
        """Take in how long each rank worked in a round; 0: unknown."""
        sizes = self.sizes(self.rounds)
        self.rounds += 1
        if self.every and min(seconds) > 0:
            self._speeds.append([n / s for n, s in zip(sizes, seconds, strict=True)])
        if self.every and len(self._speeds) >= self.every:
            self._plan()

    def _plan(self) -> None:
        speeds = [median(of_rank) for of_rank in zip(*self._speeds, strict=True)]
        self._speeds = []
        new, old = shared_out(self.total, speeds), self._plans[-1][1]
        slowest = [max(n / s for n, s in zip(sizes, speeds, strict=True)) for sizes in (new, old)]
        if slowest[0] < WORTH * slowest[1]:
            self._plans.append((self.rounds + self.lag, new))

    def state_dict(self) -> State:
        """Everything needed to go on."""
        plans = [[start, list(sizes)] for start, sizes in self._plans[-2 - self.lag :]]
        return {"total": self.total, "world": self.world, "rounds": self.rounds, "plans": plans}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; with another total or number of ranks only the rounds count."""
        self.rounds, self._speeds = state["rounds"], []
        if (state["total"], state["world"]) == (self.total, self.world):
            self._plans = [(start, tuple(sizes)) for start, sizes in state["plans"]]
        else:
            self._plans = [(0, self._plans[0][1])]


class Stopwatch:
    """Measures how long a rank works in a round: from the end of a vote to the next, less the time inside hooks."""

    def __init__(self) -> None:
        self._resumed: float | None = None  # when the last vote was over
        self._inside = 0.0  # seconds

    def begin(self) -> None:
        """A new round begins."""
        self._inside = 0.0

    def spend(self, entered: float) -> None:
        """Leave out the time since a hook was entered: it waited for other ranks, too."""
        self._inside += time.perf_counter() - entered

    def resume(self) -> None:
        """The vote is over."""
        self._resumed = time.perf_counter()

    def worked(self, until: float) -> float:
        """Seconds of work in this round; 0: unknown."""
        return 0.0 if self._resumed is None else until - self._resumed - self._inside


class UnequalSampler(Sampler[list[int]]):
    """One rank's batches, for DataLoader(batch_sampler=...): in an epoch every sample comes once, on one rank.

    Round t takes the next `total` samples of the epoch's order and cuts them by the sizes of that round.
    The last round of an epoch takes what is left: fewer, or up to one per rank more, so that nobody is
    without a sample. A round's batch is a pure function of seed, round and sizes: to go on after a
    checkpoint, set `round`.

    Args:
        samples: of the data set.
        balancer: knows the sizes.
        rank: whose batches.
        seed: the same on all ranks.
        accumulate: batches in a round, with gradient accumulation.

    """

    def __init__(
        self, samples: int, balancer: Balancer, rank: int, *, seed: int = 0, accumulate: int = 1
    ) -> None:
        if samples < balancer.world:
            raise ConfigError(f"{samples} samples are too few for {balancer.world} ranks")
        self.samples, self.balancer, self.rank, self.seed = samples, balancer, rank, seed
        self.accumulate = accumulate
        self.round = 0  # batches drawn
        whole, rest = divmod(samples, balancer.total)
        self.rounds = max(1, whole + (rest >= balancer.world))  # of an epoch
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, round: int) -> list[int]:
        """The indices of this rank's samples in a round, counted from 0."""
        epoch, number = divmod(round, self.rounds)
        if self._order[0] != epoch:
            coin = coin_for("coin", self.seed, epoch)
            generator = torch.Generator().manual_seed(coin.key >> 1 if coin else 0)
            self._order = epoch, torch.randperm(self.samples, generator=generator).tolist()
        total, sizes = self.balancer.total, self.balancer.sizes(round // self.accumulate)
        start = number * total
        stop = self.samples if number == self.rounds - 1 else start + total
        if stop - start != total:
            sizes = shared_out(stop - start, sizes)
        first = start + sum(sizes[: self.rank])
        return self._order[1][first : first + sizes[self.rank]]

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch."""
        while True:
            batch, self.round = self.batch(self.round), self.round + 1
            yield batch
            if self.round % self.rounds == 0:
                return

    def __len__(self) -> int:
        return self.rounds - self.round % self.rounds


def shared_out(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """A total in whole parts proportional to weights, each at least 1: by largest remainders.

    >>> shared_out(10, [1, 1, 6])
    (2, 2, 6)
    """
    spare = total - len(weights)
    exact = [spare * w / sum(weights) for w in weights]
    parts = [int(e) for e in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: spare - sum(parts)]:
        parts[i] += 1
    return tuple(1 + part for part in parts)
