"""The votes of one rank on the change over local steps; a decision has a scale for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from signvote.core.vote import Voters
from signvote.engines.ddp.poll import Poll
from signvote.engines.ddp.status import Status


class LocalPoll(Poll):
    """A poll of scaled votes: see Poll."""

    codes: Tensor | None = None  # of the scales of the last decision; None: nothing was decided

    def _voted(self, used: Sequence[bool]) -> Tensor | None:
        """The host waits for what the device knows: the scales follow from all evidence."""
        return None

    def _remember(self, workers: Sequence[Status], voting: Voters | None, voted: Tensor | None) -> None:
        """Settle the scales of the decision, and keep what this rank's votes left out."""
        self.codes = limits = None
        if voting is not None:
            self.server.settle()
            by_tensor = self.server.rule.scale(voting)
            assert by_tensor is not None
            self.codes, limits = by_tensor.chunk(2)
        if workers[self.team.voters.rank].votes:
            self.sender.keep_unsent(self.layout, limits)
