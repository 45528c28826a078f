"""The parts of the rule `robust`: where pairs of workers are compared, and what is kept about them.

    Sample          the coordinates on which pairs are compared: all, or a secret few
    contested       the votes where they are nearly balanced
    GuardedTrust    pair counts of all workers, and the strength that each showed in its first rounds

The mathematics of pairs is in `pairs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.bits import check_number, coin_for
from signvote.core.pairs import PairCounts, agreement, noise, usual
from signvote.core.trust import FEW, Evidence, State
from signvote.core.vote import Votes, everywhere
from signvote.core.witnesses import rows_of
from signvote.errors import ConfigError, StateError
from signvote.kernels import WORD, Planes, backend, upload, words_for
from signvote.kernels.reference import chances

Key = tuple[int, int, torch.device]  # first coordinate, number of coordinates, device

LEAST = 2**14  # coordinates on which any number of workers is compared
LONG = 0.99  # the long memory: of about a hundred rounds
PROBATION = 20  # rounds in which a worker can show its strength
FIRST = 5  # rounds after which it is looked at
VISIBLE = 0.01  # agreement of most workers below which nothing can be compared
# More agreement than this shows no strength: the task is easy, or the votes of the others were seen.
PLAIN = 0.2


class Chosen(NamedTuple):
    """The words of some votes that belong to the sample."""

    words: Tensor | slice
    n: int  # coordinates in them


class Sample:
    """The words of coordinates on which pairs of workers are compared.

    A hash of (secret, number of the word) decides whether a word belongs to the sample, so chunks and
    shards compare what one server would.

    Args:
        n: number of coordinates of the model.
        size: expected number of coordinates in the sample; a shorter vector is compared as a whole.
        secret: below 2^64. A worker that does not know it cannot be honest on the sample only.

    """

    def __init__(self, n: int, size: int, secret: int) -> None:
        check_number("secret", secret)
        if size < WORD:
            raise ConfigError(f"sample is {size}; it must be {WORD} coordinates or more")
        coin = coin_for("coin", secret, 0)
        assert coin is not None
        self.n = n
        self.size = size
        self._coin = coin
        self._cache: dict[Key, Chosen] = {}
        self._all_words: tuple[Tensor, Tensor] | None = None  # see `_all`

    def of(self, votes: Votes) -> Votes:
        """The votes on the sample."""
        if votes.first % WORD:
            raise ConfigError(f"votes begin at coordinate {votes.first}; it must be a multiple of {WORD}")
        key = (votes.first, votes.n, votes.device)
        if key not in self._cache:
            self._cache[key] = self._choose(*key)
        words, n = self._cache[key]
        return _on_words(votes, words, n)

    def _choose(self, first: int, n: int, device: torch.device) -> Chosen:
        """The words to compare; the last word of the votes may be padded."""
        first_word = first // WORD
        count = words_for(n)
        coin = self._coin.after(first_word)
        share = self.size / self.n
        in_sample = chances(coin, count) < share
        return _chosen(in_sample, n, device)

    def thinned(self, sampled: Votes, count: int) -> Votes:
        """Of the votes on the sample those on about `count` coordinates of the whole vector."""
        width = sampled.planes.signs.shape[1]
        words, chance = self._all()
        first_word = sampled.first // WORD
        start = int(torch.searchsorted(words, first_word))
        share = count / self.n
        kept = chance[start : start + width] < share
        return _on_words(sampled, *_chosen(kept, sampled.n, sampled.device))

    def _all(self) -> tuple[Tensor, Tensor]:
        """The numbers of all words of the sample, and the chance of each."""
        if self._all_words is None:
            chance = chances(self._coin, words_for(self.n))
            in_sample = chance < self.size / self.n
            words = in_sample.nonzero()[:, 0]
            self._all_words = (words, chance[words])
        return self._all_words


def _chosen(is_chosen: Tensor, n: int, device: torch.device) -> Chosen:
    """Some of the words of n coordinates; the last word may be padded."""
    words = is_chosen.nonzero()[:, 0]
    size = len(words) * WORD
    if len(is_chosen) and is_chosen[-1]:
        padding = len(is_chosen) * WORD - n
        size -= padding
    return Chosen(_index(words, device), size)


def _on_words(votes: Votes, words: Tensor | slice, n: int) -> Votes:
    """The votes on some words, which have n coordinates."""
    planes = votes.planes.map(lambda plane: plane[:, words])
    return replace(votes, planes=planes, n=n)


def _index(words: Tensor, device: torch.device) -> Tensor | slice:
    """An index of words in ascending order: a slice, which copies nothing, if they are consecutive."""
    if len(words) == 0:
        return upload(words, device)
    first = int(words[0])
    last = int(words[-1])
    if len(words) == last - first + 1:
        return slice(first, last + 1)
    return upload(words, device)


def contested(votes: Votes) -> Votes:
    """The votes on coordinates where the plain tally of M workers is at most sqrt(M) in size.

    Two honest workers have nothing in common there, except by chance: what they both know has made the other
    coordinates clear. Workers that push together do have something in common, whatever they vote elsewhere.

    A tally exceeds T if it is positive after T more votes against it.
    """
    planes = votes.planes
    full = everywhere(votes.n, votes.device)
    ones = torch.ones(len(votes.workers), dtype=torch.int32, device=votes.device)
    if votes.present is not None:
        ones = ones * votes.present
    voters = ones.sum(0, keepdim=True)
    margin = voters.double().sqrt().int()
    weights = torch.cat([ones, margin])
    for_all = full
    against_all = torch.zeros_like(full)
    up = _decided(planes, against_all, weights, votes.n)
    down = _decided(planes, for_all, weights, votes.n)
    assert down.support is not None
    clearly_down = down.support & ~down.signs
    too_clear = up.signs | clearly_down
    where = full & ~too_clear
    voted = full if planes.support is None else planes.support
    support = (voted & where).expand_as(planes.signs)
    return replace(votes, planes=Planes(planes.signs, support.contiguous()))


def _decided(planes: Planes, extra: Tensor, weights: Tensor, n: int) -> Planes:
    """The decision of these votes and of one extra voter; a tie decides nothing."""
    full = everywhere(n, extra.device)
    signs = torch.cat([planes.signs, extra[None]])
    support = None
    if planes.support is not None:
        support = torch.cat([planes.support, full[None]])
    voters = Planes(signs, support)
    out = Planes(torch.zeros_like(extra), torch.zeros_like(extra))
    if n:
        backend(extra.device).vote_(out, voters, weights, None, (0, n))
    return out


def pair_counts(votes: Votes, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """On how many coordinates two workers differ, and on how many both voted: (M, M) each.

    With rows `at` of witnesses, those of each worker with each witness, (M, witnesses).
    """
    workers = len(votes.workers)
    others = None
    if at is not None:
        rows = upload(at, votes.device)
        others = votes.planes.map(lambda plane: plane[rows])
    if votes.n:
        return backend(votes.device).disagreements(votes.planes, votes.n, others)
    witnesses = workers if at is None else len(at)
    nothing = torch.zeros(workers, witnesses, dtype=torch.int64, device=votes.device)
    return nothing, nothing


class Past(NamedTuple):
    """What a worker's first rounds showed."""

    rounds: int = 0
    strength: float = 1.0


