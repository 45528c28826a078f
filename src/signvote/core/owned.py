"""A number for each coordinate that a server decides; several servers may own a part of the coordinates each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from signvote.core.trust import State
from signvote.errors import ConfigError, StateError

if TYPE_CHECKING:
    from signvote.core.rule import Ranges


class Owned:
    """Numbers of some ranges of coordinates, float32, 0 at the start.

    Args:
        ranges: of coordinates, in order.
        name: of the entry in a state.

    """

    def __init__(self, ranges: Ranges, name: str) -> None:
        self.ranges = tuple(ranges)
        self.name = name
        self.values = torch.zeros(sum(stop - start for start, stop in ranges))

    def of(self, first: int, n: int, device: torch.device) -> Tensor:
        """The numbers of coordinates first to first + n, on this device: a view."""
        self.values = self.values.to(device)
        return self.values[self._at(first, n)]

    def _at(self, first: int, n: int) -> slice:
        before = 0
        for start, stop in self.ranges:
            if start <= first and first + n <= stop:
                begin = before + first - start
                return slice(begin, begin + n)
            before += stop - start
        raise ConfigError(f"votes on coordinates {first} to {first + n} lie in none of {list(self.ranges)}")

    def state_dict(self) -> State:
        """The ranges and their numbers."""
        ranges = [list(span) for span in self.ranges]
        return {"ranges": ranges, self.name: self.values.cpu().clone()}

    def load(self, size: int, *states: State) -> None:
        """Resume. Each coordinate comes from the state whose ranges hold it.

        Args:
            size: of the layout.
            states: of all that owned a part of the coordinates.

        """
        whole = torch.full((size,), torch.nan)
        for state in states:
            _write(whole, state["ranges"], state[self.name])
        mine = torch.cat([whole[start:stop] for start, stop in self.ranges])
        if mine.isnan().any():
            raise StateError("coordinates decided here are in no state given; load the states of all ranks")
        self.values = mine


def _write(whole: Tensor, ranges: Sequence[Sequence[int]], part: Tensor) -> None:
    """Copy the numbers of some ranges into the whole vector."""
    at = 0
    for start, stop in ranges:
        whole[start:stop] = part[at : at + stop - start]
        at += stop - start
