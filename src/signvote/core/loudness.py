"""How far a worker is heard, where votes are corrections: what is believed of it, beside the scale that it claims.

    h <- a h + S b                   as the worker does, on a secret sample of the coordinates
    l = mean |h| / S                 about 1 for a worker that says what it wants: then h follows m, and S is mean |m|
    factor = min(1, bound / l)^2 min(1, 2 bound / l)^2      of the weight of its corrections from the next round on

A worker that pushes against what is decided never gets what it asks for. So it votes the same way in every round, h
grows to 1 / (1 - a) = 32 times its scale, and its factor falls to 1/50,000. A worker that keeps l below the bound is as
loud as it claims to be, which is at most twice the median claim. It may still choose a few coordinates and be loud
there.

A worker that votes against all corrections of others is not loud, because decisions give way. It is found by
`discord.py`, on the same sample, and its weight is multiplied by both factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.core.bits import check_number, coin_for
from signvote.core.corrections import LEAK
from signvote.core.discord import accord, compared
from signvote.core.layout import Layout
from signvote.core.pairs import PairCounts, agreement
from signvote.core.rule import Ranges
from signvote.core.trust import Evidence, State, numbered, numbered_once
from signvote.core.vote import Votes
from signvote.core.witnesses import Witnesses, rows_of
from signvote.errors import ConfigError, StateError
from signvote.kernels import WORD
from signvote.kernels.reference import chances

COUNT = 1024  # coordinates of the sample, of a larger model
UNITS = 64  # in which |h| / S is counted
MOST = 2**12  # of |h| / S in units; more counts as this
ONE = 2**16  # a factor of 1
FAR = 2.0  # times the bound: who is louder is hardly heard
WITNESSES = 500  # with whom each worker is compared, if there are more


class Loudness:
    """What is believed of each worker on the sample, how loud it was in its last round, and whom it contradicts.

    Args:
        layout: of the model.
        bound: how loud a worker may be, relative to its scale.
        secret: chooses the sample, and the witnesses.

    """

    def __init__(self, layout: Layout, bound: float, secret: int = 0) -> None:
        check_number("secret", secret)
        if not 1 <= bound < math.inf:
            raise ConfigError(f"bound is {bound}; it must be 1 or more")
        self.bound = bound
        self.secret = secret
        self.sample = _sample(layout.size, secret)
        stops = torch.tensor([segment.stop for segment in layout.segments])
        self._tensors = torch.searchsorted(stops, self.sample, right=True)
        self._owned = torch.ones(len(self.sample), dtype=torch.bool)
        self.index: dict[int, int] = {}  # worker -> its row
        self.beliefs = torch.zeros(0, len(self.sample))  # h
        self.sums = torch.zeros(0, dtype=torch.int64)  # of |h| / S over the sample, in units
        self.witnesses = Witnesses(WITNESSES, secret)
        self.pairs = PairCounts(memories=(LEAK,))

    @property
    def workers(self) -> list[int]:
        """The workers that were heard."""
        return list(self.index)

    def own(self, ranges: Ranges) -> None:
        """Hear about these coordinates only."""
        inside = [(self.sample >= start) & (self.sample < stop) for start, stop in ranges]
        self._owned = torch.stack(inside).any(0) if inside else torch.zeros_like(self._owned)

    def factors(self, workers: Sequence[int]) -> Tensor:
        """By what the weights of these workers are multiplied, (workers,) int64; in units of 1 / ONE."""
        unheard = len(self.index)
        rows = [self.index.get(worker, unheard) for worker in workers]
        sums = pad(self.sums, (0, 1))[rows]
        loudness = sums.double() / (UNITS * len(self.sample))
        ratio = self.bound / loudness
        factor = ratio.clamp_max(1) ** 2 * (FAR * ratio).clamp_max(1) ** 2
        return (ONE * factor * self._accord(workers)).round().long().clamp_min(1)

    def _accord(self, workers: Sequence[int]) -> Tensor:
        """The factor of each worker that contradicts the others; see discord.py."""
        witnesses = self.witnesses.of(workers)
        at = rows_of(workers, witnesses)
        differ, common = self.pairs.among(workers, witnesses)
        c = agreement(differ, common, at)[0, 0]  # one memory, one group
        return accord(c, at)

    def hear(self, evidence: Evidence, votes: Votes, exponents: Tensor, is_decided: Tensor) -> Evidence:
        """Follow the corrections on some coordinates; the evidence, with the sums of |h| / S and pairs there.

        Args:
            evidence: of these votes.
            votes: of these coordinates. Those on a GPU are waited for.
            exponents: of the scales that count, (workers, tensors).
            is_decided: whether anybody votes; else nothing changes.

        """
        start, stop = torch.searchsorted(
            self.sample, torch.tensor([votes.first, votes.first + votes.n])
        ).tolist()
        here = slice(start, stop)
        signs = _signs(votes, self.sample[here] - votes.first)
        witnesses = self.witnesses.of(_voters(votes))
        pairs = compared(signs, rows_of(votes.workers, witnesses))
        return replace(
            evidence,
            beliefs=self._believed(votes, signs, exponents, here, is_decided=bool(is_decided)),
            differ=pairs.differ,
            common=pairs.common,
            witnesses=witnesses,
        )

    def _believed(
        self, votes: Votes, signs: Tensor, exponents: Tensor, here: slice, *, is_decided: bool
    ) -> Tensor:
        """Follow the corrections on a part of the sample; the sums of |h| / S there, (workers, 1) int64."""
        rows = self._rows(votes.workers)
        scale = torch.exp2(exponents.cpu().float())[:, self._tensors[here]]
        beliefs = self.beliefs[:, here]
        if is_decided:
            counted = signs if votes.present is None else signs * votes.present.cpu()[:, None]
            beliefs *= LEAK
            beliefs[rows] += counted * scale  # exact: S is a power of two
        units = (beliefs[rows].abs() / scale * UNITS).round().clamp_max(MOST)
        return units.long().sum(1, keepdim=True)

    def _rows(self, workers: Sequence[int]) -> list[int]:
        """The rows of these workers; new ones start with h = 0."""
        for worker in workers:
            self.index.setdefault(worker, len(self.index))
        new = len(self.index) - len(self.beliefs)
        if new:
            self.beliefs = pad(self.beliefs, (0, 0, 0, new))
            self.sums = pad(self.sums, (0, new))
        return [self.index[worker] for worker in workers]

    def learn(self, evidence: Evidence) -> None:
        """Note how loud the voters of a round were, and whom they contradicted."""
        if evidence.beliefs is None:
            raise ConfigError("loudness needs evidence about beliefs; this vote did not count them")
        rows = self._rows(evidence.workers)
        self.sums[rows] = evidence.beliefs[:, 0]
        self.pairs.learn(evidence)

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        gone = set(workers)
        left = [worker for worker in self.index if worker not in gone]
        rows = [self.index[worker] for worker in left]
        self.beliefs = self.beliefs[rows]
        self.sums = self.sums[rows]
        self.index = numbered(left)
        self.pairs.forget(*workers)

    def state_dict(self) -> State:
        """Everything needed to resume. Beliefs about coordinates of others are 0, so those of all servers add."""
        return {
            "workers": self.workers,
            "beliefs": self.beliefs * self._owned,
            "sums": self.sums.clone(),
            "pairs": self.pairs.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state, with the beliefs about all coordinates."""
        index = numbered_once(state["workers"])
        beliefs = state["beliefs"].float().view(len(index), len(self.sample))
        sums = state["sums"].long().view(len(index))
        if not beliefs.isfinite().all() or (sums < 0).any():
            raise StateError("the state has beliefs that are not finite, or a negative loudness")
        pairs = PairCounts(memories=(LEAK,))
        pairs.load_state_dict(state["pairs"])
        self.pairs = pairs
        self.index = index
        self.beliefs = beliefs.clone()
        self.sums = sums.clone()


def _sample(n: int, secret: int) -> Tensor:
    """Numbers of coordinates in ascending order: about COUNT of them, or all of fewer."""
    if n <= COUNT:
        return torch.arange(n)
    coin = coin_for("coin", secret, 0)
    assert coin is not None
    chosen: Tensor = (chances(coin, COUNT).double() * n).long().unique()  # type: ignore[no-untyped-call]
    return chosen


def _voters(votes: Votes) -> Sequence[int]:
    """The workers that do not abstain. Of few workers all: it does not matter which are witnesses."""
    if votes.present is None or len(votes.workers) <= WITNESSES:
        return votes.workers
    return tuple(compress(votes.workers, votes.present.tolist()))


def _signs(votes: Votes, at: Tensor) -> Tensor:
    """The signs of the votes at some coordinates, (workers, coordinates); any of a worker that abstains."""
    words = votes.planes.signs[:, (at // WORD).to(votes.device)].cpu()
    return 2 * ((words >> (at % WORD)) & 1) - 1
