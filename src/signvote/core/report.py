"""What a server says about a round: the ballots that it admitted, and the report when it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from signvote.core.ballot import REASONS, Ballot


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


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The ballots of a round, parsed: sorted by worker, so that the order of arrival changes nothing."""

    round: int
    ballots: tuple[Ballot, ...] = ()
    refused: tuple[Refusal, ...] = ()

    @property
    def voters(self) -> list[Ballot]:
        """The ballots that vote."""
        return [ballot for ballot in self.ballots if not ballot.reason]

    @property
    def abstained(self) -> dict[int, str]:
        """The workers that abstain, and why."""
        return {ballot.worker: REASONS[ballot.reason] for ballot in self.ballots if ballot.reason}
