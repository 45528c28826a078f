"""Weights, tallies, decisions: equation (3) of the paper, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.bits import bytes_for, plane_to_bytes, unpack_signs
from signvote.kernels import WORD, Coin, Planes, words_for
from signvote.kernels.reference import coin_words

ONE = 1024  # a weight of 1 in fixed point
MAX_LLR = 10.0
LARGEST = int(MAX_LLR * ONE)  # the largest integer weight


def llr_weights(crossover: Tensor, *, max_llr: float = MAX_LLR) -> Tensor:
    """Weight of each worker's vote: the log-likelihood ratio of its sign channel.

        w = log((1 - p) / p)      clipped to |w| <= max_llr      (paper, eq. 3)

    p = 1/2 gives 0: the worker says nothing. p > 1/2 gives w < 0: believe the opposite.

    Args:
        crossover: p, any shape: probability that the worker's sign is flipped, in [0, 1].
        max_llr: keeps a worker believed perfect from outvoting everybody.

    >>> llr_weights(torch.tensor([0.0, 0.25, 0.5, 1.0])).tolist()
    [10.0, 1.0986..., 0.0, -10.0]

    """
    p = crossover.double()
    return torch.log((1 - p) / p).clamp(-max_llr, max_llr)


def fixed_point(weights: Tensor) -> Tensor:
    """Real weights as integers in units of 1 / 1024, so that a tally is exact.

    >>> fixed_point(torch.tensor([1.0, -0.5])).tolist()
    [1024, -512]
    """
    return (weights.double() * ONE).round().to(torch.int32)


def scaled(weights: Tensor) -> Tensor:
    """Weights (workers, groups) times a power of two per group: the largest lands in (5, 10].

    A vote does not change when all its weights are doubled, but rounding does: workers with p near
    1/2 have weights near 0, which 1 / 1024 alone could not tell apart.
    """
    largest = weights.double().abs().amax(0, keepdim=True)
    doublings = torch.floor(torch.log2(MAX_LLR / largest.clamp_min(1e-12)))
    return weights * torch.exp2(doublings)


@dataclass(frozen=True, kw_only=True, eq=False)
class Votes:
    """Stacked ballots: coordinates first to first + n of each worker that voted."""

    workers: tuple[int, ...]
    planes: Planes  # (workers, words)
    n: int
    first: int = 0
    batch_sizes: tuple[int, ...] = ()  # 0: not declared
    present: Tensor | None = None  # (workers,) bool, beside the planes; False: takes no part; None: all do

    @classmethod
    def stack(cls, ballots: Sequence[Ballot], first: int, n: int) -> Votes:
        """Coordinates first to first + n of these ballots; `first` a multiple of 8."""
        shape = len(ballots), words_for(n)
        signs = torch.zeros(shape, dtype=torch.int64)
        partial = any(b.support is not None for b in ballots)
        support = torch.zeros(shape, dtype=torch.int64) if partial else None
        at = slice(first // 8, bytes_for(first + n))
        for m, ballot in enumerate(ballots):
            plane_to_bytes(signs[m], n)[:] = ballot.signs[at]
            if support is not None and ballot.support is not None:
                plane_to_bytes(support[m], n)[:] = ballot.support[at]
            elif support is not None:
                support[m] = everywhere(n)
        return cls(
            workers=tuple(b.worker for b in ballots),
            planes=Planes(signs, support),
            n=n,
            first=first,
            batch_sizes=tuple(b.batch_size for b in ballots),
        )


def everywhere(n: int, device: torch.device | str = "cpu") -> Tensor:
    """A plane of n ones."""
    plane = torch.full((words_for(n),), -1, dtype=torch.int64, device=device)
    if n % WORD:
        plane[-1] = (1 << n % WORD) - 1
    return plane


def empty_decision(n: int, coin: Coin | None, device: torch.device | str = "cpu") -> Planes:
    """Planes for a decision of n coordinates."""
    signs = torch.zeros(words_for(n), dtype=torch.int64, device=device)
    return Planes(signs, None if coin else torch.zeros_like(signs))


def tally(votes: Votes, weights: Tensor) -> Tensor:
    """sum_m w[m] Y[m,n], exact integers: tallies of servers in a tree simply add, and `decide` ends it.

    A single server has no tally in memory: its kernels add, decide and count in one pass.

    Args:
        votes: Y in {-1, +1}, or 0 where a worker abstains.
        weights: integers, one per worker.

    """
    y = unpack_signs(votes.planes, votes.n).long()
    return (weights.long()[:, None] * y).sum(0)


def decide(tally: Tensor, coin: Coin | None) -> Tensor:
    """sign(tally) as int8 (paper, eq. 3); a zero tally gets the coin's bit, or stays 0 without one."""
    if coin is None:
        return torch.sign(tally).to(torch.int8)
    coins = Planes(coin_words(coin, words_for(tally.numel())), None)
    return torch.where(tally == 0, unpack_signs(coins, tally.numel()), torch.sign(tally)).to(torch.int8)


def roots(batch_sizes: Sequence[int]) -> Tensor:
    """sqrt(B / smallest B declared) of each worker; one that declares nothing counts as the smallest.

    >>> roots([4, 0, 16]).tolist()
    [1.0, 1.0, 2.0]
    """
    smallest = min((b for b in batch_sizes if b), default=1)
    return torch.sqrt(torch.tensor([b or smallest for b in batch_sizes], dtype=torch.float64) / smallest)
