"""The rule of scaled votes: it decides the sign and the scale of a weighted mean, and keeps what they leave out.

    q = sum_m w_m s_m b_m / sum_m w_m + e'     b_m: a worker's signs, s_m: its scale for the tensor
    decision = sign(q)
    S = mean |q|                               for each tensor; the decision carries it
    e' <- q - S sign(q)

w is the weight that another rule gives the worker, which learns as usual: from how often a worker's sign differs from
that of sum_m w_m s_m b_m. Evidence about trust is so about this round's votes, and not about what earlier rounds left.

All sums are exact. The weight of a vote, w s, is an integer in a unit for each tensor. |q| is rounded to a unit that
all servers know and summed as integers, which travel with the evidence: servers that own a part of the coordinates
each get the same S as one server.

A scale counts for at most a limit, twice the weighted median of all scales of its tensor. So nobody can shout: workers
with less than a third of all weight never outvote the rest where the rest agrees. The decision carries the limit, too:
a worker keeps what of its votes did not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.owned import Owned
from signvote.core.powers import Powers, agreed, powers_of, tallied, tensors_of
from signvote.core.rule import Ranges, Rule, WeightedRule
from signvote.core.scales import CODES, NOTHING, STEPS, coded, lengths, mantissas, spread, unsent, values
from signvote.core.trust import Evidence, State
from signvote.core.vote import Voters, Votes
from signvote.errors import ConfigError
from signvote.kernels import Coin, Planes, backend

LOUDEST = STEPS  # codes above the median that a scale may count: a factor of two
FINER = 13  # binary digits of |q| below those of the unit of votes
MOST = 2**24  # of |q| in its unit; more counts as this


class Decided(NamedTuple):
    """Some coordinates of the round that `learn` is about to close."""

    q: Tensor
    planes: Planes


class ScaledVotes(Rule):
    """Votes with a scale for each tensor, weighed by another rule; see the module's docstring.
    For local steps: a worker trains by itself, and votes on the change of its parameters.

    Args:
        rule: weighs the workers; one with a weight for each worker, such as `majority`, `weighted` or `robust`.

    """

    name = "scaled"
    scales = True

    def __init__(self, rule: Rule) -> None:
        if not isinstance(rule, WeightedRule):
            raise ConfigError(
                f"scaled votes need a rule with a weight for each worker, such as 'weighted'; {rule.name!r} has none"
            )
        super().__init__(rule.layout)
        self.rule = rule
        self.groups = rule.groups
        self.trust = rule.trust
        self.remembers = rule.remembers
        self.decided = torch.full((len(self.layout.segments),), NOTHING, dtype=torch.int8)
        self.limits = self.decided
        self.own([(0, self.layout.size)])

    def own(self, ranges: Ranges) -> None:
        """See Rule."""
        self.residual = Owned(ranges, "residual")  # e'
        self._open: dict[int, Decided] = {}  # by first coordinate
        self._exponents = torch.zeros(len(self.layout.segments), dtype=torch.int64)

    def weights(self, voters: Voters) -> Tensor:
        """Those of the rule that weighs: w, without scales."""
        return self.rule.weights(voters)

    def scale(self, voters: Voters) -> Tensor:
        """The codes of S in the last round, and then of the limits, (2 tensors,) int8; `learn` must have closed it."""
        return torch.cat([self.decided, self.limits])

    def shares(self, workers: Sequence[int]) -> Tensor | None:
        """See Rule."""
        return self.rule.shares(workers)

    # ---- a vote ----------------------------------------------------------------------------------

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence has the sums of |q|, too."""
        votes = _present(votes)
        tensors = len(self.layout.segments)
        counts = torch.zeros(2, len(votes.workers), tensors, dtype=torch.int64)
        sums = torch.zeros(tensors, dtype=torch.int64)
        if votes.workers:
            powers = self._powers(votes)
            self._exponents = powers.top - FINER
            mean, seen = tallied(votes, powers, self.layout)
            counts = seen.cpu()
            residual = self.residual.of(votes.first, votes.n, votes.device)
            q = residual + mean
            for g, begin, end in tensors_of(votes, self.layout):
                exponent = int(self._exponents[g])
                sums[g] = _sum(q[begin:end], exponent)
            planes, _ = backend(votes.device).sign_planes(q, coin)
            out.signs.copy_(planes.signs)  # with a coin every coordinate is decided
            self._open[votes.first] = Decided(q, planes)
        evidence = self._evidence(votes, counts)
        sampled = self.rule.thinned(self.rule.sampled(votes))
        return replace(self.rule.compared(evidence, sampled), magnitudes=sums)

    def _evidence(self, votes: Votes, counts: Tensor) -> Evidence:
        """Counts by tensor as evidence by groups of the rule that weighs."""
        if len(self.groups) == 1:
            counts = counts.sum(-1, keepdim=True)
        return Evidence(workers=votes.workers, mismatches=counts[0], cast=counts[1])

    def _powers(self, voters: Voters) -> Powers:
        if voters.claims is None:
            raise ConfigError("scaled votes need ballots with scales; see Encoding(scales=True)")
        claimed = voters.claims.cpu()
        of_workers = self.rule.weigh(voters).long()
        weights = of_workers.expand(-1, len(self.layout.segments))
        self.limits = loudest_of(claimed, weights)
        return capped(claimed, weights, self.limits)

    # ---- after all votes -------------------------------------------------------------------------

    def learn(self, evidence: Evidence) -> None:
        """Close a round: S from the sums of |q| over all coordinates, and what S and the signs leave out."""
        parts = self._open
        self._open = {}
        if not evidence.workers:
            return
        assert evidence.magnitudes is not None
        units = torch.exp2(self._exponents.double())
        sums = evidence.magnitudes.double() * units
        means = sums / lengths(self.layout)
        self.decided = coded(means)
        for first, (q, planes) in parts.items():
            n = len(q)
            by_tensor = values(self.decided).to(q.device)
            scale = spread(by_tensor, self.layout, first, n)
            signs = unpack_signs(planes, n)
            left = unsent(q, signs, scale)
            residual = self.residual.of(first, n, q.device)
            residual.copy_(left)
        self.rule.learn(evidence)

    def forget(self, *workers: int) -> None:
        """See Rule."""
        self.rule.forget(*workers)

    def identity(self) -> State:
        """See Rule."""
        return super().identity() | {"weighs": self.rule.identity()}

    def state_dict(self) -> State:
        """See Rule; the residual of the ranges owned, too."""
        return {
            **self.identity(),
            **self.residual.state_dict(),
            "decided": self.decided.clone(),
            "weights": self.rule.state_dict(),
        }

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule. Each coordinate comes from the state whose ranges hold it."""
        self._check(state)
        of_parts = [part["weights"] for part in parts]
        self.rule.load_state_dict(state["weights"], *of_parts)
        self.residual.load(self.layout.size, state, *parts)
        tensors = len(self.layout.segments)
        decided = state["decided"].to(torch.int8).view(tensors)
        self.decided = decided.clone()
        self._open = {}


def loudest_of(claimed: Tensor, weights: Tensor) -> Tensor:
    """The codes of the largest scales that count, (tensors,) int8: twice the weighted median.

    Args:
        claimed: codes of s, (workers, tensors) int8.
        weights: w, (workers, tensors) int64.

    """
    loudest = agreed(claimed, weights.abs()).long() + LOUDEST
    return loudest.clamp_max(CODES[1]).to(torch.int8)


def capped(claimed: Tensor, weights: Tensor, limits: Tensor) -> Powers:
    """The weights of scaled votes, from scales and the weights of a rule: see `loudest_of`.

    >>> codes, one = coded(torch.tensor([[1.0], [1.0], [100.0]])), torch.ones(3, 1).long()
    >>> capped(codes, one, loudest_of(codes, one)).weights[:, 0].tolist()  # 100 counts as 2
    [512, 512, 1024]

    """
    mantissa, exponent = mantissas(claimed.minimum(limits))
    return powers_of(weights, mantissa, exponent)


def _present(votes: Votes) -> Votes:
    """The votes without those that are absent."""
    if votes.present is None:
        return votes
    rows = votes.present.nonzero()[:, 0].tolist()
    return replace(
        votes,
        workers=tuple(votes.workers[row] for row in rows),
        batch_sizes=tuple(votes.batch_sizes[row] for row in rows),
        planes=votes.planes.map(lambda plane: plane[rows]),
        claims=None if votes.claims is None else votes.claims[rows],
        present=None,
    )


def _sum(q: Tensor, exponent: int) -> int:
    """The sum of |q| as integers of 2^exponent."""
    units = (q.abs() * 2.0**-exponent).round().clamp_max(MOST)
    return int(units.long().sum())
