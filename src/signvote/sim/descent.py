"""Steps the parameters of a run, each by its own factors: x <- (1 - step s decay d) x - step s direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.groups import USUAL, Factors
from signvote.core.layout import Layout
from signvote.kernels import Planes, backend, upload


class Descent:
    """The parameters of a run as one vector, and the factors of each coordinate.

    Few launches, whatever the number of parameters: coordinates know their group, and groups their numbers.

    Args:
        x: the parameters.
        layout: where each lies.
        factors: of the parameters, by name.

    """

    def __init__(self, x: Tensor, layout: Layout, factors: Mapping[str, Factors]) -> None:
        self.x = x
        of_segments = [factors.get(segment.name, USUAL) for segment in layout.segments]
        self._groups = list(dict.fromkeys(of_segments))
        lengths = torch.tensor([segment.stop - segment.start for segment in layout.segments])
        groups = torch.tensor([self._groups.index(its) for its in of_segments], dtype=torch.int32)
        self._group_of = None  # group of each coordinate; None: all are of one
        if len(self._groups) > 1:
            self._group_of = groups.repeat_interleave(lengths).to(x.device)

    def decay_(self, step: float, decay: float, support: Tensor | None = None) -> None:
        """Take a step of weight decay.

        Args:
            step: of a parameter whose factor is 1.
            decay: likewise.
            support: of the decision, if it has one: where nothing at all is decided, nothing decays.

        """
        if not decay:
            return
        kept = self._by_coordinate([1 - step * its.step * (decay * its.decay) for its in self._groups])
        if support is not None:
            kept = torch.where(support.any(), kept, 1)
        self.x.mul_(kept)

    def step_(self, decision: Planes, step: float) -> None:
        """Step by a decision (paper, eq. 5)."""
        if self._steps_alike:
            its = self._groups[0]
            backend(self.x.device).step_(self.x, decision, 0, step * its.step)
        else:
            self.move_(unpack_signs(decision, self.x.numel()).to(self.x.dtype), step)

    def move_(self, direction: Tensor, step: float) -> None:
        """Step by a vector of floats."""
        if self._steps_alike:
            its = self._groups[0]
            self.x.sub_(direction, alpha=step * its.step)
        else:
            self.x.sub_(direction * self._by_coordinate([step * its.step for its in self._groups]))

    @property
    def _steps_alike(self) -> bool:
        return len({its.step for its in self._groups}) == 1

    def _by_coordinate(self, values: Sequence[float]) -> Tensor:
        """The value of each coordinate's group; one alone if there is one group."""
        if self._group_of is None:
            return self.x.new_full((), values[0])
        table = upload(torch.tensor(values, dtype=self.x.dtype), self.x.device)
        return table.index_select(0, self._group_of)
