"""Of many workers not all pairs are compared, but each worker with some witnesses, so that cost grows with M only."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from signvote.core.bits import check_number
from signvote.core.pairs import ENOUGH
from signvote.core.trust import numbered
from signvote.errors import ConfigError

Chosen = tuple[int, ...]
BITS = 64


def rows_of(workers: Sequence[int], witnesses: Sequence[int] | None) -> Tensor | None:
    """The row of each witness among the workers; None if all of them are."""
    if witnesses is None:
        return None
    rows = numbered(workers)
    return torch.tensor([rows[witness] for witness in witnesses], dtype=torch.int64)


class Witnesses:
    """The workers with whom all others are compared: those whose hash with a secret is smallest.

    So they stay the same as long as they vote, and the choice depends on nothing that a worker may influence but
    its number.

    Args:
        count: how many there are. Of fewer workers all are.
        secret: below 2^64. Who does not know it does not know the witnesses.

    >>> len(Witnesses(5, secret=7).of(range(1000))), Witnesses(5, secret=7).of(range(5))
    (5, None)

    """

    def __init__(self, count: int, secret: int) -> None:
        check_number("secret", secret)
        if count < ENOUGH:
            raise ConfigError(f"witnesses is {count}; it must be {ENOUGH} workers or more")
        self.count = count
        self._key = secret.to_bytes(BITS // 8, "little")
        self._last: tuple[Sequence[int], Chosen] = ((), ())

    def of(self, workers: Sequence[int]) -> Chosen | None:
        """The witnesses among these workers, in their order; None if all of them are."""
        if len(workers) <= self.count:
            return None
        if self._last[0] != workers:
            chosen = set(sorted(workers, key=self._hash)[: self.count])
            self._last = workers, tuple(worker for worker in workers if worker in chosen)
        return self._last[1]

    def _hash(self, worker: int) -> bytes:
        return blake2b(worker.to_bytes(BITS // 8, "little"), key=self._key, digest_size=BITS // 8).digest()
