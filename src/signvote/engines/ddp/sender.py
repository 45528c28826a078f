"""From gradients to signs on their way: gradients are averaged, encoded and sent as they come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.corrections import claims, corrected, scales
from signvote.core.encoder import Encoded, Encoding, Memory, averaged, encode
from signvote.core.layout import Layout
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.gradients import Gradients
from signvote.engines.ddp.placement import Part, Placement, Span
from signvote.kernels import WORD, Coin, Planes, words_for


class Sender:
    """The gradients of a round, and what this rank remembers of earlier ones.

    Args:
        parameters: by name.
        placement: of the coordinates that this rank holds.
        exchange: sends the signs.
        encoding: how gradients become signs.
        dtype: of gradients and momentum.

    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        placement: Placement,
        exchange: Exchange,
        encoding: Encoding,
        dtype: torch.dtype,
    ) -> None:
        self.placement = placement
        self.exchange = exchange
        self.encoding = encoding
        self.gradients = Gradients(parameters, placement, exchange.shares, dtype)
        self.memory = self.no_memory()
        self.scale = 1.0  # of this round's gradients: AMP's
        self.momentum: float | Tensor = encoding.momentum  # of this round; a tensor: one for each coordinate
        self._coin: Coin | None = None
        self._spans: list[Span] = []  # that were encoded in this round
        self._encoded: list[Encoded] = []  # in this round, by chunk or all at once

    def begin(self, coin: Coin | None) -> None:
        """Wait for the gradients of a new round, whose zeros get this coin."""
        self._coin = coin
        self._spans = []
        self._encoded = []
        self._complete: set[int] = set()  # chunks that are not sent yet
        self._next = self.exchange.shares.chunks - 1
        self.gradients.begin()

    @property
    def is_finite(self) -> bool:
        """Whether all that was sent in this round was finite."""
        flags = [encoded.finite for encoded in self._encoded]
        on_device = [flag for flag in flags if isinstance(flag, Tensor)]
        if on_device:
            return bool(torch.stack(on_device).all())  # waits for the GPU once
        return all(flags)

    # ---- gradients come in -----------------------------------------------------------------------

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Take in gradients; encode and send the chunks that are complete."""
        self._write(self.gradients.take(parameters, gradients))

    def put_missing(self) -> None:
        """Count every missing gradient as zero."""
        self._write(self.gradients.take_missing())

    def _write(self, taken: list[tuple[Part, Tensor | None]]) -> None:
        """Write gradients into the vector, and send the chunks that they complete.

        On a CPU momentum averages them in the same pass, which saves a copy of all gradients. The last goes first, as
        chunks do: a chunk is encoded when it is complete, while the cache still has it.
        """
        if not self._averages_early:
            self.gradients.copy(taken)
            self._send(self.gradients.complete(taken))
            return
        for each in reversed(taken):
            self._average(*each)
            self._send(self.gradients.complete([each]))

    @property
    def _averages_early(self) -> bool:
        """Whether the vector gets averages, not gradients."""
        is_on_cpu = self.gradients.vector.device.type == "cpu"
        return is_on_cpu and self.memory.average is not None

    def _average(self, part: Part, gradient: Tensor | None) -> None:
        """Write the new average of one parameter's gradient."""
        assert self.memory.average is not None
        views = self.gradients.views
        place = views.of(self.gradients.vector)[part.name]
        before = views.of(self.memory.average)[part.name]
        if gradient is None:
            gradient = place.zero_()
        elif gradient.dtype != place.dtype or self.scale != 1.0:
            gradient = place.copy_(gradient).mul_(1 / self.scale)
        momentum = self.momentum
        if isinstance(momentum, Tensor):
            momentum = momentum[part.start : part.stop].view(place.shape)
        averaged(gradient, before, momentum, out=place)

    # ---- signs go out ----------------------------------------------------------------------------

    def _send(self, complete: list[int]) -> None:
        """Send complete chunks. Where a sign depends on all coordinates, send all chunks after the last gradient.

        The last chunk goes first, as in a backward pass. The order must be the same on every rank, and gradients do not
        arrive in the same order: a rank may not use a layer that another one uses.
        """
        if not self.encoding.needs_whole_vector:
            self._complete.update(complete)
            while self._next in self._complete:
                number = self._next
                self._next -= 1
                self.exchange.submit(partial(self._encode_and_send, range(number, number + 1)))
        elif complete and self.gradients.is_complete:
            self.exchange.submit(partial(self._encode_and_send, range(self.exchange.shares.chunks)))

    def _encode_and_send(self, numbers: range) -> None:
        """Encode consecutive chunks as one vector, and send each."""
        chunks = [self.exchange.shares.chunk(number) for number in numbers]
        start = chunks[0].start
        stop = chunks[-1].stop
        spans = list(self.placement.spans(start, stop))
        encoded = [self._encode(span) for span in spans]
        self._spans += spans
        self._encoded += encoded
        planes = _joined([each.planes for each in encoded])
        for number, chunk in zip(numbers, chunks, strict=True):
            first = (chunk.start - start) // WORD
            last = words_for(chunk.stop - start)
            words = slice(first, last)
            self.exchange.send(number, planes.map(lambda plane: plane[words]))  # noqa: B023

    def _encode(self, span: Span) -> Encoded:
        """Encode a span of the vector; the new average takes the place of the gradient."""
        at = slice(span.start, span.stop)
        gradient = self.gradients.vector[at]
        memory = self.memory.map(lambda kept: kept[at])
        momentum = self.momentum[at] if isinstance(self.momentum, Tensor) else self.momentum
        if self._averages_early:
            memory = memory._replace(average=None)
            momentum = 0.0
        elif self.scale != 1.0:
            gradient.mul_(1 / self.scale)
        coin = None if self._coin is None else self._coin.after(span.first)
        return encode(gradient, memory, self.encoding, coin, momentum=momentum, out=gradient)

    # ---- memory ----------------------------------------------------------------------------------

    def no_memory(self) -> Memory:
        """Memory of no gradient."""
        vector = self.gradients.vector
        average = torch.zeros_like(vector) if self.encoding.momentum else None
        residual = torch.zeros_like(vector) if self.encoding.feedback else None
        belief = torch.zeros_like(vector, dtype=torch.float32) if self.encoding.corrects else None
        return Memory(average, residual, belief)

    def keep_memory(self) -> None:
        """Keep what this round added. The new average is in the gradients' vector: swap the two."""
        average = self.memory.average
        if average is not None:
            self.gradients.vector, average = average, self.gradients.vector
        residual = self._encoded[0].memory.residual if self._encoded else None
        self.memory = Memory(average, residual, self.memory.belief)

    def claims(self, layout: Layout) -> Tensor:
        """What this rank claims in this round, (tensors,) int8 on the CPU; nothing unless votes are corrections."""
        if not self.encoding.corrects:
            return torch.zeros(0, dtype=torch.int8)
        return claims(self.gradients.vector, layout).cpu()

    def correct(self, exponents: Tensor | None, layout: Layout, *, is_counted: bool) -> None:
        """Follow what the server believes of this worker, after a decision on corrections."""
        belief = self.memory.belief
        assert belief is not None
        assert exponents is not None
        for span, encoded in zip(self._spans, self._encoded, strict=True):
            n = span.stop - span.start
            signs = unpack_signs(encoded.planes, n) if is_counted else None
            scale = scales(exponents.to(belief.device), layout, span.first, n)
            corrected(belief[span.start : span.stop], signs, scale)

    def load_memory(self, saved: Memory) -> None:
        """Copy what is saved into the memory."""
        for tensor, its_value in zip(self.memory, saved, strict=True):
            if tensor is not None and its_value is not None:
                tensor.copy_(its_value)


def _joined(parts: Sequence[Planes]) -> Planes:
    """Planes of consecutive words as one."""
    if len(parts) == 1:
        return parts[0]
    signs = torch.cat([planes.signs for planes in parts])
    supports = [planes.support for planes in parts if planes.support is not None]
    return Planes(signs, torch.cat(supports) if supports else None)
