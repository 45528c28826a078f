"""The rule `mean`: decides the sign of the weighted mean of the workers' gradients; see `corrections.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from signvote.core.corrections import LEAK, agreed, scales
from signvote.core.layout import Layout
from signvote.core.rule import Ranges, Rule
from signvote.core.trust import Evidence, State
from signvote.core.vote import Voters, Votes, empty_decision, fit_tally, fixed_point, scaled
from signvote.errors import ConfigError, StateError
from signvote.kernels import Coin, Planes, backend, upload


class Mean(Rule):
    """Decides the sign of the mean gradient: votes are corrections of what the server believes of a worker.
    For workers that own different kinds of data and can be trusted: who pushes for many rounds gets its way.

        G <- a G + S sum_m w_m b_m / sum_m w_m        decision = sign(G)

    w is the declared batch size, or 1 for all if a worker declares none. G is a number per coordinate, whatever the
    number of workers.

    Args:
        layout: of the model.

    """

    name = "mean"
    corrects = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.own([(0, layout.size)])

    def own(self, ranges: Ranges) -> None:
        """See Rule."""
        self.ranges = tuple(ranges)
        self.mean = torch.zeros(sum(stop - start for start, stop in ranges))  # G

    def weights(self, voters: Voters) -> Tensor:
        """The declared batch sizes, relative to the largest; equal if a worker declares none."""
        sizes = voters.batch_sizes if all(voters.batch_sizes) else (1,) * len(voters.workers)
        return fixed_point(scaled(torch.tensor(sizes, dtype=torch.float64)[:, None]))

    def scale(self, voters: Voters) -> Tensor:
        """The exponent of S for each tensor, (tensors,) int8."""
        if voters.claims is None:
            raise ConfigError("rule 'mean' needs ballots that are corrections; see Encoding(corrects=True)")
        return agreed(voters.claims, self._power(voters))

    def _power(self, voters: Voters) -> Tensor:
        """The weight of each worker in this round, (workers,): 0 for one that abstains."""
        assert voters.claims is not None
        weights = upload(fit_tally(self.weights(voters))[:, 0], voters.claims.device)
        present = voters.present if isinstance(voters, Votes) else None
        return weights if present is None else weights * present

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence is on corrections: how often a worker's differed from that of most."""
        exponents = self.scale(votes)
        power = self._power(votes)
        kernels = backend(votes.device)
        tally = kernels.tally(votes.planes, power, votes.n)
        total = power.sum()
        step = tally.float() / total.clamp_min(1).float()
        step *= scales(exponents, self.layout, votes.first, votes.n)
        self.mean = self.mean.to(votes.device)
        mean = self.mean[self._at(votes)]
        mean *= torch.where(total > 0, LEAK, 1.0)
        mean += step
        signs, _ = kernels.sign_planes(mean, coin)
        out.signs.copy_(signs.signs)  # with a coin every coordinate is decided
        return self._evidence(votes, power)

    def _evidence(self, votes: Votes, power: Tensor) -> Evidence:
        majority = empty_decision(votes.n, None, votes.device)
        counts = backend(votes.device).vote_(majority, votes.planes, power, None, (0, votes.n))
        mismatches, cast = (count[:, None] for count in counts)
        if votes.present is not None:
            mismatches = mismatches * votes.present[:, None]
            cast = cast * votes.present[:, None]
        return Evidence(workers=votes.workers, mismatches=mismatches, cast=cast, present=votes.present)

    def _at(self, votes: Votes) -> slice:
        """Where G of these votes is."""
        before = 0
        for start, stop in self.ranges:
            if start <= votes.first and votes.first + votes.n <= stop:
                begin = before + votes.first - start
                return slice(begin, begin + votes.n)
            before += stop - start
        raise ConfigError(
            f"votes on coordinates {votes.first} to {votes.first + votes.n} lie in none of {list(self.ranges)}"
        )

    def state_dict(self) -> State:
        """See Rule; the state holds the ranges owned, too."""
        ranges = [list(span) for span in self.ranges]
        return super().state_dict() | {"ranges": ranges, "mean": self.mean.cpu().clone()}

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule. Each coordinate comes from the state whose ranges hold it."""
        super().load_state_dict(state)
        whole = torch.full((self.layout.size,), torch.nan)
        for each in (state, *parts):
            _write(whole, each["ranges"], each["mean"])
        mine = torch.cat([whole[start:stop] for start, stop in self.ranges])
        if mine.isnan().any():
            raise StateError("coordinates decided here are in no state given; load the states of all ranks")
        self.mean = mine


def _write(whole: Tensor, ranges: Sequence[Sequence[int]], part: Tensor) -> None:
    """Copy the numbers of some ranges into the whole vector."""
    at = 0
    for start, stop in ranges:
        whole[start:stop] = part[at : at + stop - start]
        at += stop - start
