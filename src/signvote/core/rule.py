"""The interface of a rule; `rules.py` has the named ones.

`vote` decides some coordinates and returns evidence. The evidence of all coordinates of a round is added
up and passed to `learn` once. So a server may decide in chunks, and machines that own a part of the
coordinates each learn what one server would.

A rule that `splits` does the same in steps, so that ballots may be added up as they arrive, and on several machines:

    weigh       the weights of the round
    tally       the weighted sum of some ballots; with `is_local` only, else `Tally.add_all` does it
    conclude    the tally of all ballots -> the decision, and the signs that votes are compared with
    judge       these signs and some of the votes -> evidence about their workers
    sampled     the votes that pairs of workers may be compared on,
    thinned     those that they are compared on if there are that many workers, and
    compared    the evidence, with what they show
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.tally import Tally
from signvote.core.trust import Evidence, State, Trust, numbered
from signvote.core.vote import Voters, Votes, disagreements, everywhere, fit_tally
from signvote.errors import ConfigError, StateError
from signvote.kernels import Coin, Planes, backend, reference, upload

Per = Literal["worker", "tensor"]
Whose = tuple[tuple[int, ...], tuple[int, ...]]  # workers, and the batch sizes they declare
Ranges = Sequence[tuple[int, int]]  # of coordinates, in order


class Weighed(NamedTuple):
    """The weights of a round, which a later one may share."""

    whose: Whose
    weights: Tensor
    shares: dict[tuple[int, ...], Tensor]  # by the workers that voted


class Rule(ABC):
    """A way to decide from votes: see the module's docstring."""

    name: ClassVar[str]
    corrects: ClassVar[bool] = False  # whether votes are corrections; see corrections.py
    scales: ClassVar[bool] = False  # whether votes have a scale for each tensor; see scaled.py
    remembers: int = 100_000  # how many workers a server lets the rule know, unless it is told
    splits: bool = False  # whether it votes in steps, too: see the module's docstring
    is_local: ClassVar[bool] = False  # whether weights stay where the ballots are: one for each coordinate
    is_alone: ClassVar[bool] = False  # whether the weight of a worker depends on no other worker
    trust: Trust | None = None  # what the rule has learned; None: it learns nothing

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups = [(0, layout.size)]

    def __init_subclass__(cls) -> None:
        """A class that votes in another way than its base does not have the steps of its base."""
        if "vote" in vars(cls) and "splits" not in vars(cls):
            cls.splits = False

    @abstractmethod
    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """Write the decision into `out`. Of the rule's state, only counters per coordinate change.

        Args:
            out: planes as wide as those of the votes.
            votes: of any subset of workers, over any range of coordinates.
            coin: decides zero tallies; its first coordinate is votes.first. None: they stay undecided.

        """

    def decide(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """As `vote`, but pairs of workers are not counted: see `compared`."""
        return self.vote(out, votes, coin)

    @abstractmethod
    def weights(self, voters: Voters) -> Tensor:
        """The integer weight of each worker's vote, (workers, groups) int32; 1024 is a weight of 1."""

    def weigh(self, voters: Voters) -> Tensor:
        """The weights of a round, (workers, groups) int32, small enough for a tally."""
        return fit_tally(self.weights(voters))

    def tally(self, votes: Votes) -> Tensor:
        """The sum of these votes, (coordinates,) int32, by weights that only this rule knows: see `is_local`."""
        raise ConfigError(
            f"the rule {self.name!r} has no weights of its own for each coordinate: see `weigh`"
        )

    def conclude(self, out: Planes, tally: Tally, voters: Voters, coin: Coin | None) -> Planes:
        """Write the decision of all coordinates into `out`.

        Args:
            out: planes of the whole layout.
            tally: of all ballots of the round.
            voters: whose ballots these are.
            coin: decides zero tallies. None: they stay undecided.

        Returns:
            The signs that votes are compared with. The support is 0 at a tie, which shows nothing about a worker.

        """
        judged = tally.compare()
        assert judged.support is not None
        out.signs.copy_(judged.signs)
        if out.support is not None:
            out.support.copy_(judged.support)
        else:
            assert coin is not None
            ties = everywhere(self.layout.size) & ~judged.support
            heads = reference.coin_words(coin, len(ties))
            out.signs.bitwise_or_(ties & heads)
        return judged

    def judge(self, judged: Planes, votes: Votes) -> Evidence:
        """The evidence of a vote, without pairs of workers: see `conclude`. Both are of the same coordinates."""
        mismatches, cast = disagreements(judged, votes, self.groups)
        return Evidence(workers=votes.workers, mismatches=mismatches, cast=cast)

    def sampled(self, votes: Votes) -> Votes | None:
        """The votes on which pairs of workers may be compared; None: pairs do not matter.

        They depend on the coordinates only, so that relays, each with some of the workers, agree on them.
        """
        return None

    def thinned(self, sampled: Votes | None) -> Votes | None:
        """Of the sampled votes of all workers those on which that many workers are compared."""
        return sampled

    def compared(self, evidence: Evidence, sampled: Votes | None) -> Evidence:
        """The evidence, with counts of pairs of its workers: see `thinned`."""
        return evidence

    def shares(self, workers: Sequence[int]) -> Tensor | None:
        """The share of each voter in all weight of the round that `learn` is about to close, (workers,) float64.

        None: the rule has no weight per worker, or has not weighed these workers in this round.
        """
        return None

    @property
    def has_claims(self) -> bool:
        """Whether ballots and decisions carry a byte for each tensor."""
        return self.corrects or self.scales

    def scale(self, voters: Voters) -> Tensor | None:
        """What a decision carries for each tensor, (tensors,) int8; None: nothing.

        Of corrections the exponents of S, of scaled votes the codes of S after `learn` has closed the round.
        """
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
        self._check(state)
        if self.trust is not None:
            self.trust.load_state_dict(state)

    def _check(self, state: State) -> None:
        """Raise if a state is of another rule or layout."""
        for what, wanted in self.identity().items():
            found = state.get(what)
            if found != wanted:
                raise StateError(f"state of {what} {found!r} cannot be loaded into {what} {wanted!r}")


class WeightedRule(Rule):
    """A rule with one weight per worker and group of coordinates, computed once a round.

    Args:
        layout: of the model.
        per: "worker": all coordinates are one group. "tensor": each tensor is a group.

    """

    splits = True
    learns_from: ClassVar[int] = 1  # a round with fewer voters teaches nothing

    def __init__(self, layout: Layout, per: Per = "worker") -> None:
        super().__init__(layout)
        if per not in ("worker", "tensor"):
            raise ConfigError(f"per is {per!r}; it must be 'worker' or 'tensor'")
        self._weighed: Weighed | None = None
        if per == "tensor":
            self.groups = [(segment.start, segment.stop) for segment in layout.segments]

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule."""
        present = votes.present
        weights = self.weigh(votes)
        if _is_sole(out, votes, weights):
            return _adopted(out, votes)
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
        if self._weighed is None:
            return None
        (known, _), weights, shares = self._weighed
        voters = tuple(workers)
        if not set(known) >= set(voters):
            return None
        if voters not in shares:
            shares[voters] = self._shares(known, weights, voters)
        return shares[voters]

    def _shares(self, known: Sequence[int], weights: Tensor, workers: Sequence[int]) -> Tensor:
        """The shares of some of the workers that have these weights."""
        rows = numbered(known)
        power = weights.double().abs()
        if len(workers) < len(known):  # some of them abstained
            power = power[[rows[worker] for worker in workers]]
        lengths = [stop - start for start, stop in self.groups]
        share = power / power.sum(0).clamp_min(1)
        return share @ torch.tensor(lengths, dtype=torch.float64) / self.layout.size

    def learn(self, evidence: Evidence) -> None:
        """See Rule. Where nothing is learned, weights stay."""
        if len(evidence.workers) >= self.learns_from:
            self._weighed = None
            super().learn(evidence)

    def forget(self, *workers: int) -> None:
        """See Rule."""
        self._weighed = None
        super().forget(*workers)

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule."""
        self._weighed = None
        super().load_state_dict(state, *parts)

    def weigh(self, voters: Voters) -> Tensor:
        """See Rule. The same for all chunks of a round."""
        whose = (voters.workers, voters.batch_sizes)
        if self._weighed is None or self._weighed.whose != whose:
            self._weighed = Weighed(whose, super().weigh(voters), {})
        return self._weighed.weights

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
    if weights.shape != (1, 1):
        return False
    is_everywhere = out.support is None and votes.planes.support is None
    return is_everywhere and int(weights) > 0


def _adopted(out: Planes, votes: Votes) -> Evidence:
    """Make a sole vote the decision. The counts are known here, so none has to come from the device."""
    out.signs.copy_(votes.planes.signs[0])
    cast = torch.full((1, 1), votes.n)
    return Evidence(
        workers=votes.workers,
        mismatches=torch.zeros_like(cast),
        cast=cast,
        present=votes.present,
    )
