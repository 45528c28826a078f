"""The named rules. A rule weighs votes and learns from the evidence of each round.

name          weight of a worker                                         state
majority      1                                                          none
it-signsgd    log((1-p)/p), p per coordinate; 1 in its first 100 rounds  2 bytes per worker and coordinate
pooled        log((1-p)/p), p per worker, or per worker and tensor       O(workers)
known-batch   sqrt(batch size), capped                                   none
agreement     log((1-p)/p), p from pairwise agreement                    O(workers^2)
robust        like pooled, 0 for workers that disagree with the rest     O(workers^2)
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import torch
from torch import Tensor

from signvote.core.guard import GuardedTrust, Sample
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.layout import Layout
from signvote.core.pairs import AgreementTrust
from signvote.core.rule import Per, Rule, WeightedRule
from signvote.core.trust import FEW, CountTrust, Evidence, State
from signvote.core.vote import (
    LARGEST,
    MAX_LLR,
    ONE,
    Voters,
    Votes,
    capped,
    checked_cap,
    checked_llr,
    fixed_point,
    llr_weights,
    roots,
    scaled,
)
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

    def weights(self, voters: Voters) -> Tensor:
        """1 for every worker."""
        shape = (len(voters.workers), 1)
        return torch.full(shape, ONE, dtype=torch.int32)


class Pooled(WeightedRule):
    """Weighs by log((1-p)/p), where p is the share of a worker's votes that decisions overruled.
    For unequal workers that do not attack; needs two numbers per worker, or per worker and tensor.

    Args:
        layout: of the model.
        per: "tensor": a p for each tensor instead of one for all.
        forgetting: of the counts, per round; 1 keeps everything.
        max_llr: largest weight.
        cap: largest ratio of two positive weights; 1 gives the same weight to all workers that are
            overruled in less than half of their votes.

    """

    name = "pooled"
    equal_below = FEW
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
        self.max_llr = checked_llr(max_llr)
        self.cap = checked_cap(cap)
        self.trust = CountTrust(len(self.groups), forgetting)

    def weights(self, voters: Voters) -> Tensor:
        """log((1 - p) / p) of the pooled p (paper, eq. 3), scaled and capped; 1 while fewer than three vote."""
        if len(voters.workers) < self.equal_below:
            return torch.full((len(voters.workers), len(self.groups)), ONE, dtype=torch.int32)
        p = self.trust.crossover(voters.workers)
        learned = llr_weights(p, max_llr=self.max_llr)
        integers = fixed_point(scaled(learned))
        return capped(integers, self.cap)

    def identity(self) -> State:
        """See Rule. Counts per tensor do not fit a rule that counts per worker."""
        return super().identity() | {"groups": len(self.groups)}


class KnownBatch(WeightedRule):
    """Weighs by sqrt(B) of the declared batch size B, the limit of learned weights for noisy gradients.
    For clusters where every worker declares its true batch size; learns nothing.

    The weight is relative to the smallest batch declared in the round, and at most `cap`. A worker that
    declares nothing counts as the smallest.
    """

    name = "known-batch"

    def __init__(self, layout: Layout, *, cap: float = 16.0) -> None:
        super().__init__(layout)
        self.cap = checked_cap(cap)

    def weights(self, voters: Voters) -> Tensor:
        """min(sqrt(B / smallest B), cap), scaled so that the cap is the largest integer weight."""
        ratio = roots(voters.batch_sizes).clamp(max=self.cap)
        integers = (ratio * (LARGEST / self.cap)).round()
        return integers.to(torch.int32)[:, None]


class Agreement(WeightedRule):
    """Weighs by log((1-p)/p), where p follows from how often a worker agrees with each other worker.
    Follows workers that turn; copies of a worker deceive it, and a single strong worker is undervalued.

    Args:
        layout: of the model.
        forgetting: of the pair counts, per round; 1 keeps everything.
        max_llr: largest weight.

    """

    name = "agreement"
    remembers = 1_000
    equal_below = FEW
    trust: AgreementTrust

    def __init__(self, layout: Layout, *, forgetting: float = 0.98, max_llr: float = MAX_LLR) -> None:
        super().__init__(layout)
        self.max_llr = checked_llr(max_llr)
        self.trust = AgreementTrust(forgetting)

    def weights(self, voters: Voters) -> Tensor:
        """log((1 - p) / p) of the p that agreement shows (paper, eq. 3), scaled."""
        p = self.trust.crossover(voters.workers)
        learned = llr_weights(p, max_llr=self.max_llr)
        return fixed_point(scaled(learned[:, None]))

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence also counts all pairs of workers."""
        evidence = super().vote(out, votes, coin)
        kernels = backend(votes.device)
        differ, common = kernels.disagreements(votes.planes, votes.n)
        return replace(evidence, differ=differ, common=common)


