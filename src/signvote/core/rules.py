"""The named ways to decide. A rule weighs the votes it is shown and learns from what they show.

    name          weight of a worker                                         state
    majority      1                                                          none
    it-signsgd    log((1-p)/p), p per coordinate; 1 in its first 100 rounds  2 bytes per worker and coordinate
    pooled        log((1-p)/p), p per worker, or per worker and tensor       O(workers)
    known-batch   sqrt(batch size), capped                                   none
    agreement     log((1-p)/p), p from pairwise agreement                    O(workers^2)
    robust        pooled's, but 0 for whom pairwise agreement disowns        O(workers^2)

`vote` decides some coordinates and returns evidence; evidence of all coordinates of a round is added
up and given to `learn` once. So a server may vote in chunks, and shards on many machines agree.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from signvote.core.guard import GuardedTrust, Sample, capped
from signvote.core.layout import Layout
from signvote.core.trust import AgreementTrust, CoordinateTrust, CountTrust, Evidence, State, Trust
from signvote.core.vote import LARGEST, MAX_LLR, ONE, Votes, fixed_point, llr_weights, roots, scaled
from signvote.errors import ConfigError, StateError
from signvote.kernels import WORD, Coin, Planes, backend, upload
from signvote.names import check_name

Per = Literal["worker", "tensor"]


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

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; one of another rule or layout is refused, naming both."""
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
        self.max_llr, self.cap = _checked_llr(max_llr), _checked_cap(cap)
        self.trust = CountTrust(len(self.groups), forgetting)

    def weights(self, votes: Votes) -> Tensor:
        """Eq. (3) of the pooled crossover."""
        p = self.trust.crossover(votes.workers)
        return capped(fixed_point(scaled(llr_weights(p, max_llr=self.max_llr))), self.cap)

    def identity(self) -> State:
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
        self.max_llr = _checked_llr(max_llr)
        self.trust = AgreementTrust(forgetting)

    def weights(self, votes: Votes) -> Tensor:
        """Eq. (3) of the crossover that agreement shows: 2 atanh(1 - 2 p)."""
        p = self.trust.crossover(votes.workers)[:, None]
        return fixed_point(scaled(llr_weights(p, max_llr=self.max_llr)))

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
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
        self.max_llr, self.cap = _checked_llr(max_llr), _checked_cap(cap)
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
        pairs = self.sample.pairs(votes)
        return replace(super().vote(out, votes, coin), differ=pairs[0], common=pairs[1])

    def identity(self) -> State:
        return super().identity() | {"groups": len(self.groups)}


class ItSignSGD(Rule):
    """The paper: weighs by log((1-p)/p), p per worker and coordinate; plain in its first 100 rounds.
    For comparing with it: needs two bytes per worker and coordinate, and many rounds to learn.

    `shard` is the range of coordinates that this object counts, if another machine has the rest.
    """

    name = "it-signsgd"
    trust: CoordinateTrust

    def __init__(
        self,
        layout: Layout,
        *,
        warmup: int = 100,
        forgetting: float = 1.0,
        max_llr: float = MAX_LLR,
        zero_is_symbol: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(layout)
        self.shard = shard or (0, layout.size)
        if not 0 <= self.shard[0] < self.shard[1] <= layout.size:
            raise ConfigError(f"shard is {self.shard}; it must lie within (0, {layout.size})")
        self.trust = CoordinateTrust(
            self.shard[1] - self.shard[0],
            warmup=warmup,
            max_llr=_checked_llr(max_llr),
            forgetting=forgetting,
            zero_is_symbol=zero_is_symbol,
        )

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        first = votes.first - self.shard[0]
        if first % WORD or first < 0 or votes.first + votes.n > self.shard[1]:
            raise ConfigError(
                f"votes on coordinates {votes.first} to {votes.first + votes.n} do not fit"
                f" shard {self.shard}; they must lie inside and start a multiple of {WORD} after its start"
            )
        device = votes.planes.signs.device
        self.trust.admit(votes.workers, device)
        weights = self.trust.weights(votes.workers, first // WORD, votes.planes.signs.shape[1])
        if votes.present is not None:
            weights = weights._replace(slots=torch.where(votes.present, weights.slots, -1))
        counts = backend(device).vote_by_coordinate_(out, votes.planes, weights, coin, votes.n)
        mismatches, cast = (c[:, None] for c in counts)
        return Evidence(workers=votes.workers, mismatches=mismatches, cast=cast, present=votes.present)

    def weights(self, votes: Votes) -> Tensor:
        """Weights at each coordinate of the votes, (workers, n): for looking at, not for deciding."""
        self.trust.admit(votes.workers, votes.planes.signs.device)
        first, n = votes.first - self.shard[0], votes.n
        known = self.trust.weights(votes.workers, 0, self.trust.counters.shape[0])
        bits = known.counters.view(torch.int16)[:, known.slots].transpose(0, 1).flatten(1)
        halves = bits[:, first : first + n].int() & 0xFFFF
        return known.tables[known.table_of[:, None], known.sizes[:, None] + halves]

    def identity(self) -> State:
        return super().identity() | {"shard": list(self.shard)}


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


def _checked_llr(max_llr: float) -> float:
    if not 0 < max_llr <= MAX_LLR:
        raise ConfigError(f"max_llr is {max_llr}; it must lie in (0, {MAX_LLR:g}]")
    return max_llr


def _checked_cap(cap: float) -> float:
    if not cap >= 1:
        raise ConfigError(f"cap is {cap}; it must be 1 or more, the largest ratio of two weights")
    return cap
