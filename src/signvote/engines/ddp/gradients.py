"""The gradients of a round in one flat vector, and the decision written back in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.engines.ddp.placement import Part, Placement
from signvote.engines.ddp.shares import Shares
from signvote.engines.ddp.torch_names import copy_all_, local_of
from signvote.kernels import Planes, backend

VECTORS = 2  # in use: this round's, and the momentum that it swaps with


class Bucket(NamedTuple):
    """A bucket of DDP that waits for the decision."""

    buffer: Tensor
    parameters: list[Tensor]
    views: list[Tensor]  # of the buffer, shaped like the parameters
    future: torch.futures.Future[Tensor]


class Views:
    """The parts of a flat vector in the shapes of their parameters, made once for each vector in use.

    Args:
        placement: where each part lies.
        shapes: by name.

    """

    def __init__(self, placement: Placement, shapes: Mapping[str, torch.Size]) -> None:
        self._parts = placement.parts
        self._shapes = shapes
        self._known: dict[int, dict[str, Tensor]] = {}  # by the vector's address

    def of(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of this vector, by name."""
        address = vector.data_ptr()
        if address not in self._known:
            if len(self._known) == VECTORS:
                self._known.clear()
            self._known[address] = {
                part.name: vector[part.start : part.stop].view(self._shapes[part.name])
                for part in self._parts
            }
        return self._known[address]


class Gradients:
    """A flat vector of gradients, and the chunks of it that are complete.

    Args:
        parameters: the trained parameters, by name.
        placement: where each lies in the vector.
        shares: cuts the vector into chunks.
        dtype: of the vector.

    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        placement: Placement,
        shares: Shares,
        dtype: torch.dtype,
    ) -> None:
        device = next(iter(parameters.values())).device
        self.shares = shares
        self.vector = torch.zeros(placement.size, dtype=dtype, device=device)
        self.views = Views(placement, {name: local_of(each).shape for name, each in parameters.items()})
        self._parameters = parameters
        self._parts = {id(parameters[part.name]): part for part in placement.parts}
        self._lengths = _lengths(placement, shares)
        self._count = sum(part.start < part.stop for part in placement.parts)  # of parts with coordinates
        self.begin()

    def begin(self) -> None:
        """Wait for the gradients of the next round."""
        self._missing = dict(self._parts)
        self._left = list(self._lengths)  # coordinates without a gradient, by chunk

    def take(
        self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]
    ) -> list[tuple[Part, Tensor | None]]:
        """The places of these gradients in the vector.

        A parameter that is not trained, has no elements, or has its gradient already is left out.
        """
        parts = [self._missing.pop(id(parameter), None) for parameter in parameters]
        pairs = zip(parts, gradients, strict=True)
        return [(part, gradient) for part, gradient in pairs if part is not None and part.start < part.stop]

    def take_missing(self) -> list[tuple[Part, Tensor | None]]:
        """The places of all gradients that are missing."""
        missing = [self._parameters[part.name] for part in self._missing.values()]
        return self.take(missing, [None] * len(missing))

    def copy(self, taken: Sequence[tuple[Part, Tensor | None]]) -> None:
        """Copy gradients into the vector; None is zero."""
        views = self.views.of(self.vector)
        for part, gradient in taken:
            if gradient is None:
                views[part.name].zero_()
        places = [views[part.name] for part, gradient in taken if gradient is not None]
        given = [gradient for _, gradient in taken if gradient is not None]
        copy_all_(places, given)

    def complete(self, taken: Sequence[tuple[Part, Tensor | None]]) -> list[int]:
        """The chunks that are complete now that these gradients are in the vector."""
        if len(taken) == self._count:
            self._left = [0] * len(self._lengths)
            return list(range(len(self._lengths)))
        return sorted(number for part, _ in taken for number in self._completed(part))

    def _completed(self, part: Part) -> list[int]:
        """The chunks that a part completes."""
        complete = []
        for number in self.shares.touched(part.start, part.stop):
            chunk = self.shares.chunk(number)
            first = max(chunk.start, part.start)
            last = min(chunk.stop, part.stop)
            self._left[number] -= last - first
            if self._left[number] == 0:
                complete.append(number)
        return complete

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the round are in the vector."""
        return not any(self._left)

    def fill(
        self,
        parameters: Iterable[Tensor],
        gradients: Iterable[Tensor],
        decision: Planes,
        scale: float,
    ) -> None:
        """Write the decision, +1, -1 or 0 times a scale, in place of gradients."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            part = self._parts.get(id(parameter))
            if part is None:
                continue
            is_dense = gradient.is_contiguous()
            flat = gradient.zero_() if is_dense else gradient.new_zeros(gradient.shape)
            backend(flat.device).step_(flat.view(-1), decision, part.start, -scale)
            if not is_dense:
                gradient.copy_(flat)


def _lengths(placement: Placement, shares: Shares) -> Sequence[int]:
    """How many coordinates of parameters lie in each chunk."""
    lengths = [0] * shares.chunks
    for part in placement.parts:
        for number in shares.touched(part.start, part.stop):
            chunk = shares.chunk(number)
            lengths[number] += min(chunk.stop, part.stop) - max(chunk.start, part.start)
    return lengths
