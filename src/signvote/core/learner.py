"""What a server learns from rounds that are over, and what it reports about them.

The evidence of a round may still be on its way from a device when the round is closed. It is learned from when somebody
asks, at the latest before the next round.
"""

from __future__ import annotations

from dataclasses import replace

from signvote.core.recent import Recent
from signvote.core.report import Arriving, RoundReport
from signvote.core.rule import Rule
from signvote.core.trust import Evidence, State
from signvote.core.vote import Voters
from signvote.core.watch import Watch


class Learner:
    """Teaches a rule, and forgets workers that were not seen for long.

    Args:
        rule: learns whom to trust.
        min_voters: a round with fewer voters teaches nothing.
        remember: about how many workers trust is kept.

    """

    def __init__(self, rule: Rule, min_voters: int, remember: int) -> None:
        self.rule = rule
        self.min_voters = min_voters
        self.remember = remember
        self.report = RoundReport(round=0)  # of the last round that was learned from
        self.watch = Watch(remember)
        self._recent = Recent(remember)  # the workers with trust
        self._arriving: Arriving | None = None

    @property
    def wants_signs(self) -> bool:
        """Whether to show some of the votes of the next round."""
        return self.watch.wants_signs and not self.rule.has_claims

    def close(self, arriving: Arriving) -> None:
        """A round is over, and its evidence arrives."""
        self._arriving = arriving

    def settle(self) -> bool:
        """Learn from the round that is over. False: there is none, or it was learned from."""
        arriving = self._arriving
        if arriving is None:
            return False
        evidence = arriving.arrive()
        self._arriving = None
        notices = self._notices(arriving, evidence)  # before the rule forgets this round's weights
        self._learn(evidence)
        self.report = self._reported(arriving.report, evidence, notices)
        return True

    def _learn(self, evidence: Evidence) -> None:
        """Teach the rule; forget workers, if it knows too many."""
        self.rule.learn(evidence)
        if self.rule.trust is None:
            return
        gone = self._recent.see(evidence.workers)
        if gone:
            self.forget(*gone)

    def _reported(self, report: RoundReport, evidence: Evidence, notices: list[str]) -> RoundReport:
        """The report with what the evidence shows."""
        voters = evidence.workers
        cast = evidence.cast.sum(1)
        shares = evidence.mismatches.sum(1) / cast.clamp_min(1)
        abstained = {worker: why for worker, why in report.abstained.items() if worker not in voters}
        return replace(
            report,
            voters=voters,
            abstained=abstained,
            disagreement=dict(zip(voters, shares.tolist(), strict=True)),
            is_decided=len(voters) >= self.min_voters,
            notices=tuple(notices),
        )

    def _notices(self, arriving: Arriving, evidence: Evidence) -> list[str]:
        """What there is to notice about the workers of a round."""
        round = arriving.report.round
        workers = evidence.workers
        if len(workers) < self.min_voters:
            return self.watch.observe_undecided(round, self.min_voters)
        declared = tuple(arriving.batch_sizes.get(worker, 0) for worker in workers)
        voters = Voters(workers=workers, batch_sizes=declared)
        shares = self.rule.shares(workers)
        signs = None if arriving.signs is None else arriving.signs()
        return self.watch.observe(round, voters, evidence, shares, signs)

    def forget(self, *workers: int) -> None:
        """Drop everything about these workers."""
        self.rule.forget(*workers)
        self.watch.forget(*workers)
        self._recent.forget(*workers)

    def state_dict(self) -> State:
        """Everything needed to resume; the last round is to be settled before."""
        return {
            "seen": list(self._recent.workers),
            "watch": self.watch.state_dict(),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: State, *parts: State) -> None:
        """Resume from a state, or from those of several servers that owned a part of the coordinates each."""
        watch = Watch(self.remember)
        if "watch" in state:  # earlier versions kept none
            watch.load_state_dict(state["watch"])
        self.rule.load_state_dict(*(each["rule"] for each in (state, *parts)))
        known = [] if self.rule.trust is None else self.rule.trust.workers
        self._recent = Recent(self.remember, state.get("seen", known))
        self.watch = watch
        self._arriving = None
