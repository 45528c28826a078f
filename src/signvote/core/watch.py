"""Notices: what a person should know about the workers of a run. A notice is one sentence, and changes no vote.

    sizes        only some of the voters declare a batch size
    dominance    one worker had more weight than all others together, for 50 rounds in a row
    overruled    a worker was never overruled, or in half of its votes, over 50 rounds in which it voted
    undecided    too few workers voted, so no parameter moved
    unlike       the workers differed in the same way for 100 rounds (see likeness.py)

Core writes no log: `RoundReport.notices` has the notices of a round, and the engines log them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from signvote.core.likeness import EVERY, LOOKS, Likeness, Signs
from signvote.core.trust import FEW, Evidence, State, numbered_once
from signvote.core.vote import Voters
from signvote.errors import StateError

LONG = 50  # rounds
MOST = 100  # notices of a run
UNLIKE = (
    f"workers differed in the same way for {EVERY * LOOKS} rounds, so each may have its own kind of data;"
    " if nobody attacks, try the rule 'mean'"
)
NAMED = 5  # workers that one notice names

Counts = tuple[int, int, int]  # rounds, votes overruled, votes cast
NO_COUNTS: Counts = (0, 0, 0)


class Watch:
    """Looks at every round, and says each thing once.

    The votes of a worker are looked at in blocks of 50 rounds, those in which it voted, at least three workers did, and
    there was a decision.

    Args:
        remember: about how many workers are counted; those not seen for longest are dropped first.

    """

    def __init__(self, remember: int) -> None:
        self.remember = remember
        self.notices: list[str] = []  # since the start
        self.undecided = 0  # rounds that moved nothing
        self._told: set[tuple[str, int]] = set()  # what, and about which worker
        self._strongest = 0  # the last worker with more weight than all others
        self._streak = 0  # its rounds in a row
        self._counts: dict[int, Counts] = {}  # since the last look; workers seen last at the end
        self._likeness = Likeness()

    @property
    def wants_signs(self) -> bool:
        """Whether some of the votes of the next round are to be shown to `observe`."""
        return self._likeness.wants_signs

    def observe(
        self,
        round: int,
        voters: Voters,
        evidence: Evidence,
        shares: Tensor | None,
        signs: Signs | None = None,
    ) -> list[str]:
        """Look at a decided round; the new notices.

        Args:
            round: its number.
            voters: those who voted.
            evidence: about the same workers, in the same order.
            shares: of each voter in all weight; None if the rule has no weight per worker.
            signs: some of the votes, if they are wanted.

        """
        known = len(self.notices)
        self._look_at_sizes(round, voters)
        if shares is not None:
            self._look_at_weights(round, voters.workers, shares.tolist())
        if len(voters.workers) >= FEW:
            self._look_at_votes(round, evidence)
        if self._likeness.observe(signs):
            self._tell(round, "unlike", 0, UNLIKE)
        return self.notices[known:]

    def observe_undecided(self, round: int, min_voters: int) -> list[str]:
        """Count a round that moved nothing, because fewer than `min_voters` voted; the new notices."""
        known = len(self.notices)
        self.undecided += 1
        self._tell(round, "undecided", 0, f"fewer than {min_voters} voted, so no parameter moved")
        return self.notices[known:]

    def _look_at_sizes(self, round: int, voters: Voters) -> None:
        pairs = zip(voters.workers, voters.batch_sizes, strict=True)
        silent = [worker for worker, size in pairs if not size]
        if not silent or len(silent) == len(voters.workers):
            return
        others = len(voters.workers) - len(silent)
        plural = "s" if others > 1 else ""
        text = f"{_named(silent)} declared no batch size, but {others} other{plural} did"
        self._tell(round, "sizes", 0, text)

    def _look_at_weights(self, round: int, workers: Sequence[int], shares: Sequence[float]) -> None:
        largest = max(shares)
        if len(workers) < 2 or largest <= 0.5:
            self._streak = 0
            return
        worker = workers[shares.index(largest)]
        self._streak = self._streak + 1 if worker == self._strongest else 1
        self._strongest = worker
        if self._streak >= LONG:
            text = f"worker {worker} has had more weight than all others together for {LONG} rounds"
            self._tell(round, "dominance", worker, text)

    def _look_at_votes(self, round: int, evidence: Evidence) -> None:
        overruled = evidence.mismatches.sum(1).tolist()
        cast = evidence.cast.sum(1).tolist()
        for worker, wrong, of in zip(evidence.workers, overruled, cast, strict=True):
            if of:
                self._count(round, worker, wrong, of)
        too_many = len(self._counts) - max(self.remember, len(evidence.workers))
        for worker in list(islice(self._counts, max(0, too_many))):
            del self._counts[worker]

    def _count(self, round: int, worker: int, overruled: int, cast: int) -> None:
        """Add one round of a worker, and look at every 50 of them."""
        rounds, overruled_before, cast_before = self._counts.pop(worker, NO_COUNTS)
        rounds += 1
        overruled += overruled_before
        cast += cast_before
        self._counts[worker] = (rounds, overruled, cast)
        if rounds < LONG:
            return
        self._counts[worker] = NO_COUNTS
        if overruled == 0:
            text = f"worker {worker} was never overruled in {LONG} rounds"
            self._tell(round, "never overruled", worker, text)
        elif 2 * overruled >= cast:
            text = f"worker {worker} was overruled in {100 * overruled / cast:.0f} % of its votes of {LONG} rounds"
            self._tell(round, "overruled", worker, text)

    def _tell(self, round: int, what: str, worker: int, text: str) -> None:
        """Add a notice, unless it was given before or there are too many."""
        if (what, worker) in self._told or len(self.notices) == MOST:
            return
        self._told.add((what, worker))
        if len(self.notices) == MOST - 1:
            text += f"; this is notice {MOST}, and the last one"
        self.notices.append(f"round {round}: {text}")

    def forget(self, *workers: int) -> None:
        """Drop the counts of workers that left for good."""
        for worker in workers:
            self._counts.pop(worker, None)
        self._likeness.forget(*workers)

    def state_dict(self) -> State:
        """Everything needed to resume, so that no notice is lost or given twice."""
        return {
            "notices": list(self.notices),
            "undecided": self.undecided,
            "told": [list(each) for each in sorted(self._told)],
            "strongest": self._strongest,
            "streak": self._streak,
            "workers": list(self._counts),
            "counts": [list(counts) for counts in self._counts.values()],
            "likeness": self._likeness.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state. Raises a StateError, and changes nothing, if its counts are impossible."""
        workers = numbered_once(state["workers"])
        counts: dict[int, Counts] = {}
        for worker, (rounds, overruled, cast) in zip(workers, state["counts"], strict=True):
            counts[worker] = (rounds, overruled, cast)
        likeness = Likeness()
        if "likeness" in state:  # earlier versions kept none
            likeness.load_state_dict(state["likeness"])
        told = {(what, worker) for what, worker in state["told"]}
        for rounds, overruled, cast in counts.values():
            if not 0 <= overruled <= cast or not 0 <= rounds < LONG:
                raise StateError("the state's counts of overruled votes are impossible")
        self.notices = list(state["notices"])
        self.undecided = state["undecided"]
        self._told = told
        self._strongest = state["strongest"]
        self._streak = state["streak"]
        self._counts = counts
        self._likeness = likeness


def _named(workers: Sequence[int]) -> str:
    """Some workers in words.

    >>> _named([3]), _named([3, 5]), _named(range(8))
    ('worker 3', 'workers 3, 5', 'workers 0, 1, 2, 3, 4 and 3 more')
    """
    names = ", ".join(str(worker) for worker in workers[:NAMED])
    noun = "workers" if len(workers) > 1 else "worker"
    more = len(workers) - NAMED
    text = f"{noun} {names}"
    return text if more <= 0 else f"{text} and {more} more"
