"""The named rules. A rule weighs votes and learns from the evidence of each round.

name          weight of a worker                                              state
majority      1                                                               none
it-signsgd    log((1-p)/p), p per coordinate; 1 in its first 100 rounds       2 bytes per worker and coordinate
weighted      sqrt(declared batch size), less if its record does not bear     O(workers)
              it out; without declared sizes log((1-p)/p), in steps of two
robust        sqrt(declared batch size) as far as it was borne out; shared    O(workers)
              by workers that err together, 0 for those that contradict the others
mean          declared batch size; votes are corrections, and the mean      4 bytes per coordinate
              of the gradients is decided (mean.py)
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from signvote.core.guard import LEAST, GuardedTrust, Sample, contested, pair_counts
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.layout import Layout
from signvote.core.mean import Mean
from signvote.core.pairs import hostile, sharing
from signvote.core.rule import Per, Rule, WeightedRule
from signvote.core.trust import FEW, CountTrust, Evidence, State
from signvote.core.vote import ONE, Voters, Votes, fixed_point, llr_weights, roots, scaled
from signvote.core.witnesses import Witnesses, rows_of
from signvote.errors import ConfigError
from signvote.kernels import Coin, Planes
from signvote.names import check_name

FAR_BELOW = 4.0  # a record that is this many times worse than the declared size promises costs weight
BORNE_OUT = 2.0  # power of the strength shown that a declared size may reach
LEVELS = (-4, 6)  # smallest and largest learned weight, as powers of two


class Majority(WeightedRule):
    """signSGD-MV: every vote counts one.
    The baseline, with nothing to learn; good where all workers are alike and most of them honest.
    """

    name = "majority"
    is_alone = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)

    def weights(self, voters: Voters) -> Tensor:
        """1 for every worker."""
        shape = (len(voters.workers), 1)
        return torch.full(shape, ONE, dtype=torch.int32)


class Weighted(WeightedRule):
    """Weighs by sqrt(B) of the declared batch size B, and by less if the worker's record does not support it.
    The default. Where a worker declares no size, weights are learned from the record alone, as in the paper.

    The record of a worker is p, the share of its votes that decisions overruled, and l = log((1-p)/p).

        w = sqrt(B) * min(1, 4 r / median r)      r = l / sqrt(B)      all declare a size
        w = 2^round(log2(l / median l))           0 if l <= 0          otherwise

    Declared sizes are the prior. Evidence takes weight away, and never adds any: nobody becomes a dictator by
    deciding what it is judged by. Learned weights are powers of two, so that workers that are nearly alike
    have equal weights: ties between them stay ties. Fewer than three voters teach nothing, because of two
    neither is ever overruled.

    Args:
        layout: of the model.
        sizes: False: ignore declared sizes.
        per: "tensor": a record for each tensor instead of one for all.
        forgetting: of the record, per round; 1 keeps everything.

    """

    name = "weighted"
    learns_from = FEW
    trust: CountTrust

    def __init__(
        self,
        layout: Layout,
        *,
        sizes: bool = True,
        per: Per = "worker",
        forgetting: float = 1.0,
    ) -> None:
        super().__init__(layout, per)
        self.sizes = sizes
        self.trust = CountTrust(len(self.groups), forgetting)

    def weights(self, voters: Voters) -> Tensor:
        """See the class. Fewer than three voters are weighed by their sizes alone, or equally."""
        prior = roots(voters.batch_sizes) if self.sizes else None
        size = torch.ones(len(voters.workers)).double() if prior is None else prior
        weights = size[:, None].expand(-1, len(self.groups))
        if len(voters.workers) >= FEW:
            p = self.trust.crossover(voters.workers)
            record = llr_weights(p)  # (paper, eq. 3)
            weights = learned(record) if prior is None else vouched(record, weights)
        return fixed_point(scaled(weights))

    def identity(self) -> State:
        """See Rule. Counts per tensor do not fit a rule that counts per worker."""
        return super().identity() | {"groups": len(self.groups)}


def vouched(record: Tensor, root: Tensor) -> Tensor:
    """sqrt(B) min(1, 4 r / median r), r = record / sqrt(B): see Weighted. Both are (workers, groups).

    >>> record = torch.tensor([[1.0], [1.0], [2.0], [0.1]])
    >>> vouched(record, torch.tensor([[1.0], [1.0], [2.0], [1.0]]))[:, 0].tolist()
    [1.0, 1.0, 2.0, 0.4...]
    """
    r = record.clamp_min(0) / root
    usual = r.median(0, keepdim=True).values
    lives_up = (FAR_BELOW * r / usual).clamp_max(1)
    return torch.where(usual > 0, root * lives_up, root)


def learned(record: Tensor) -> Tensor:
    """2^round(log2(l / median l)), 0 if l <= 0: see Weighted. 1 for all where most are worth nothing.

    >>> learned(torch.tensor([[1.0], [1.3], [2.9], [-1.0]]))[:, 0].tolist()
    [1.0, 1.0, 4.0, 0.0]
    """
    usual = record.median(0, keepdim=True).values
    level = torch.log2(record / usual).round().clamp(*LEVELS)
    weights = torch.where(record > 0, torch.exp2(level), 0.0)
    return torch.where(usual > 0, weights, 1.0)


class Robust(WeightedRule):
    """Like weighted, but workers that err together share their votes, and those that contradict most have none.
    For workers that may attack. A declared size counts only as far as the worker's first rounds support it.

    Three questions, answered by how often two workers agree, never by decisions, which attackers may make:

        does it contradict the workers that agree with one another?    weight 0; see `hostile`
        does it err together with others?                              they share their votes; see `sharing`
        is it as strong as it says?                                    see `GuardedTrust.strength`

    Args:
        layout: of the model.
        largest: the most that a declared size can buy, in votes of the median worker; 1: sizes do not count.
        memory: forgetting of what pairs of workers have in common, in the short of two memories; a worker may turn.
        sample: number of coordinates on which pairs are compared, if there are more.
        secret: chooses them, and the witnesses; use a random number that workers do not know.
        witnesses: number of workers with whom each is compared, if there are more; on fewer coordinates then.

    """

    name = "robust"
    splits = True
    remembers = 10_000
    trust: GuardedTrust

    def __init__(
        self,
        layout: Layout,
        *,
        largest: float = 8.0,
        memory: float = 0.9,
        sample: int = 2**20,
        secret: int = 0,
        witnesses: int = 500,
    ) -> None:
        super().__init__(layout)
        if not largest >= 1:
            raise ConfigError(f"largest is {largest}; it must be 1 or more votes")
        self.largest = largest
        self.sample = Sample(layout.size, sample, secret)
        self.witnesses = Witnesses(witnesses, secret)
        self.trust = GuardedTrust(memory)

    def weights(self, voters: Voters) -> Tensor:
        """The size that a worker has shown, divided among those who err together; 0 for who is hostile."""
        sizes = self._sizes(voters)
        witnesses = self.witnesses.of(voters.workers)
        at = rows_of(voters.workers, witnesses)
        weights = sizes
        for seen in self.trust.seen(voters.workers, witnesses):
            shared = sizes / sharing(seen.contested, sizes, seen.chance, at)
            shared[hostile(seen.everywhere, seen.chance, at)] = 0
            weights = weights.minimum(shared)
        return fixed_point(scaled(weights[:, None]))

    def _sizes(self, voters: Voters) -> Tensor:
        """Relative sqrt(B), at most `largest` and the square of the strength shown; 1 if a size is not declared."""
        declared = roots(voters.batch_sizes)
        if declared is None:
            return torch.ones(len(voters.workers)).double()
        shown = self.trust.strength(voters.workers) ** BORNE_OUT
        return declared.minimum(shown).clamp_max(self.largest)

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The evidence also counts pairs of workers on the sample: everywhere, and where it is contested."""
        evidence = self.decide(out, votes, coin)
        return self.compared(evidence, self.thinned(self.sampled(votes)))

    def decide(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule."""
        return super().vote(out, votes, coin)

    def sampled(self, votes: Votes) -> Votes:
        """See Rule."""
        return self.sample.of(votes)

    def thinned(self, sampled: Votes | None) -> Votes | None:
        """See Rule. M workers are compared on a share of the coordinates that falls as 1 / M."""
        if sampled is None:
            return None
        workers = len(self._voters(sampled))
        if workers <= self.witnesses.count:
            return sampled
        fewer = self.sample.size * self.witnesses.count // workers
        least = min(self.sample.size, LEAST)
        return self.sample.thinned(sampled, max(fewer, least))

    def _voters(self, votes: Votes) -> tuple[int, ...]:
        """Those that are present. Of few workers all: it does not matter, and is not waited for."""
        if votes.present is None or len(votes.workers) <= self.witnesses.count:
            return votes.workers
        return tuple(itertools.compress(votes.workers, votes.present.tolist()))

    def compared(self, evidence: Evidence, sampled: Votes | None) -> Evidence:
        """See Rule. Without a sample nothing is known about pairs."""
        if sampled is None:
            pairs = torch.zeros(2, len(evidence.workers), len(evidence.workers), dtype=torch.int64)
            return replace(evidence, differ=pairs, common=pairs)
        witnesses = self.witnesses.of(self._voters(sampled))
        at = rows_of(sampled.workers, witnesses)
        counts = [pair_counts(votes, at) for votes in (sampled, contested(sampled))]
        differ, common = zip(*counts, strict=True)
        return replace(
            evidence,
            differ=torch.stack(differ),
            common=torch.stack(common),
            witnesses=witnesses,
        )


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Majority,
        ItSignSGD,
        Weighted,
        Robust,
        Mean,
    )
}
FORMER = {
    "pooled": "weighted",
    "known-batch": "weighted",
    "agreement": "robust",
}  # names before 0.2


def current(name: str) -> str:
    """The name of a rule today; a former name is answered with a warning.

    >>> current("robust")
    'robust'
    """
    if name not in FORMER:
        return name
    today = FORMER[name]
    warnings.warn(f"the rule {name!r} is now {today!r}; docs/rules.md says why", FutureWarning, stacklevel=3)
    return today


def summary(name: str) -> list[str]:
    """What a rule does and when to use it: the first two lines of its docstring.

    >>> summary("majority")[0]
    'signSGD-MV: every vote counts one.'
    """
    text = inspect.getdoc(RULES[name])
    return text.splitlines()[:2]  # type: ignore[union-attr]


def make_rule(name: str, layout: Layout, **options: object) -> Rule:
    """A fresh rule by name; options are the keyword arguments of its class.

    >>> make_rule("weighted", Layout([("w", (4,))]), forgetting=0.98).name
    'weighted'
    """
    name = current(name)
    check_name("rule", name, RULES)
    rule = RULES[name]
    known = list(inspect.signature(rule).parameters)[1:]
    unknown = set(options) - set(known)
    if unknown:
        wrong = ", ".join(sorted(unknown))
        possible = ", ".join(known) or "none"
        raise ConfigError(f"rule {name!r} has no option {wrong}; it has: {possible}")
    return rule(layout, **options)
