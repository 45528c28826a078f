"""Which workers to forget: those not seen for longest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

SLACK = 10  # a tenth of the limit may be too many: forgetting many at once takes less time


class Recent:
    """Workers in the order in which they were seen last.

    Args:
        limit: about how many are known; those of the last call of `see` always are.

    >>> recent = Recent(3)
    >>> recent.see([1, 2]), recent.see([3, 1]), recent.see([4])
    ([], [], [2])

    """

    def __init__(self, limit: int, workers: Iterable[int] = ()) -> None:
        self.limit = limit
        self.workers = dict.fromkeys(workers)

    def see(self, workers: Iterable[int]) -> list[int]:
        """These workers are here. Returns those to forget."""
        seen = dict.fromkeys(workers)
        for worker in seen:
            self.workers.pop(worker, None)
        self.workers |= seen
        limit = max(self.limit, len(seen))
        too_many = len(self.workers) - limit
        return list(islice(self.workers, too_many)) if too_many > limit // SLACK else []

    def forget(self, *workers: int) -> None:
        """Drop these workers."""
        for worker in workers:
            self.workers.pop(worker, None)
