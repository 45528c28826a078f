"""The named ways to decide. A rule weighs the votes it is shown and learns from what they show.

name          weight of a worker                                         state
majority      1                                                          none
it-signsgd    log((1-p)/p), p per coordinate; 1 in its first 100 rounds  2 bytes per worker and coordinate
pooled        log((1-p)/p), p per worker, or per worker and tensor       O(workers)
known-batch   sqrt(batch size), capped                                   none
agreement     log((1-p)/p), p from pairwise agreement                    O(workers^2)
robust        pooled's, but 0 for whom pairwise agreement disowns        O(workers^2)
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import torch
from torch import Tensor

from signvote.core.guard import GuardedTrust, Sample, capped
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.layout import Layout
from signvote.core.rule import Per, Rule, WeightedRule, checked_llr
from signvote.core.trust import AgreementTrust, CountTrust, Evidence, State
from signvote.core.vote import LARGEST, MAX_LLR, ONE, Votes, fixed_point, llr_weights, roots, scaled
from signvote.errors import ConfigError
from signvote.kernels import Coin, Planes, backend
from signvote.names import check_name


class Majority(WeightedRule):
    """signSGD-MV: every vote counts one.
    The baseline, with nothing to learn; good where all workers are alike and most of them honest.
    """

    name = "majority"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)

    def weights(self, votes: Votes) -> Tensor:
        """1 for everyone."""
        return torch.full((len(votes.workers), 1), ONE, dtype=torch.int32)


class Pooled(WeightedRule):
    """Weighs by log((1-p)/p), p being the share of a worker's votes that decisions overruled.
    For unequal workers that do not attack; needs two numbers per worker, or per worker and tensor.

    Args:
        layout: of the model.
        per: "tensor": a p for each tensor instead of one for all.
        forgetting: of the counts, per round; 1: nothing is forgotten.
        max_llr: largest weight.
        cap: largest ratio of two positive weights; 1 makes every worker count alike that is not overruled
            more often than not.

    """

    name = "pooled"
    trust: CountTrust

    def __init__(
        self,
        layout: Layout,
        *,
        per: Per = "worker",
        forgetting: float = 1.0,
        max_llr: float = MAX_LLR,
        cap: float = math.inf,
    ) -> None:
        super().__init__(layout, per)
        self.max_llr, self.cap = checked_llr(max_llr), _checked_cap(cap)
        self.trust = CountTrust(len(self.groups), forgetting)

    def weights(self, votes: Votes) -> Tensor:
        """Eq. (3) of the pooled crossover."""
        p = self.trust.crossover(votes.workers)
        return capped(fixed_point(scaled(llr_weights(p, max_llr=self.max_llr))), self.cap)

    def identity(self) -> State:
        """See Rule; counts by tensor do not fit a rule that counts by worker."""
        return super().identity() | {"groups": len(self.groups)}


class KnownBatch(WeightedRule):
    """Weighs by sqrt(B) of the declared batch size B: what trust tends to when gradients are noisy.
    For clusters where nobody lies about it; learns nothing, and is the yardstick for rules that do.

    Relative to the smallest batch declared in the round, at most `cap`. A worker that declares
    nothing counts as the smallest.
    """

    name = "known-batch"

    def __init__(self, layout: Layout, *, cap: float = 16.0) -> None:
        super().__init__(layout)
        self.cap = _checked_cap(cap)

    def weights(self, votes: Votes) -> Tensor:
        """min(sqrt(B / smallest B), cap), scaled so that the cap is the largest integer weight."""
        ratio = roots(votes.batch_sizes).clamp(max=self.cap)
        return (ratio * (LARGEST / self.cap)).round().to(torch.int32)[:, None]


class Agreement(WeightedRule):
    """Weighs by log((1-p)/p), p from how a worker agrees with the others; blind to the decision.
    Follows workers that turn; copies of each other deceive it, and a single strong worker is undervalued.
    """

    name = "agreement"
    trust: AgreementTrust

    def __init__(self, layout: Layout, *, forgetting: float = 0.98, max_llr: float = MAX_LLR) -> None:
        super().__init__(layout)
        self.max_llr = checked_llr(max_llr)
        self.trust = AgreementTrust(forgetting)

    def weights(self, votes: Votes) -> Tensor:
        """Eq. (3) of the crossover that agreement shows: 2 atanh(1 - 2 p)."""
        p = self.trust.crossover(votes.workers)[:, None]
        return fixed_point(scaled(llr_weights(p, max_llr=self.max_llr)))

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule; evidence holds all pairs of workers, too."""
        seen = super().vote(out, votes, coin)
        pairs = backend(votes.planes.signs.device).disagreements(votes.planes, votes.n)
        return replace(seen, differ=pairs[0], common=pairs[1])


