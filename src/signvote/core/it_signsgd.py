"""The paper's rule: a weight for every worker and coordinate, from counters per worker and coordinate.

The counters are in `counters.py`. Several machines may share the coordinates: each owns some ranges, and the counters
of these. Relays may share the workers: each has the counters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from signvote.core.bits import unpack_signs
from signvote.core.counters import CoordinateTrust
from signvote.core.layout import Layout
from signvote.core.rule import Ranges, Rule
from signvote.core.tally import Tally
from signvote.core.trust import Evidence, State
from signvote.core.vote import (
    MAX_LLR,
    MOST,
    Voters,
    Votes,
    checked_llr,
    everywhere,
)
from signvote.errors import ConfigError, StateError
from signvote.kernels import WORD, Coin, Planes, backend, words_for


class ItSignSGD(Rule):
    """The paper's rule: weighs by log((1-p)/p), p per worker and coordinate; plain in its first 100 rounds.
    For comparison with the paper. It needs two bytes per worker and coordinate, and many rounds to learn.

    Args:
        layout: of the model.
        warmup: rounds in which a worker's weight is 1.
        forgetting: of the counters, per round; 1 keeps everything.
        max_llr: largest weight.
        zero_is_symbol: compare zero like a third sign, as the authors' code does.

    """

    name = "it-signsgd"
    splits = True
    is_local = True
    remembers = 1_000
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
        self.warmup = warmup
        self.forgetting = forgetting
        self.max_llr = checked_llr(max_llr)
        self.zero_is_symbol = zero_is_symbol
        self.own([(0, layout.size)])

    def own(self, ranges: Ranges) -> None:
        """See Rule. A range starts at a word, and ends at one or at the end of the layout."""
        size = self.layout.size
        for start, stop in ranges:
            if not _is_whole_words(start, stop, size):
                raise ConfigError(f"range ({start}, {stop}) is no run of whole words of (0, {size})")
        self.ranges = tuple(ranges)
        sizes = [stop - start for start, stop in ranges]
        self.trust = CoordinateTrust(
            sum(sizes),
            warmup=self.warmup,
            max_llr=self.max_llr,
            forgetting=self.forgetting,
            zero_is_symbol=self.zero_is_symbol,
        )
        words = len(self.trust.counters)
        self._voted = np.zeros(words, bool)  # those decided since the last `learn`

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """See Rule. The kernel decides and updates the counters of these coordinates in one pass."""
        word = self._word(votes)
        words = votes.planes.signs.shape[1]
        self._open(word, words, len(votes.workers))
        self.trust.admit(votes.workers, votes.device)
        weights = self.trust.weights(votes.workers, word, words)
        if votes.present is not None:
            slots = torch.where(votes.present, weights.slots, -1)
            weights = weights._replace(slots=slots)
        kernels = backend(votes.device)
        mismatches, cast = kernels.vote_by_coordinate_(
            out,
            votes.planes,
            weights,
            coin,
            votes.n,
        )
        return Evidence(
            workers=votes.workers,
            mismatches=mismatches[:, None],
            cast=cast[:, None],
            present=votes.present,
        )

    def _open(self, word: int, words: int, workers: int) -> None:
        """Raise if these words have been decided in this round: their counters would count it twice."""
        if workers > MOST:
            raise ConfigError(f"{workers} workers; a tally holds the votes of {MOST}")
        voted = self._voted[word : word + words]
        if voted.any():
            raise ConfigError(
                "these coordinates are decided in this round; call `learn` before the next vote"
            )
        voted[:] = True

    def learn(self, evidence: Evidence) -> None:
        """See Rule."""
        self._voted[:] = False
        super().learn(evidence)

    def weights(self, voters: Voters) -> Tensor:
        """The weight at every coordinate owned, (workers, coordinates) int32: to inspect, not to decide."""
        trust = self.trust
        trust.admit(voters.workers, trust.counters.device)
        return self._looked_up(voters.workers, 0, trust.n)

    def _looked_up(self, workers: Sequence[int], word: int, n: int) -> Tensor:
        """The weights at n coordinates owned, (workers, n) int32."""
        known = self.trust.weights(workers, word, words_for(n))
        bits = known.counters.view(torch.int16)[:, known.slots]
        rows = bits.transpose(0, 1).flatten(1)
        signed = rows[:, :n].int()
        counters = signed & 0xFFFF
        table = known.table_of[:, None]
        positive = known.sizes[:, None] + counters  # where +w stands
        return known.tables[table, positive]

    def tally(self, votes: Votes) -> Tensor:
        """See Rule. The same sum that the kernel computes."""
        self.trust.admit(votes.workers)
        weights = self._looked_up(votes.workers, self._word(votes), votes.n)
        y = unpack_signs(votes.planes, votes.n)
        tally: Tensor = (weights * y).sum(0, dtype=torch.int32)  # (paper, eq. 3)
        return tally

    def conclude(self, out: Planes, tally: Tally, voters: Voters, coin: Coin | None) -> Planes:
        """See Rule. Votes are compared with the decision, the coin's bits included."""
        super().conclude(out, tally, voters, coin)
        return Planes(out.signs, everywhere(self.layout.size) if out.support is None else out.support)

    def judge(self, judged: Planes, votes: Votes) -> Evidence:
        """See Rule. Updates the counters of these coordinates (paper, eq. 4)."""
        word = self._word(votes)
        self._open(word, words_for(votes.n), len(votes.workers))
        y = unpack_signs(votes.planes, votes.n)
        decision = unpack_signs(judged, votes.n)
        differs = y * decision < 0
        missing = (y == 0) != (decision == 0)
        added = 2 * differs + (2 if self.zero_is_symbol else 1) * missing
        padded = pad(added.to(torch.int16), (0, -votes.n % WORD))
        by_word = padded.view(len(padded), -1, WORD).transpose(0, 1)
        slots = torch.tensor([self.trust.slots[worker] for worker in votes.workers])
        self.trust.counters.view(torch.int16)[word : word + len(by_word), slots] += by_word
        return super().judge(judged, votes)

    def _word(self, votes: Votes) -> int:
        """The first word of the counters of these votes."""
        first = votes.first
        last = first + votes.n
        before = 0
        for start, stop in self.ranges:
            inside = start <= first and last <= stop
            if inside and first % WORD == 0:
                return before + (first - start) // WORD
            before += words_for(stop - start)
        raise ConfigError(
            f"votes on coordinates {first} to {last} lie in none of the ranges"
            f" {list(self.ranges)} that are counted here, or do not start a multiple of {WORD}"
        )

    def state_dict(self) -> State:
        """See Rule; the state holds the ranges owned, too."""
        ranges = [list(span) for span in self.ranges]
        return super().state_dict() | {"ranges": ranges}

    def load_state_dict(self, state: State, *parts: State) -> None:
        """See Rule. Each counter comes from the state whose ranges hold its coordinate."""
        is_mine = state.get("rule") == self.name
        states = (state, *parts) if is_mine else ()
        workers = len(state.get("workers", ()))
        counters, missing = self._gathered(states, workers)
        if is_mine and missing:
            raise StateError(
                f"{missing} words of the coordinates counted here are in no state given; load the states of all ranks"
            )
        super().load_state_dict(state | {"counters": counters})
        self._voted[:] = False

    def _gathered(self, states: Sequence[State], workers: int) -> tuple[Tensor, int]:
        """The counters of the words owned here, and how many of these words are in no state."""
        size = self.layout.size
        owned = _words(self.ranges)
        place = torch.full((words_for(size),), -1)
        place[owned] = torch.arange(len(owned))
        bits = torch.zeros(len(owned), workers, WORD, dtype=torch.int16)
        found = torch.zeros(len(owned), dtype=torch.bool)
        for state in states:
            at = place[_words(state["ranges"])]
            wanted = at >= 0
            rows = at[wanted]
            counters = state["counters"].view(torch.int16)
            bits[rows] = counters[wanted]
            found[rows] = True
        missing = int((~found).sum())
        return bits.view(torch.uint16), missing


def _is_whole_words(start: int, stop: int, size: int) -> bool:
    """Whether a range within (0, size), possibly empty, starts at a word and ends at one or at size."""
    inside = 0 <= start < stop <= size
    empty = start == stop
    starts_word = start % WORD == 0
    ends_word = stop % WORD == 0 or stop >= size
    return (inside or empty) and starts_word and ends_word


def _words(ranges: Ranges) -> Tensor:
    """The numbers of the words that ranges of coordinates fill."""
    spans = []
    for start, stop in ranges:
        first = start // WORD
        count = words_for(stop - start)
        spans.append(torch.arange(first, first + count))
    return torch.cat(spans)
