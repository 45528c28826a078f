"""What the layers of one model share while all workers compute together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.sim.joint.parts import Parts


class NotTogetherError(Exception):
    """The joint pass cannot compute a model. The text says why."""


@dataclass
class Crew:
    """The workers of a pass: who owns which sample, and where the gradient of each goes."""

    parts: Parts
    gradients: Tensor  # (workers, N)
    layout: Layout
    parameters: Mapping[str, Tensor]  # by their names in the layout
    dtype: torch.dtype  # of activations
    triton: bool  # whether layers_cuda can be used
    shares_indices: bool = (
        False  # whether as many indices as samples are the same for every sample, as positions are
    )
    is_ambiguous: bool = False  # whether an embedding got as many indices as there are samples
    _rows: dict[int, Tensor] = field(default_factory=dict)  # by the identity of the parameter
    _taken: set[int] = field(default_factory=set)
    _more: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for segment in self.layout.segments:
            rows = self.gradients[:, segment.start : segment.stop]
            parameter = self.parameters[segment.name]
            self._rows[id(parameter)] = rows.view(len(rows), *segment.shape)

    def trains(self, parameter: object) -> bool:
        """Whether this is a parameter whose gradient is wanted."""
        return id(parameter) in self._rows

    def begin(self) -> None:
        """Begin a pass."""
        self._taken.clear()
        self._more.clear()

    def room(self, parameter: Tensor) -> Tensor:
        """Where a layer writes the gradients of its parameter by all workers, (workers, *shape), all of them.

        A parameter may have several layers, as a head that is tied to an embedding. `finish` adds what they write.
        """
        key = id(parameter)
        if key not in self._rows:  # frozen: nobody reads it
            return self.gradients.new_empty(len(self.gradients), *parameter.shape)
        rows = self._rows[key]
        if key not in self._taken:
            self._taken.add(key)
            return rows
        more = torch.empty_like(rows)
        self._more.append((rows, more))
        return more

    def finish(self) -> None:
        """Add the gradients of parameters with several layers."""
        for rows, more in self._more:
            rows += more
