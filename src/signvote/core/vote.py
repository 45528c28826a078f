"""Integer weights, stacked votes and the planes of a decision (paper, eq. 3).

    llr_weights    crossover probability -> weight
    scaled         use the whole range of the integers
    fixed_point    real weights -> integers, so that a tally is exact
    roots          declared batch sizes -> the weights they promise
    Voters         the workers of a vote, and the batch sizes they declare
    Votes          the same, and their stacked ballots

The kernels compute the tally and its sign: see `signvote.kernels.reference.vote_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.bits import Bytes, bytes_for, plane_to_bytes
from signvote.errors import ConfigError
from signvote.kernels import WORD, Coin, Planes, words_for

Words = np.ndarray[Any, np.dtype[np.uint64]]

ONE = 1024  # a weight of 1 in fixed point
MAX_LLR = 10.0
LARGEST = int(MAX_LLR * ONE)  # the largest integer weight
TALLY = 2**31 - 1  # the largest sum of weights that a tally can hold
MOST = TALLY // LARGEST  # workers of the largest weight that it can hold


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


def checked_llr(max_llr: float) -> float:
    """Return max_llr; raise unless integer weights can hold it."""
    if not 0 < max_llr <= MAX_LLR:
        raise ConfigError(f"max_llr is {max_llr}; it must lie in (0, {MAX_LLR:g}]")
    return max_llr


def fixed_point(weights: Tensor) -> Tensor:
    """Real weights as integers in units of 1 / 1024, so that a tally is exact.

    >>> fixed_point(torch.tensor([1.0, -0.5])).tolist()
    [1024, -512]
    """
    return (weights.double() * ONE).round().to(torch.int32)


def scaled(weights: Tensor) -> Tensor:
    """Weights (workers, groups) times a power of two per group: the largest lands in (5, 10].

    Doubling all weights does not change a vote, but it reduces the rounding error. Workers with p near
    1/2 have weights near 0, and without scaling several of them would round to the same integer.
    """
    if not len(weights):
        return weights
    largest = weights.double().abs().amax(0, keepdim=True)
    room = MAX_LLR / largest.clamp_min(1e-12)
    doublings = torch.floor(torch.log2(room))
    return weights * torch.exp2(doublings)


def fit_tally(weights: Tensor) -> Tensor:
    """Integer weights (workers, groups), halved until their sum fits a tally.

    >>> fit_tally(torch.full((3, 1), 2**30, dtype=torch.int32))[:, 0].tolist()
    [536870912, 536870912, 536870912]
    """
    sums = weights.long().abs().sum(0)
    largest = int(sums.max())
    halvings = max(0, largest.bit_length() - TALLY.bit_length())
    return torch.div(weights, 2**halvings, rounding_mode="trunc").int()


def roots(batch_sizes: Sequence[int]) -> Tensor | None:
    """sqrt(B) of each worker, relative to the median; None unless every worker declares a size.

    >>> roots([4, 16, 64]).tolist()
    [0.5, 1.0, 2.0]
    >>> roots([4, 0, 16]) is None
    True
    """
    if not batch_sizes or not all(batch_sizes):
        return None
    sizes = torch.tensor(batch_sizes, dtype=torch.float64)
    return torch.sqrt(sizes / sizes.median())


@dataclass(frozen=True, kw_only=True, eq=False)
class Voters:
    """The workers of a vote: all that a rule's weights may depend on, besides what the rule has learned.

    >>> Voters(workers=(3, 7)).batch_sizes
    (0, 0)
    """

    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...] = ()  # one for each worker, 0: not declared; (): no worker declares one
    claims: Tensor | None = None  # (workers, tensors) int8, of votes that are corrections: see corrections.py

    def __post_init__(self) -> None:
        if not self.batch_sizes:
            undeclared = (0,) * len(self.workers)
            object.__setattr__(self, "batch_sizes", undeclared)


@dataclass(frozen=True, kw_only=True, eq=False)
class Votes(Voters):
    """Voters and their stacked ballots: coordinates first to first + n of each worker."""

    planes: Planes  # (workers, words)
    n: int
    first: int = 0
    present: Tensor | None = None  # (workers,) bool on the planes' device, False: abstains; None: all vote

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.planes.signs.device

    @classmethod
    def stack(cls, ballots: Sequence[Ballot], first: int, n: int) -> Votes:
        """Stack coordinates first to first + n of these ballots; `first` must be a multiple of 8."""
        stop = bytes_for(first + n)
        at = slice(first // 8, stop)
        signs = _empty_planes(len(ballots), n)
        for m, ballot in enumerate(ballots):
            _write_bytes_(signs[m], ballot.signs[at], n)
        support = _stacked_support(ballots, at, n)
        return cls(
            workers=tuple(ballot.worker for ballot in ballots),
            batch_sizes=tuple(ballot.batch_size for ballot in ballots),
            planes=Planes(signs, support),
            n=n,
            first=first,
            claims=claims_of(ballots),
        )


def in_a_row(parts: Sequence[Votes | None]) -> Votes | None:
    """Votes of the same workers on successive coordinates, each but the last ends with a word; None: there are none."""
    samples = [part for part in parts if part is not None]
    if not samples:
        return None
    not_empty = [each for each in samples if each.n]
    samples = not_empty or samples[:1]
    signs = torch.cat([each.planes.signs for each in samples], 1)
    n = sum(each.n for each in samples)
    support = None
    if any(each.planes.support is not None for each in samples):
        support = torch.cat([_support_of(each) for each in samples], 1)
    planes = Planes(signs, support)
    return replace(samples[0], planes=planes, n=n)


def _support_of(votes: Votes) -> Tensor:
    """Where each worker voted, as planes: everywhere, if they say nothing else."""
    if votes.planes.support is not None:
        return votes.planes.support
    return everywhere(votes.n, votes.device).expand_as(votes.planes.signs)


def voters_of(ballots: Sequence[Ballot]) -> Voters:
    """The workers that sent these ballots."""
    return Voters(
        workers=tuple(ballot.worker for ballot in ballots),
        batch_sizes=tuple(ballot.batch_size for ballot in ballots),
        claims=claims_of(ballots),
    )


def disagreements(decision: Planes, votes: Votes, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The votes that differ from a decision, and the votes cast where it has support, (workers, spans) each.

    Args:
        decision: of the coordinates of the votes.
        votes: on the CPU, of workers that all vote.
        spans: ranges of coordinates, of the whole layout.

    """
    counts = np.zeros((2, len(votes.workers), len(spans)), np.int64)
    assert decision.support is not None
    signs = _words(votes.planes.signs)
    support = None if votes.planes.support is None else _words(votes.planes.support)
    decided = _words(decision.signs)
    known = _words(decision.support)
    for g, (start, stop) in enumerate(spans):
        begin = max(0, start - votes.first)
        end = min(votes.n, stop - votes.first)
        if begin >= end:
            continue
        words = slice(begin // WORD, words_for(end))
        live = known[words] & _inside(words, begin, end)
        theirs = signs[:, words]
        cast = np.broadcast_to(live, theirs.shape)
        if support is not None:
            cast = support[:, words] & live
        differs = theirs ^ decided[words]
        wrong = differs & cast
        counts[0, :, g] = _ones(wrong)
        counts[1, :, g] = _ones(cast)
    mismatches, cast_votes = torch.from_numpy(counts)
    return mismatches, cast_votes


def _words(plane: Tensor) -> Words:
    return plane.numpy().view(np.uint64)


def _ones(rows: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many bits of each row are set."""
    by_word = np.bitwise_count(rows)
    return by_word.sum(1, dtype=np.int64)  # type: ignore[no-any-return]


def _inside(words: slice, begin: int, end: int) -> Words:
    """The bits of some words that belong to coordinates begin to end."""
    whole = np.uint64(2**64 - 1)
    before = begin - WORD * words.start
    after = WORD * words.stop - end
    inside = np.full(words.stop - words.start, whole)
    inside[0] &= whole << np.uint64(before)
    inside[-1] &= whole >> np.uint64(after)
    return inside


def if_quorum(votes: Votes, least: int) -> Votes:
    """The votes, all of them absent if they are too few. Who votes may be known on the device only."""
    if votes.present is None and len(votes.workers) >= least:
        return votes
    if votes.present is not None and least == 1:  # one voter is a quorum, and none is none
        return votes
    everybody = torch.ones(len(votes.workers), dtype=torch.bool, device=votes.device)
    present = everybody if votes.present is None else votes.present
    is_quorum = present.sum() >= least
    return replace(votes, present=present & is_quorum)


def claims_of(ballots: Sequence[Ballot]) -> Tensor | None:
    """The claims of ballots that are corrections, stacked; None if they are none."""
    rows = [ballot.claims for ballot in ballots if ballot.claims is not None]
    return torch.from_numpy(np.stack(rows)) if rows else None


def _stacked_support(ballots: Sequence[Ballot], at: slice, n: int) -> Tensor | None:
    """The support planes, of ones where a ballot has none; None if no ballot has one."""
    if all(ballot.support is None for ballot in ballots):
        return None
    support = _empty_planes(len(ballots), n)
    for m, ballot in enumerate(ballots):
        if ballot.support is None:
            support[m] = everywhere(n)
        else:
            _write_bytes_(support[m], ballot.support[at], n)
    return support


def _empty_planes(rows: int, n: int) -> Tensor:
    """Planes to write the bytes of n coordinates to; the bits that follow in the last word are zero."""
    planes = torch.empty(rows, words_for(n), dtype=torch.int64)
    planes[:, -1:] = 0
    return planes


def _write_bytes_(plane: Tensor, packed: Bytes, n: int) -> None:
    plane_to_bytes(plane, n)[:] = packed


def everywhere(n: int, device: torch.device | str = "cpu") -> Tensor:
    """A plane of n ones."""
    words = words_for(n)
    plane = torch.full((words,), -1, dtype=torch.int64, device=device)
    bits_in_last = n % WORD
    if bits_in_last:
        plane[-1] = (1 << bits_in_last) - 1
    return plane


def empty_decision(
    n: int,
    coin: Coin | None,
    device: torch.device | str = "cpu",
) -> Planes:
    """Planes to write a decision of n coordinates to; with a coin every coordinate is decided."""
    signs = torch.zeros(words_for(n), dtype=torch.int64, device=device)
    support = None if coin else torch.zeros_like(signs)
    return Planes(signs, support)
