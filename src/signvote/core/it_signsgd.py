"""The paper's rule: a weight for every worker and coordinate, by counters that many machines may share out."""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.rule import Ranges, Rule, checked_llr
from signvote.core.trust import CoordinateTrust, Evidence, State
from signvote.core.vote import MAX_LLR, Votes
from signvote.errors import ConfigError, StateError
from signvote.kernels import WORD, Coin, Planes, backend, words_for


class ItSignSGD(Rule):
    """The paper: weighs by log((1-p)/p), p per worker and coordinate; plain in its first 100 rounds.
    For comparing with it: needs two bytes per worker and coordinate, and many rounds to learn.
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
    ) -> None:
        super().__init__(layout)
        self.warmup, self.forgetting, self.zero_is_symbol = warmup, forgetting, zero_is_symbol
        self.max_llr = checked_llr(max_llr)
        self.own([(0, layout.size)])

    def own(self, ranges: Ranges) -> None:
        """Count these coordinates alone; each range starts a word, and ends one or the layout."""
        size = self.layout.size
        for start, stop in ranges:
            if (
                start % WORD
                or not (0 <= start < stop <= size or start == stop)
                or (stop % WORD and stop < size)
            ):
                raise ConfigError(f"range ({start}, {stop}) is no run of whole words of (0, {size})")
        self.ranges = tuple(ranges)
        self.trust = CoordinateTrust(
            sum(stop - start for start, stop in ranges),
            warmup=self.warmup,
            max_llr=self.max_llr,
            forgetting=self.forgetting,
            zero_is_symbol=self.zero_is_symbol,
        )

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule; counters of what is voted on are updated in the same pass."""
        device = votes.planes.signs.device
        self.trust.admit(votes.workers, device)
        weights = self.trust.weights(votes.workers, self._word(votes), votes.planes.signs.shape[1])
        if votes.present is not None:
            weights = weights._replace(slots=torch.where(votes.present, weights.slots, -1))
        counts = backend(device).vote_by_coordinate_(out, votes.planes, weights, coin, votes.n)
        mismatches, cast = (c[:, None] for c in counts)
        return Evidence(workers=votes.workers, mismatches=mismatches, cast=cast, present=votes.present)

    def weights(self, votes: Votes) -> Tensor:
        """Weights at each coordinate of the votes, (workers, n): for looking at, not for deciding."""
        self.trust.admit(votes.workers, votes.planes.signs.device)
        first, n = WORD * self._word(votes), votes.n
        known = self.trust.weights(votes.workers, 0, self.trust.counters.shape[0])
        bits = known.counters.view(torch.int16)[:, known.slots].transpose(0, 1).flatten(1)
        halves = bits[:, first : first + n].int() & 0xFFFF
        return known.tables[known.table_of[:, None], known.sizes[:, None] + halves]

    def _word(self, votes: Votes) -> int:
        """Where the counters of these votes begin."""
        before = 0
        for start, stop in self.ranges:
            if start <= votes.first and votes.first + votes.n <= stop and votes.first % WORD == 0:
                return before + (votes.first - start) // WORD
            before += words_for(stop - start)
        raise ConfigError(
            f"votes on coordinates {votes.first} to {votes.first + votes.n} lie in none of the ranges"
            f" {list(self.ranges)} that are counted here, or do not start a multiple of {WORD}"
        )

    def state_dict(self) -> State:
        """Everything learnt, and of which coordinates."""
        return super().state_dict() | {"ranges": [list(r) for r in self.ranges]}

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule; the counters of the coordinates owned here are taken from whichever state has them."""
        mine, size = _words(self.ranges), words_for(self.layout.size)
        place = torch.full((size,), -1).index_copy_(0, mine, torch.arange(len(mine)))
        bits = torch.zeros(len(mine), len(state.get("workers", ())), WORD, dtype=torch.int16)
        missing = torch.ones(len(mine), dtype=torch.bool)
        for part in (state, *parts) if state.get("rule") == self.name else ():
            at = place[_words(part.get("ranges", [(0, self.layout.size)]))]
            bits[at[at >= 0]] = part["counters"].view(torch.int16)[at >= 0]
            missing[at[at >= 0]] = False
        super().load_state_dict(state | {"counters": bits.view(torch.uint16)})
        if missing.any():
            raise StateError(
                f"{int(missing.sum())} words of the coordinates counted here are in no state given"
            )


def _words(ranges: Ranges) -> Tensor:
    """The numbers of the words that ranges of coordinates fill."""
    spans = [torch.arange(start // WORD, start // WORD + words_for(stop - start)) for start, stop in ranges]
    return torch.cat(spans)
