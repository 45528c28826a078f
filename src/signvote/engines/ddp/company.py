"""The group of a worker and the way to the next one: views are agreed on, groups made, and members catch up."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping

from signvote.engines.ddp.catching_up import Story
from signvote.engines.ddp.members import Members, View
from signvote.engines.ddp.membership import Membership
from signvote.engines.ddp.view_group import Lost, ViewGroup
from signvote.errors import EngineError

log = logging.getLogger("signvote")

TRIES = 3  # to leave together with the others


class Company:
    """A worker among others that come and go.

    Args:
        settings: of the worker.
        facts: texts that all workers must share, by their names.

    """

    def __init__(self, settings: Members, facts: Mapping[str, str]) -> None:
        self.settings = settings
        self.membership = Membership(settings, facts)
        self.group: ViewGroup | None = None
        self.cause = ""  # why the last group ended
        self._told = View()  # the last view that was logged
        atexit.register(_end, weakref.ref(self))

    @property
    def has_joined(self) -> bool:
        """Whether this process was let in, rather than being there at the start."""
        return self.membership.has_joined

    def meet(self, story: Story, patience: float | None = None) -> bool:
        """Be in a group whose members are equal; whether it is a new one. An exchange that fails raises Lost."""
        if self.group is not None:
            return False
        if not self.membership.view.epoch:
            self.membership.enter()
        else:
            self.membership.regroup(patience)
        group = ViewGroup(self.membership)
        try:
            story.catch_up(group)
        except Lost:
            group.end()
            raise
        self.group = group
        self._tell(story.round)
        return True

    def lose(self, cause: str) -> None:
        """End the group: the others notice, and stop waiting for this worker in this view."""
        self.cause = cause
        if self.group is not None:
            self.group.end()
        self.group = None

    def leave(self, story: Story) -> None:
        """Wait until all members are here, at the end of the training, and listen no more."""
        try:
            for _ in range(TRIES):
                try:
                    self.meet(story, self.settings.timeout)
                    assert self.group is not None
                    story.wait_for_all(self.group)
                    break
                except Lost as error:
                    self.lose(str(error))
        except EngineError as error:
            log.warning(
                "signvote: worker %d left, and not all others with it: %s",
                self.membership.worker,
                error,
            )
        finally:
            self.lose("the end")
            self.membership.close()

    def _tell(self, round: int) -> None:
        """Log who is gone and who is back."""
        before, now = self._told.members, self.membership.view.members
        self._told = self.membership.view
        if not before:
            log.info("signvote: %d workers start", len(now))
            return
        cause = f" ({self.cause})" if self.cause else ""
        gone = [str(worker) for worker in before if worker not in now]
        if gone:
            names = ", ".join(gone)
            log.warning(
                "signvote: worker %s is gone%s; %d of %d continue after round %d",
                names, cause, len(set(now) & set(before)), len(before), round,
            )  # fmt: skip
        joined = [str(worker) for worker, person in now.items() if before.get(worker) != person]
        if joined:
            names = ", ".join(joined)
            log.warning("signvote: worker %s joined; %d continue after round %d", names, len(now), round)


def _end(made: weakref.ref[Company]) -> None:
    """Drop a group while Python can still serve its threads: see `process_group._end`."""
    company = made()
    if company is not None:
        company.lose("the end")
