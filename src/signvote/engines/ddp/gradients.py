"""The gradients of a round in one flat vector, and the decision written back in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.engines.ddp.placement import Part, Placement
from signvote.engines.ddp.shares import Shares
from signvote.engines.ddp.torch_names import copy_all_, local_of
from signvote.kernels import Planes, backend

VECTORS = 2  # in use: this round's, and the momentum that it swaps with

Taken = list[tuple[Part, Tensor | None]]  # parts of the vector, and the gradient of each; None: zero


class InChunk(NamedTuple):
    """Some coordinates of a part, those that lie in one chunk."""

    chunk: int
    size: int


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
        held = [part for part in placement.parts if part.start < part.stop]
        self._parts = {id(parameters[part.name]): part for part in held}
        self._in_chunks = {part.name: _in_chunks(part, shares) for part in held}
        self._lengths = [0] * shares.chunks  # coordinates of parameters, by chunk
        for chunks in self._in_chunks.values():
            for chunk, size in chunks:
                self._lengths[chunk] += size
        self.begin()

    def begin(self) -> None:
        """Wait for the gradients of the next round."""
        self._missing = dict(self._parts)
        self._left = list(self._lengths)  # coordinates without a gradient, by chunk

    def take(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> Taken:
        """The places of these gradients in the vector.

        A parameter that is not trained, has no elements, or has its gradient already is left out.
        """
        parts = [self._missing.pop(id(parameter), None) for parameter in parameters]
        pairs = zip(parts, gradients, strict=True)
        return [(part, gradient) for part, gradient in pairs if part is not None]

    def take_all(self, gradients: list[Tensor | None]) -> Taken:
        """The same for the gradients of all parameters, in the order of the layout."""
        is_new = len(self._missing) == len(self._parts) == len(gradients)
        if not is_new:
            return self.take(self._parameters.values(), gradients)
        self._missing = {}
        return list(zip(self._parts.values(), gradients, strict=True))

    def take_missing(self) -> Taken:
        """The places of all gradients that are missing."""
        missing = [self._parameters[part.name] for part in self._missing.values()]
        return self.take(missing, [None] * len(missing))

    def copy(self, taken: Taken) -> None:
        """Copy gradients into the vector; None is zero."""
        views = self.views.of(self.vector)
        for part, gradient in taken:
            if gradient is None:
                views[part.name].zero_()
        places = [views[part.name] for part, gradient in taken if gradient is not None]
        given = [gradient for _, gradient in taken if gradient is not None]
        copy_all_(places, given)

    def complete(self, taken: Taken) -> list[int]:
        """The chunks that are complete now that these gradients are in the vector."""
        if len(taken) == len(self._parts):
            self._left = [0] * len(self._lengths)
            return list(range(len(self._lengths)))
        return sorted(number for part, _ in taken for number in self.completed(part))

    def completed(self, part: Part) -> list[int]:
        """The chunks that are complete now that one more part is in the vector."""
        complete = []
        for chunk, size in self._in_chunks[part.name]:
            self._left[chunk] -= size
            if self._left[chunk] == 0:
                complete.append(chunk)
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


def _in_chunks(part: Part, shares: Shares) -> list[InChunk]:
    """The chunks that a part lies in."""
    found = []
    for number in shares.touched(part.start, part.stop):
        chunk = shares.chunk(number)
        first = max(chunk.start, part.start)
        last = min(chunk.stop, part.stop)
        found.append(InChunk(number, last - first))
    return found
