"""What a rule is: `core/rules.py` has those with a name.

`vote` decides some coordinates and returns evidence; evidence of all coordinates of a round is added
up and given to `learn` once. So a server may vote in chunks, and machines that own a part each agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.trust import Evidence, State, Trust
from signvote.core.vote import MAX_LLR, Votes
from signvote.errors import ConfigError, StateError
from signvote.kernels import Coin, Planes, backend, upload

Per = Literal["worker", "tensor"]
Ranges = Sequence[tuple[int, int]]  # of coordinates, in order


class Rule(ABC):
    """A way to decide: see the module's text."""

    name: ClassVar[str]
    trust: Trust | None = None  # what the rule has learnt, if it learns

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """Write the decision of the votes' coordinates into `out`; only what is kept per coordinate changes.

        Args:
            out: planes as wide as the votes'.
            votes: of any subset of workers, over any range of coordinates.
            coin: decides zero tallies, its first coordinate being votes.first; None: they stay open.

        """

    @abstractmethod
    def weights(self, votes: Votes) -> Tensor:
        """The integer weight of each voter, (workers, groups) int32; 1024 is a weight of 1."""

    def own(self, ranges: Ranges) -> None:  # noqa: B027
        """Decide these coordinates alone, others being decided elsewhere; before the first vote.

        For rules that keep something per coordinate; what is kept per worker is the same everywhere.
        """

    def learn(self, evidence: Evidence) -> None:
        """Take in the evidence of a whole round."""
        if self.trust is not None:
            self.trust.learn(evidence)

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker that left for good."""
        if self.trust is not None:
            self.trust.forget(worker)

    def identity(self) -> State:
        """What a state must share with this rule to be loaded into it."""
        return {"rule": self.name, "layout": self.layout.digest.hex()}

    def state_dict(self) -> State:
        """Everything learnt: tensors, numbers, strings and lists; never objects."""
        return self.identity() | (self.trust.state_dict() if self.trust is not None else {})

    def load_state_dict(self, state: State, *parts: State) -> None:
        """Go on from a state; one of another rule or layout is refused, naming both.

        Args:
            state: of this rule, or of the first of those that owned a part of the coordinates each.
            parts: of the others.

        """
        for what, value in self.identity().items():
            if state.get(what) != value:
                raise StateError(
                    f"state of {what} {state.get(what)!r} cannot be loaded into {what} {value!r}"
                )
        if self.trust is not None:
            self.trust.load_state_dict(state)


class WeightedRule(Rule):
    """A rule with one weight per worker and group of coordinates."""

    def __init__(self, layout: Layout, per: Per = "worker") -> None:
        super().__init__(layout)
        if per not in ("worker", "tensor"):
            raise ConfigError(f"per is {per!r}; it must be 'worker' or 'tensor'")
        self.groups = [(0, layout.size)] if per == "worker" else [(s.start, s.stop) for s in layout.segments]

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule."""
        device = votes.planes.signs.device
        kernels, weights = backend(device), self.weights(votes)
        if votes.present is not None:
            weights = upload(weights, device) * votes.present[:, None]
        counts = torch.zeros(2, len(votes.workers), len(self.groups), dtype=torch.int64, device=device)
        for g, (start, stop) in enumerate(self.groups):
            span = max(0, start - votes.first), min(votes.n, stop - votes.first)
            if span[0] < span[1]:
                seen = kernels.vote_(out, votes.planes, weights[:, g].contiguous(), coin, span)
                counts[0, :, g], counts[1, :, g] = seen
        if votes.present is not None:
            counts *= votes.present[:, None]
        return Evidence(workers=votes.workers, mismatches=counts[0], cast=counts[1], present=votes.present)


def checked_llr(max_llr: float) -> float:
    """Raise unless it fits a weight."""
    if not 0 < max_llr <= MAX_LLR:
        raise ConfigError(f"max_llr is {max_llr}; it must lie in (0, {MAX_LLR:g}]")
    return max_llr
