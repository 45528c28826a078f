"""Unequal machines: batch sizes with which all ranks finish a round together, and batches of those sizes.

All ranks see the same times, so all compute the same sizes without another exchange.
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

MAX_TIME_RATIO = 0.95  # new sizes are used only if they shorten a round to this share of its time


class Balancer:
    """Sets each rank's batch size by its speed, for a given total.

    Every few rounds, each rank's share of the total becomes its share of the speed. Speed is samples per second, the
    median over those rounds. If a round also has a fixed cost, repeated looks still converge to equal times. The next
    look notices a rank that has slowed down.

    Args:
        total: samples per round, over all ranks.
        world: number of ranks.
        every: rounds between two looks; 0: sizes do not change.
        sizes: initial sizes; None: equal.
        lag: rounds before a new plan is used, because a DataLoader with workers draws batches ahead: at least
            num_workers * prefetch_factor.

    >>> balancer = Balancer(total=90, world=2, every=1)
    >>> balancer.observe([0.1, 0.8])             # seconds: the second is 8 times slower
    >>> balancer.sizes(1)
    (79, 11)

    """

    def __init__(
        self,
        total: int,
        world: int,
        *,
        every: int = 10,
        sizes: Sequence[int] | None = None,
        lag: int = 0,
    ) -> None:
        if world < 1 or total < world:
            raise ConfigError(f"total is {total}; it must be {world} or more, a sample for each rank")
        if every < 0 or lag < 0:
            raise ConfigError(f"every is {every} and lag {lag}; they must be 0 or more")
        equal = shared_out(total, [1.0] * world)
        first = equal if sizes is None else tuple(sizes)
        if len(first) != world or sum(first) != total or min(first) < 1:
            raise ConfigError(f"sizes are {first}; wanted {world}, each 1 or more, {total} in all")
        self.total = total
        self.world = world
        self.every = every
        self.lag = lag
        self.rounds = 0  # observed
        self._asked = -1  # the last round that sizes were asked for
        self._plans = [(0, first)]  # (first round, sizes)
        self._speeds: list[list[float]] = []  # samples per second by rank, in the rounds since the last look

    def sizes(self, round: int) -> tuple[int, ...]:
        """Each rank's batch size in a round, counted from 0."""
        ahead = round - self.rounds
        if ahead > self.lag and round > self._asked + 1:
            raise ConfigError(
                f"round {round} was asked for, and {self.rounds} rounds were observed; to resume, load the"
                " balancer's state first: balancer.load_state_dict(...)"
            )
        if ahead > self.lag:
            raise ConfigError(
                f"round {round} is {ahead} ahead of what was observed; give Balancer(lag=...)"
                " what the DataLoader draws ahead, num_workers * prefetch_factor, or take num_workers=0"
            )
        self._asked = max(self._asked, round)
        return next(sizes for start, sizes in reversed(self._plans) if start <= round)

    def sizes_after(self, decided: int) -> tuple[int, ...]:
        """The sizes of the round after so many decided ones, all of which must have been observed."""
        if decided != self.rounds:
            raise ConfigError(
                f"{decided} rounds are decided, and the balancer has observed {self.rounds}; to resume, load its"
                " state as well: balancer.load_state_dict(...)"
            )
        return self.sizes(decided)

    def observe(self, seconds: Sequence[float]) -> None:
        """Record how long each rank worked in a round; 0: unknown."""
        sizes = self.sizes(self.rounds)
        self.rounds += 1
        if not self.every:
            return
        if min(seconds) > 0:
            speeds = [samples / taken for samples, taken in zip(sizes, seconds, strict=True)]
            self._speeds.append(speeds)
        if len(self._speeds) >= self.every:
            self._plan()

    def _plan(self) -> None:
        speeds = [median(of_rank) for of_rank in zip(*self._speeds, strict=True)]
        self._speeds = []
        _, old = self._plans[-1]
        new = shared_out(self.total, speeds)
        if _round_time(new, speeds) < MAX_TIME_RATIO * _round_time(old, speeds):
            self._plans.append((self.rounds + self.lag, new))

    def state_dict(self) -> State:
        """Everything needed to resume."""
        recent = self._plans[-2 - self.lag :]
        return {
            "total": self.total,
            "world": self.world,
            "rounds": self.rounds,
            "plans": [[start, list(sizes)] for start, sizes in recent],
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state. With another total or number of ranks, only the count of rounds is loaded."""
        self.rounds = state["rounds"]
        self._asked = self.rounds - 1
        self._speeds = []
        if state["total"] == self.total and state["world"] == self.world:
            self._plans = [(start, tuple(sizes)) for start, sizes in state["plans"]]
        else:
            _, first = self._plans[0]
            self._plans = [(0, first)]


class Stopwatch:
    """Measures how long a rank works in a round: from the end of a vote to the next, less the time inside hooks."""

    def __init__(self) -> None:
        self._resumed: float | None = None  # end of the last vote
        self._inside = 0.0  # seconds

    def begin(self) -> None:
        """Start a new round."""
        self._inside = 0.0

    def spend(self, entered: float) -> None:
        """Leave out the time since a hook was entered, which includes waiting for other ranks."""
        self._inside += time.perf_counter() - entered

    def resume(self) -> None:
        """The vote is over; the rank works again."""
        self._resumed = time.perf_counter()

    def worked(self, until: float) -> float:
        """Seconds of work in this round; 0: unknown."""
        if self._resumed is None:
            return 0.0
        return until - self._resumed - self._inside


class UnequalSampler(Sampler[list[int]]):
    """One rank's batches, for DataLoader(batch_sampler=...): in an epoch every sample comes once, on one rank.

    Round t uses the next `total` samples of the epoch's permutation and cuts them by the sizes of that round. The last
    round of an epoch uses the rest: fewer samples, or up to one more per rank, so that every rank has a sample. The
    batch of a round is a pure function of seed, round and sizes: to resume from a checkpoint, set `round`.

    Args:
        samples: size of the data set.
        balancer: gives the sizes.
        rank: the rank of these batches.
        seed: the same on all ranks.
        accumulate: batches in a round, with gradient accumulation.

    """

    def __init__(
        self,
        samples: int,
        balancer: Balancer,
        rank: int,
        *,
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        if samples < balancer.world:
            raise ConfigError(f"{samples} samples are too few for {balancer.world} ranks")
        self.samples = samples
        self.balancer = balancer
        self.rank = rank
        self.seed = seed
        self.accumulate = accumulate
        self.round = 0  # batches drawn
        whole, rest = divmod(samples, balancer.total)
        self.rounds = max(1, whole + (rest >= balancer.world))  # of an epoch
        self._epoch = -1
        self._permutation: list[int] = []  # of the epoch

    def batch(self, round: int) -> list[int]:
        """The indices of this rank's samples in a round, counted from 0."""
        epoch, number = divmod(round, self.rounds)
        if epoch != self._epoch:
            self._shuffle(epoch)
        total = self.balancer.total
        start = number * total
        is_last = number == self.rounds - 1
        stop = self.samples if is_last else start + total
        sizes = self.balancer.sizes(round // self.accumulate)
        if stop - start != total:
            sizes = shared_out(stop - start, sizes)
        first = start + sum(sizes[: self.rank])
        return self._permutation[first : first + sizes[self.rank]]

    def _shuffle(self, epoch: int) -> None:
        coin = coin_for("coin", self.seed, epoch)
        assert coin is not None
        generator = torch.Generator().manual_seed(coin.key >> 1)
        self._epoch = epoch
        self._permutation = torch.randperm(self.samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        """The remaining batches of the epoch."""
        while True:
            batch = self.batch(self.round)
            self.round += 1
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
    exact = [spare * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    left = spare - sum(parts)
    for i in by_remainder[:left]:
        parts[i] += 1
    return tuple(1 + part for part in parts)


def _round_time(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds of the slowest rank."""
    return max(samples / speed for samples, speed in zip(sizes, speeds, strict=True))
