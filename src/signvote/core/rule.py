"""The interface of a rule; `rules.py` has the named ones.

`vote` decides some coordinates and returns evidence. The evidence of all coordinates of a round is added
up and passed to `learn` once. So a server may decide in chunks, and machines that own a part of the
coordinates each learn what one server would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.trust import Evidence, State, Trust, numbered
from signvote.core.vote import Voters, Votes, fit_tally
from signvote.errors import ConfigError, StateError
from signvote.kernels import Coin, Planes, backend, upload

Per = Literal["worker", "tensor"]
Whose = tuple[tuple[int, ...], tuple[int, ...]]  # workers, and the batch sizes they declare
Ranges = Sequence[tuple[int, int]]  # of coordinates, in order


class Rule(ABC):
    """A way to decide from votes: see the module's docstring."""

    name: ClassVar[str]
    corrects: ClassVar[bool] = False  # whether votes are corrections; see corrections.py
    remembers: ClassVar[int] = 100_000  # how many workers a server lets the rule know, unless it is told
    trust: Trust | None = None  # what the rule has learned; None: it learns nothing

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """Write the decision into `out`. Of the rule's state, only counters per coordinate change.

        Args:
            out: planes as wide as those of the votes.
            votes: of any subset of workers, over any range of coordinates.
            coin: decides zero tallies; its first coordinate is votes.first. None: they stay undecided.

        """

    @abstractmethod
    def weights(self, voters: Voters) -> Tensor:
        """The integer weight of each worker's vote, (workers, groups) int32; 1024 is a weight of 1."""

    def shares(self, workers: Sequence[int]) -> Tensor | None:
        """The share of each voter in all weight of the round that `learn` is about to close, (workers,) float64.

        None: the rule has no weight per worker, or has not weighed these workers in this round.
        """
        return None

    def scale(self, voters: Voters) -> Tensor | None:
        """The exponents that a decision on corrections carries, (tensors,) int8; None: votes are no corrections."""
        return None

    def own(self, ranges: Ranges) -> None:  # noqa: B027
        """Decide these coordinates only; call it before the first vote.

        It matters for rules that keep counters per coordinate: other machines own the other coordinates.
        What is kept per worker is the same on all machines.
        """

    def learn(self, evidence: Evidence) -> None:
        """Close a round with the evidence of all its votes."""
        if self.trust is not None and evidence.workers:
            self.trust.learn(evidence)

    def forget(self, *workers: int) -> None:
        """Drop everything about workers that left for good."""
        if self.trust is not None:
            self.trust.forget(*workers)

    def identity(self) -> State:
        """The entries that a state must share with this rule to be loaded into it."""
        return {
            "rule": self.name,
            "layout": self.layout.digest.hex(),
        }

    def state_dict(self) -> State:
        """Everything needed to resume: tensors, numbers, strings and lists; never objects."""
        if self.trust is None:
            return self.identity()
        return self.identity() | self.trust.state_dict()

    def load_state_dict(self, state: State, *parts: State) -> None:
        """Resume from a state. The state of another rule or layout is refused; the error names both.

        Args:
            state: of this rule, or of the first of several that owned a part of the coordinates each.
            parts: the states of the others.

        """
        for what, wanted in self.identity().items():
            found = state.get(what)
            if found != wanted:
                raise StateError(f"state of {what} {found!r} cannot be loaded into {what} {wanted!r}")
        if self.trust is not None:
            self.trust.load_state_dict(state)


class WeightedRule(Rule):
    """A rule with one weight per worker and group of coordinates, computed once a round.

    Args:
        layout: of the model.
        per: "worker": all coordinates are one group. "tensor": each tensor is a group.

    """

    learns_from: ClassVar[int] = 1  # a round with fewer voters teaches nothing

    def __init__(self, layout: Layout, per: Per = "worker") -> None:
        super().__init__(layout)
        if per not in ("worker", "tensor"):
            raise ConfigError(f"per is {per!r}; it must be 'worker' or 'tensor'")
        self._round_weights: tuple[Whose, Tensor] | None = None  # whose, and which
        self.groups = [(0, layout.size)]
        if per == "tensor":
            self.groups = [(segment.start, segment.stop) for segment in layout.segments]

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule."""
        present = votes.present
        weights = self._weights_of_round(votes)
        if present is not None:
            weights = upload(weights, votes.device) * present[:, None]
        counts = self._decide(out, votes, weights, coin)
        if present is not None:
            counts *= present[:, None]
        return Evidence(
            workers=votes.workers,
            mismatches=counts[0],
            cast=counts[1],
            present=present,
        )

    def shares(self, workers: Sequence[int]) -> Tensor | None:
        """See Rule. A tensor with more coordinates counts for more."""
        if self._round_weights is None:
            return None
        (known, _), weights = self._round_weights
        rows = numbered(known)
        if not rows.keys() >= set(workers):
            return None
        power = weights.double().abs()
        if len(workers) < len(known):  # some of them abstained
            power = power[[rows[worker] for worker in workers]]
        lengths = [stop - start for start, stop in self.groups]
        share = power / power.sum(0).clamp_min(1)
        return share @ torch.tensor(lengths, dtype=torch.float64) / self.layout.size

    def learn(self, evidence: Evidence) -> None:
        """See Rule. Where nothing is learned, weights stay."""
        if len(evidence.workers) >= self.learns_from:
            self._round_weights = None
            super().learn(evidence)

    def forget(self, *workers: int) -> None:
        """See Rule."""
        self._round_weights = None
        super().forget(*workers)

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule."""
        self._round_weights = None
        super().load_state_dict(state, *parts)

    def _weights_of_round(self, voters: Voters) -> Tensor:
        """The weights of these voters, the same for all chunks of a round, and small enough for a tally."""
        whose = (voters.workers, voters.batch_sizes)
        if self._round_weights is None or self._round_weights[0] != whose:
            fitting = fit_tally(self.weights(voters))
            self._round_weights = (whose, fitting)
        return self._round_weights[1]

    def _decide(
        self,
        out: Planes,
        votes: Votes,
        weights: Tensor,
        coin: Coin | None,
    ) -> Tensor:
        """Decide group by group; the mismatches and the votes cast, (2, workers, groups)."""
        counts = torch.zeros(
            (2, len(votes.workers), len(self.groups)),
            dtype=torch.int64,
            device=votes.device,
        )
        if _is_sole(out, votes, weights):
            out.signs.copy_(votes.planes.signs[0])
            counts[1] = votes.n
            return counts
        kernels = backend(votes.device)
        for g, (start, stop) in enumerate(self.groups):
            begin = max(0, start - votes.first)
            end = min(votes.n, stop - votes.first)
            if begin < end:
                column = weights[:, g].contiguous()
                seen = kernels.vote_(out, votes.planes, column, coin, (begin, end))
                counts[0, :, g] = seen[0]
                counts[1, :, g] = seen[1]
        return counts


def _is_sole(out: Planes, votes: Votes, weights: Tensor) -> bool:
    """Whether there is one vote on every coordinate, of positive weight: it is the decision, and nothing is a tie."""
    if weights.shape != (1, 1) or votes.present is not None:
        return False
    is_everywhere = out.support is None and votes.planes.support is None
    return is_everywhere and int(weights) > 0
