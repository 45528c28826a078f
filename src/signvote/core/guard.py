"""The parts of the rule `robust`: a secret sample of coordinates, and trust guarded by pairwise agreement.

    Sample          the coordinates on which pairs of workers are compared: all, or a secret few
    GuardedTrust    pooled counts and pair counts of all workers, and the verdict on them

The mathematics of pairs is in `pairs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.core.bits import check_number, coin_for
from signvote.core.pairs import PairCounts, Verdict, judge
from signvote.core.rule import Ranges
from signvote.core.trust import FEW, CountTrust, Evidence, State
from signvote.core.vote import Votes
from signvote.errors import ConfigError
from signvote.kernels import WORD, Planes, backend, upload, words_for
from signvote.kernels.reference import chances

Key = tuple[int, int, torch.device]  # first coordinate, number of coordinates, device


class Chosen(NamedTuple):
    """The words of a group that belong to the sample."""

    words: Tensor | slice
    n: int  # coordinates in them

    def planes(self, planes: Planes) -> Planes:
        """These words of stacked planes."""
        return planes.map(lambda plane: plane[:, self.words])


class Sample:
    """The words of coordinates on which pairs of workers are compared, for each group.

    A hash of (secret, number of the word) decides whether a word belongs to the sample, so chunks and
    shards compare what one server would. A word belongs to the group of its first coordinate.

    Args:
        groups: disjoint ranges in order; a group shorter than a word may have no word.
        size: expected number of coordinates; a shorter vector is compared as a whole.
        secret: below 2^64. A worker that does not know it cannot be honest on the sample only.

    """

    def __init__(self, groups: Ranges, size: int, secret: int) -> None:
        check_number("secret", secret)
        if size < WORD:
            raise ConfigError(f"sample is {size}; it must be {WORD} coordinates or more")
        coin = coin_for("coin", secret, 0)
        assert coin is not None
        self.groups = groups
        self.share = size / groups[-1][1]
        self._coin = coin
        self._cache: dict[Key, list[Chosen]] = {}

    def pairs(self, votes: Votes) -> tuple[Tensor, Tensor]:
        """On how many coordinates two workers differ, and on how many both voted: (groups, M, M) each."""
        if votes.first % WORD:
            raise ConfigError(f"votes begin at coordinate {votes.first}; it must be a multiple of {WORD}")
        m = len(votes.workers)
        counts = torch.zeros(
            (2, len(self.groups), m, m),
            dtype=torch.int64,
            device=votes.device,
        )
        differ, common = counts
        kernels = backend(votes.device)
        for g, chosen in enumerate(self._chosen(votes)):
            if chosen.n:
                planes = chosen.planes(votes.planes)
                seen = kernels.disagreements(planes, chosen.n)
                differ[g], common[g] = seen
        return differ, common

    def _chosen(self, votes: Votes) -> list[Chosen]:
        """The words to compare for each group, from the cache if these coordinates were voted on before."""
        key = (votes.first, votes.n, votes.device)
        if key not in self._cache:
            self._cache[key] = self._choose(*key)
        return self._cache[key]

    def _choose(self, first: int, n: int, device: torch.device) -> list[Chosen]:
        """The words to compare for each group; the last word of the votes may be padded."""
        first_word = first // WORD
        count = words_for(n)
        last_word = count - 1
        padding = count * WORD - n
        coin = self._coin.after(first_word)
        in_sample = chances(coin, count) < self.share
        words = in_sample.nonzero()[:, 0]
        coordinates = (first_word + words) * WORD
        found = []
        for start, stop in self.groups:
            inside = (start <= coordinates) & (coordinates < stop)
            mine = words[inside]
            size = len(mine) * WORD
            if (mine == last_word).any():
                size -= padding
            index = _index(mine, device)
            found.append(Chosen(index, size))
        return found


def _index(words: Tensor, device: torch.device) -> Tensor | slice:
    """An index of words in ascending order: a slice, which copies nothing, if they are consecutive."""
    if len(words) == 0:
        return upload(words, device)
    first = int(words[0])
    last = int(words[-1])
    if len(words) == last - first + 1:
        return slice(first, last + 1)
    return upload(words, device)


class GuardedTrust:
    """Pair counts, which show whether a worker is believable, and pooled counts, which show how much.

    The verdict is on all known workers, not only on those that vote next. It changes with every round.

    Args:
        groups: of the pair counts; the pooled counts are of all coordinates.
        forgetting: of the pooled counts, per round.
        memory: forgetting of the pair counts.

    """

    def __init__(self, groups: int, forgetting: float, memory: float) -> None:
        self.counts = CountTrust(1, forgetting)
        self.pairs = PairCounts(groups, memory)
        self._verdict: Verdict | None = None

    def crossover(self, workers: Sequence[int]) -> Tensor:
        """The pooled p of these workers, (workers, 1)."""
        return self.counts.crossover(workers)

    def verdict(self, workers: Sequence[int]) -> Verdict | None:
        """The verdict on these workers. A new worker is believable and no copy. None: no verdict."""
        known = self._verdict
        if known is None:
            return None
        index = self.pairs.index
        new = len(index)  # a row for all new workers
        rows = [index.get(worker, new) for worker in workers]
        at = torch.tensor(rows)
        believable = pad(known.believable, (0, 0, 0, 1), value=True)
        unit = pad(known.unit, (0, 1))
        alone = new + torch.arange(len(rows))
        return Verdict(
            believable=believable[at],
            unit=torch.where(at < new, unit[at], alone),
        )

    @property
    def workers(self) -> list[int]:
        """The workers about which something is known."""
        return self.pairs.workers

    def learn(self, evidence: Evidence) -> None:
        """Add the evidence of a whole round."""
        pooled = replace(
            evidence,
            mismatches=evidence.mismatches.sum(1, keepdim=True),
            cast=evidence.cast.sum(1, keepdim=True),
        )
        if len(evidence.workers) >= FEW:
            self.counts.learn(pooled)
        self.pairs.learn(evidence)
        self._judge()

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        self.counts.forget(*workers)
        self.pairs.forget(*workers)
        self._judge()

    def state_dict(self) -> State:
        """Everything needed to resume."""
        return {
            "counts": self.counts.state_dict(),
            "pairs": self.pairs.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        pairs = PairCounts(self.pairs.groups, self.pairs.forgetting)
        pairs.load_state_dict(state["pairs"])
        self.counts.load_state_dict(state["counts"])
        self.pairs = pairs
        self._judge()

    def _judge(self) -> None:
        self._verdict = judge(*self.pairs.counts)
