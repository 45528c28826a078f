"""The rule `mean`: decides the sign of the weighted mean of the workers' gradients; see `corrections.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.corrections import LEAK, largest, own
from signvote.core.layout import Layout
from signvote.core.loudness import ONE, Loudness
from signvote.core.owned import Owned
from signvote.core.powers import Powers, powers_of, tallied
from signvote.core.rule import Ranges, Rule
from signvote.core.scales import spread
from signvote.core.tally import Tally
from signvote.core.trust import Evidence, State
from signvote.core.vote import Voters, Votes, fixed_point, scaled
from signvote.errors import ConfigError
from signvote.kernels import WORD, Coin, Planes, backend, upload

DIGITS = ONE.bit_length() - 1  # binary, of a factor
RANGE = 2**18  # coordinates decided at a time from a tally of all, a multiple of 64


class Mean(Rule):
    """Decides the sign of the mean gradient: votes are corrections of what the server believes of a worker.
    For workers that own different kinds of data. One that pushes for many rounds gets its way, unless bound=1.5.

        G <- a G + sum_m w_m f_m S_m b_m / sum_m w_m        decision = sign(G)

    w is the declared batch size, or 1 for all if a worker declares none. G is a number per coordinate, whatever the
    number of workers. f is 1, or with a bound less for a worker that pushes harder than it claims (loudness.py) or
    contradicts the corrections of the others (discord.py).

    Args:
        layout: of the model.
        bound: how hard a worker may push, relative to its scale; 1.5 where workers may attack. None: any.
        secret: chooses the coordinates on which both are measured; use a random number that workers do not know.

    """

    name = "mean"
    corrects = True
    splits = True
    trust: Loudness | None

    def __init__(self, layout: Layout, *, bound: float | None = None, secret: int = 0) -> None:
        super().__init__(layout)
        self.groups = [(segment.start, segment.stop) for segment in layout.segments]
        if bound is not None:
            self.trust = Loudness(layout, bound, secret)
            self.splits = False  # a tally of all workers does not show what is believed of each
            self.remembers = 10_000
        self.own([(0, layout.size)])

    def own(self, ranges: Ranges) -> None:
        """See Rule."""
        self._owned = Owned(ranges, "mean")
        if self.trust is not None:
            self.trust.own(ranges)

    @property
    def mean(self) -> Tensor:
        """G of the coordinates owned."""
        return self._owned.values

    def weights(self, voters: Voters) -> Tensor:
        """The declared batch sizes, equal if a worker declares none, times f. Without scales."""
        return (self._sizes(voters) * self._factors(voters) // ONE).int()

    def _factors(self, voters: Voters) -> Tensor:
        """f, (workers, 1), in units of 1 / ONE."""
        if self.trust is None:
            return torch.full((len(voters.workers), 1), ONE)
        return self.trust.factors(voters.workers)[:, None]

    def _sizes(self, voters: Voters) -> Tensor:
        """w, (workers, tensors)."""
        sizes = voters.batch_sizes if all(voters.batch_sizes) else (1,) * len(voters.workers)
        by_worker = fixed_point(scaled(torch.tensor(sizes, dtype=torch.float64)[:, None]))
        return by_worker.expand(-1, len(self.groups))

    def weigh(self, voters: Voters) -> Tensor:
        """The weights times the scales: w S, (workers, tensors) int32."""
        return self._powers(voters).weights

    def scale(self, voters: Voters) -> Tensor:
        """The exponent of the largest scale that counts for each tensor, (tensors,) int8."""
        if voters.claims is None:
            raise ConfigError("rule 'mean' needs ballots that are corrections; see Encoding(corrects=True)")
        return largest(voters.claims, _present(voters))

    def _powers(self, voters: Voters) -> Powers:
        """The weight of each worker in this round: 0 for one that abstains."""
        most = self.scale(voters)
        assert voters.claims is not None
        weights = upload(self._sizes(voters), voters.claims.device).long()
        present = _present(voters)
        if present is not None:
            weights = weights * present[:, None]
        exponents = own(voters.claims, most).long()
        if self.trust is None:
            return powers_of(weights, torch.ones_like(weights), exponents)
        factors = upload(self._factors(voters), voters.claims.device).expand_as(weights)
        return powers_of(weights, factors, exponents - DIGITS)

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence is on corrections: how often a worker's differed from that of most."""
        powers = self._powers(votes)
        step, counts = tallied(votes, powers, self.layout)
        out.signs.copy_(self._integrated(step, powers, votes.first, coin))  # with a coin all are decided
        if votes.present is not None:
            counts = counts * votes.present[:, None]
        evidence = Evidence(
            workers=votes.workers,
            mismatches=counts[0],
            cast=counts[1],
            present=votes.present,
        )
        if self.trust is None:
            return evidence
        assert votes.claims is not None
        exponents = own(votes.claims, self.scale(votes))
        return self.trust.hear(evidence, votes, exponents, powers.weights.any())

    def conclude(self, out: Planes, tally: Tally, voters: Voters, coin: Coin | None) -> Planes:
        """See Rule. Votes are compared with those of most workers."""
        powers = self._powers(voters)
        for first in range(0, self.layout.size, RANGE):
            n = min(RANGE, self.layout.size - first)
            sums = tally.values(first, n).int()
            step = sums.float() * spread(powers.unit, self.layout, first, n)
            signs = self._integrated(step, powers, first, coin and coin.after(first))
            start = first // WORD
            out.signs[start : start + len(signs)] = signs
        return tally.compare()

    def _integrated(self, step: Tensor, powers: Powers, first: int, coin: Coin | None) -> Tensor:
        """Add the mean of the corrections on some coordinates to G; its signs."""
        mean = self._owned.of(first, len(step), step.device)
        mean *= torch.where(powers.weights.any(), LEAK, 1.0)
        mean += step
        planes, _ = backend(step.device).sign_planes(mean, coin)
        return planes.signs

    def identity(self) -> State:
        """See Rule. What is believed on a sample does not fit another one."""
        if self.trust is None:
            return super().identity()
        return super().identity() | {"sample": [len(self.trust.sample), self.trust.secret]}

    def state_dict(self) -> State:
        """See Rule; the state holds the ranges owned, too."""
        return super().state_dict() | self._owned.state_dict()

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule. Each coordinate comes from the state whose ranges hold it."""
        if self.trust is not None and "beliefs" in state:
            beliefs = sum((part["beliefs"] for part in parts), state["beliefs"])
            state = state | {"beliefs": beliefs}
        super().load_state_dict(state)
        self._owned.load(self.layout.size, state, *parts)


def _present(voters: Voters) -> Tensor | None:
    """Who of the voters does not abstain, as far as only the device knows; None: all."""
    return voters.present if isinstance(voters, Votes) else None
