"""What a server says about a round, and the ballots that it refused since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from signvote.core.likeness import Signs
    from signvote.core.trust import Evidence

LISTED = 10_000  # workers and reasons of refused ballots, about
OTHERS = -1


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A ballot that was not counted."""

    worker: int  # as the transport knows it
    reason: str  # one word
    message: str


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What happened in one round."""

    round: int
    voters: tuple[int, ...] = ()
    abstained: dict[int, str] = field(default_factory=dict)  # worker -> why
    refused: tuple[Refusal, ...] = ()
    disagreement: dict[int, float] = field(default_factory=dict)  # voter -> share of votes overruled
    is_decided: bool = True  # False: too few voted, so nothing moves and nothing is learned
    notices: tuple[str, ...] = ()  # what `Watch` noticed in this round, a sentence each


class Refusals(Counter[tuple[int, str]]):
    """How many ballots were refused, by (worker, reason). The workers that were refused last are listed; worker
    `OTHERS` has the sum of all others, so that the sum of all counts is the number of refused ballots.
    """

    def count(self, refusals: Iterable[Refusal]) -> None:
        """Count some more."""
        for refusal in refusals:
            key = (refusal.worker, refusal.reason)
            self[key] = self.pop(key, 0) + 1  # those refused last stand at the end
        too_many = len(self) - LISTED
        if too_many <= 0:
            return
        for worker, reason in list(self)[: too_many + LISTED // 10]:
            number = self.pop((worker, reason))
            self[OTHERS, reason] = self.pop((OTHERS, reason), 0) + number


class Arriving(NamedTuple):
    """A round whose evidence is still to be learned from."""

    report: RoundReport
    arrive: Callable[[], Evidence]
    batch_sizes: Mapping[int, int]  # worker -> declared
    signs: Callable[[], Signs] | None = None  # some of the votes, if the watch wants them