class Robust(WeightedRule):
    """Like pooled, but a worker that disagrees with the others gets weight 0, and copies share one vote.
    For workers that may collude or turn; `cap` bounds the power of those that agree well enough.

    No weight is negative: otherwise a worker could gain power by voting wrongly for some time and then
    turning. While pairwise agreement gives no verdict, every vote counts one.

    Args:
        layout: of the model.
        per: "tensor": a worker that disagrees in one tensor loses its vote in this tensor only.
        forgetting: of the pooled counts, per round.
        memory: forgetting of the pair counts; short, because a worker may turn at any time.
        cap: largest ratio of two positive weights; L < M / (1 + cap) colluders cannot overturn the others
            where these agree, if all have positive weights and declare the same batch size.
        by_size: apply the cap to weight / sqrt(declared batch size), so that a large batch may weigh more.
        sample: number of coordinates on which pairs are compared, if there are more.
        secret: chooses them; use a random number that workers do not know.
        max_llr: largest weight.

    """

    name = "robust"
    remembers = 1_000
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
        self.max_llr = checked_llr(max_llr)
        self.cap = checked_cap(cap)
        self.by_size = by_size
        self.sample = Sample(self.groups, sample, secret)
        self.trust = GuardedTrust(len(self.groups), forgetting, memory)

    def weights(self, voters: Voters) -> Tensor:
        """Pooled weights, guarded, divided among copies, and then capped; 1 where no worker is left."""
        shape = (len(voters.workers), len(self.groups))
        plain = torch.full(shape, ONE, dtype=torch.int32)
        verdict = self.trust.verdict(voters.workers)
        if verdict is None:
            return plain
        p = self.trust.crossover(voters.workers)
        pooled = llr_weights(p, max_llr=self.max_llr).clamp_min(0)
        same_unit = verdict.unit == verdict.unit[:, None]
        sharing = same_unit.sum(1, keepdim=True)
        shared = pooled * verdict.believable / sharing
        sizes = roots(voters.batch_sizes) if self.by_size else None
        within = capped(fixed_point(scaled(shared)), self.cap, sizes)
        somebody_left = (within > 0).any(0)
        return torch.where(somebody_left, within, plain)

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence also counts pairs of workers, on the sample."""
        differ, common = self.sample.pairs(votes)
        evidence = super().vote(out, votes, coin)
        return replace(evidence, differ=differ, common=common)

    def identity(self) -> State:
        """See Pooled."""
        return super().identity() | {"groups": len(self.groups)}


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Majority,
        ItSignSGD,
        Pooled,
        KnownBatch,
        Agreement,
        Robust,
    )
}


def summary(name: str) -> list[str]:
    """What a rule does and when to use it: the first two lines of its docstring.

    >>> summary("majority")[0]
    'signSGD-MV: every vote counts one.'
    """
    text = inspect.getdoc(RULES[name])
    return text.splitlines()[:2]  # type: ignore[union-attr]


def make_rule(name: str, layout: Layout, **options: object) -> Rule:
    """A fresh rule by name; options are the keyword arguments of its class.

    >>> make_rule("pooled", Layout([("w", (4,))]), forgetting=0.98).name
    'pooled'
    """
    check_name("rule", name, RULES)
    rule = RULES[name]
    known = list(inspect.signature(rule).parameters)[1:]
    unknown = set(options) - set(known)
    if unknown:
        wrong = ", ".join(sorted(unknown))
        possible = ", ".join(known) or "none"
        raise ConfigError(f"rule {name!r} has no option {wrong}; it has: {possible}")
    return rule(layout, **options)