class Seen(NamedTuple):
    """What one memory has of pairs of workers: C, and of each worker what is chance."""

    everywhere: Tensor  # (workers, witnesses)
    contested: Tensor  # (workers, witnesses)
    chance: Tensor  # (workers,)


class GuardedTrust:
    """What pairs of workers have in common, everywhere and where votes are contested, and each worker's strength.

    There are two memories. The short one sees a worker turn, the long one what is too weak to show in few rounds.

    Args:
        memory: forgetting of the short one, per round.

    """

    def __init__(self, memory: float) -> None:
        self.memories = (memory, max(memory, LONG))
        self.pairs = PairCounts(2, self.memories)
        self.pasts: dict[int, Past] = {}

    @property
    def workers(self) -> list[int]:
        """The workers about which something is known."""
        return self.pairs.workers

    def seen(self, workers: Sequence[int], witnesses: Sequence[int] | None = None) -> list[Seen]:
        """What each memory has of these workers and witnesses, the short one first."""
        differ, common = self.pairs.among(workers, witnesses)
        c = agreement(differ, common, rows_of(workers, witnesses))
        voted = [self.pasts.get(worker, Past()).rounds for worker in workers]
        rounds = torch.tensor(voted, dtype=torch.float64)
        return [
            Seen(everywhere, contested, noise(rounds, memory))
            for (everywhere, contested), memory in zip(c, self.memories, strict=True)
        ]

    def strength(self, workers: Sequence[int]) -> Tensor:
        """How much more a worker agreed with the others in its first rounds than most did, at least 1.

        If errors are independent, C_ij = a_i a_j, so this is a_i / a: for noisy gradients it grows with
        sqrt(B). It falls short of sqrt(B) where a is not small, so a size may be as large as its square.
        Agreement counts up to PLAIN. Later agreement counts no more: when training has converged it shows little,
        and whoever sees the votes of the others can agree with them as much as it likes.
        """
        shown = [self.pasts.get(worker, Past()).strength for worker in workers]
        return torch.tensor(shown, dtype=torch.float64)

    def learn(self, evidence: Evidence) -> None:
        """Add the evidence of a whole round."""
        self.pairs.learn(evidence)
        workers = evidence.workers
        pasts = [self.pasts.get(worker, Past()) for worker in workers]
        compared = [1.0] * len(pasts)
        if any(past.rounds < PROBATION for past in pasts):
            compared = self._compared(workers, evidence.witnesses)
        for worker, past, ratio in zip(workers, pasts, compared, strict=True):
            rounds = past.rounds + 1
            strength = past.strength
            if FIRST <= rounds <= PROBATION:
                strength = max(strength, ratio)
            self.pasts[worker] = Past(rounds, strength)

    def _compared(self, workers: Sequence[int], witnesses: Sequence[int] | None) -> list[float]:
        """The agreement of each worker, relative to that of most workers; 1 where nothing can be compared."""
        nothing = [1.0] * len(workers)
        if len(workers) < FEW:
            return nothing
        c = self.seen(workers, witnesses)[0].everywhere
        each, most = usual(c, rows_of(workers, witnesses))
        if not most > VISIBLE:
            return nothing
        ratios: list[float] = (each.clamp_max(PLAIN) / most).tolist()
        return ratios

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        self.pairs.forget(*workers)
        for worker in workers:
            self.pasts.pop(worker, None)

    def state_dict(self) -> State:
        """Everything needed to resume."""
        pasts = [self.pasts[worker] for worker in self.workers]
        return {
            "pairs": self.pairs.state_dict(),
            "rounds": [past.rounds for past in pasts],
            "strengths": [past.strength for past in pasts],
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        pairs = PairCounts(self.pairs.groups, self.pairs.memories)
        pairs.load_state_dict(state["pairs"])
        shown = zip(state["rounds"], state["strengths"], strict=True)
        pasts = [Past(rounds, float(strength)) for rounds, strength in shown]
        for past in pasts:
            if past.rounds < 0 or not 1 <= past.strength < math.inf:
                raise StateError("the state has a strength below 1, or a negative number of rounds")
        self.pasts = dict(zip(pairs.workers, pasts, strict=True))
        self.pairs = pairs
