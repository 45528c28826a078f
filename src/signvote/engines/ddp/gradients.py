"""The gradients of a round in one flat vector, and the decision written back in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.engines.ddp.shares import Shares
from signvote.kernels import Planes, backend


class Bucket(NamedTuple):
    """A bucket of DDP that waits for the decision."""

    buffer: Tensor
    parameters: list[Tensor]
    views: list[Tensor]  # of the buffer, shaped like the parameters
    future: torch.futures.Future[Tensor]


class Gradients:
    """A flat vector of gradients, and the chunks of it that are complete.

    Args:
        parameters: the trained parameters, by name.
        layout: of these parameters.
        shares: cuts the vector into chunks.

    """

    def __init__(self, parameters: Mapping[str, Tensor], layout: Layout, shares: Shares) -> None:
        tensors = list(parameters.values())
        dtypes = [p.dtype for p in tensors]
        dtype = reduce(torch.promote_types, dtypes)
        self.shares = shares
        self.vector = torch.zeros(layout.size, dtype=dtype, device=tensors[0].device)
        self._parameters = parameters
        self._segments = {id(parameters[s.name]): s for s in layout.segments}
        self.begin()

    def begin(self) -> None:
        """Wait for the gradients of the next round."""
        chunks = [self.shares.chunk(number) for number in range(self.shares.chunks)]
        self._missing = dict(self._segments)
        self._left = [
            chunk.stop - chunk.start for chunk in chunks
        ]  # coordinates without a gradient, by chunk

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> list[int]:
        """Copy gradients into the vector; None is zero. Returns the chunks that are complete now.

        A parameter that is not trained, or that has its gradient already, is skipped.
        """
        complete: list[int] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            segment = self._missing.pop(id(parameter), None)
            if segment is None or segment.start == segment.stop:
                continue
            flat = self.vector[segment.start : segment.stop]
            if gradient is None:
                flat.zero_()
            else:
                flat.view(segment.shape).copy_(gradient)
            complete += self._completed(segment.start, segment.stop)
        return sorted(complete)

    def put_missing(self) -> list[int]:
        """Count every missing gradient as zero."""
        names = [segment.name for segment in self._missing.values()]
        missing = [self._parameters[name] for name in names]
        return self.put(missing, [None] * len(missing))

    def _completed(self, start: int, stop: int) -> list[int]:
        """The chunks that coordinates start to stop complete."""
        complete = []
        for number in self.shares.touched(start, stop):
            chunk = self.shares.chunk(number)
            first = max(chunk.start, start)
            last = min(chunk.stop, stop)
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
            segment = self._segments.get(id(parameter))
            if segment is None:
                continue
            is_dense = gradient.is_contiguous()
            flat = gradient.zero_() if is_dense else gradient.new_zeros(segment.shape)
            backend(flat.device).step_(flat.view(-1), decision, segment.start, -scale)
            if not is_dense:
                gradient.copy_(flat)