class Robust(WeightedRule):
    """Pooled trust, guarded: pairwise agreement says who may be believed, pooled counts say how much.
    For workers that may collude or turn; `cap` bounds what those that pass the guard can do.

    A worker that does not agree with the others has weight 0; copies of each other share one vote.
    No weight is negative: whoever is believed in the opposite would only have to turn round to rule.
    While agreement does not tell, every vote counts one.

    Args:
        layout: of the model.
        per: "tensor": a worker that disagrees in a tensor has no say in it. "worker": all in one.
        forgetting: of the pooled counts, per round.
        memory: of agreement, per round; short, because whom to believe may change quickly.
        cap: largest ratio of two positive weights; L < M / (1 + cap) colluders cannot overturn the rest.
        by_size: it is weight / sqrt(declared batch size) that the cap is on: who declares more may weigh more.
        sample: coordinates on which agreement is counted, of more than that.
        secret: chooses them; give a random number that workers do not know.
        max_llr: largest weight.

    """

    name = "robust"
    trust: GuardedTrust

    def __init__(
        self,
        layout: Layout,
        *,
        per: Per = "worker",
        forgetting: float = 0.98,
        memory: float = 0.9,
        cap: float = 2.0,
        by_size: bool = True,
        sample: int = 2**20,
        secret: int = 0,
        max_llr: float = MAX_LLR,
    ) -> None:
        super().__init__(layout, per)
        self.max_llr, self.cap = checked_llr(max_llr), _checked_cap(cap)
        self.by_size, self.sample = by_size, Sample(self.groups, sample, secret)
        self.trust = GuardedTrust(len(self.groups), forgetting, memory)

    def weights(self, votes: Votes) -> Tensor:
        """Pooled's, then guarded, capped, and shared out among copies; 1 where nobody is left to believe."""
        plain = torch.full((len(votes.workers), len(self.groups)), ONE, dtype=torch.int32)
        verdict = self.trust.verdict(votes.workers)
        if verdict is None:
            return plain
        pooled = llr_weights(self.trust.crossover(votes.workers), max_llr=self.max_llr).clamp_min(0)
        believed = fixed_point(scaled(pooled * verdict.believable))
        sharing = (verdict.unit == verdict.unit[:, None]).sum(1, keepdim=True)
        within = capped(believed, self.cap, roots(votes.batch_sizes) if self.by_size else None)
        shared = torch.div(within, sharing, rounding_mode="trunc").int()
        return torch.where((shared > 0).any(0), shared, plain)

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule; evidence holds the pairs of workers, too, on the sample."""
        pairs = self.sample.pairs(votes)
        return replace(super().vote(out, votes, coin), differ=pairs[0], common=pairs[1])

    def identity(self) -> State:
        """See Pooled."""
        return super().identity() | {"groups": len(self.groups)}


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Majority, ItSignSGD, Pooled, KnownBatch, Agreement, Robust)
}


def summary(name: str) -> list[str]:
    """What a rule does and when to take it: the first two lines of its class.

    >>> summary("majority")[0]
    'signSGD-MV: every vote counts one.'
    """
    return inspect.getdoc(RULES[name]).splitlines()[:2]  # type: ignore[union-attr]


def make_rule(name: str, layout: Layout, **options: object) -> Rule:
    """A fresh rule by name; options are the keyword arguments of its class.

    >>> make_rule("pooled", Layout([("w", (4,))]), forgetting=0.98).name
    'pooled'
    """
    check_name("rule", name, RULES)
    known = list(inspect.signature(RULES[name]).parameters)[1:]
    unknown = set(options) - set(known)
    if unknown:
        raise ConfigError(
            f"rule {name!r} has no option {', '.join(sorted(unknown))}; it has: {', '.join(known) or 'none'}"
        )
    return RULES[name](layout, **options)


def _checked_cap(cap: float) -> float:
    if not cap >= 1:
        raise ConfigError(f"cap is {cap}; it must be 1 or more, the largest ratio of two weights")
    return cap
