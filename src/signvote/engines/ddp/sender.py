"""From gradients to signs on their way: gradients are averaged, encoded and sent as they come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.corrections import claims, corrected, own, scales
from signvote.core.encoding import Encoded, Encoding, Memory, averaged, encode
from signvote.core.layout import Layout
from signvote.core.scales import coded, mean_magnitudes, restored, spread, unsent, values
from signvote.engines.ddp.encoded import RoundEncoded, Turns, joined
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.gradients import Gradients, Taken
from signvote.engines.ddp.placement import Part, Placement, Span
from signvote.kernels import Coin, Planes


class Sender:
    """The gradients of a round, and what this rank remembers of earlier ones.

    Args:
        parameters: by name.
        placement: of the coordinates that this rank holds.
        exchange: sends the signs.
        encoding: how gradients become signs.
        dtype: of gradients and momentum.
        is_alone: whether this rank is all there is: then nothing is sent.

    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        placement: Placement,
        exchange: Exchange,
        encoding: Encoding,
        dtype: torch.dtype,
        *,
        is_alone: bool,
    ) -> None:
        self.placement = placement
        self._layout = Layout.of(parameters)
        self._is_alone = is_alone
        self.exchange = exchange
        self.encoding = encoding
        self.gradients = Gradients(parameters, placement, exchange.shares, dtype)
        self.memory = self.no_memory()
        self.scale: float | Tensor = 1.0  # of this round's gradients: AMP's
        self.momentum: float | Tensor = encoding.momentum  # of this round; a tensor: one for each coordinate
        self.top = encoding.top  # of this round
        self.codes: Tensor | None = None  # of the scales that were sent in this round
        self.begin(None)

    def begin(self, coin: Coin | None) -> None:
        """Wait for the gradients of a new round, whose zeros get this coin."""
        self.encoded = RoundEncoded(coin)
        self._turns = Turns(self.exchange.shares.chunks)
        self.gradients.begin()

    @property
    def finite(self) -> bool | Tensor:
        """Whether all signals of this round were finite; on a GPU it stays there."""
        return self.encoded.finite

    @property
    def planes(self) -> Planes:
        """All votes of this round, in the order of the coordinates."""
        return self.encoded.planes

    # ---- gradients come in -----------------------------------------------------------------------

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Take in gradients; encode and send the chunks that are complete."""
        self._write(self.gradients.take(parameters, gradients))

    def put_all(self, gradients: list[Tensor | None]) -> None:
        """Take in the gradients of all parameters, in the order of the layout."""
        self._write(self.gradients.take_all(gradients))

    def put_missing(self) -> None:
        """Count every missing gradient as zero."""
        self._write(self.gradients.take_missing())

    def _write(self, taken: Taken) -> None:
        """Write gradients into the vector, and send the chunks that they complete."""
        if self._averages_early:
            self._write_averages(taken)
            return
        self.gradients.copy(taken)
        self._send(self.gradients.complete(taken))

    @property
    def _averages_early(self) -> bool:
        """Whether the vector gets averages, not gradients: where they are all that a signal needs.

        On a CPU momentum averages gradients in the same pass that writes them, which saves a copy of all of them.
        """
        is_on_cpu = self.gradients.vector.device.type == "cpu"
        return is_on_cpu and self.encoding.sends_average and self.memory.average is not None

    def _write_averages(self, taken: Taken) -> None:
        """Write the new averages of gradients. The last goes first, as chunks do.

        A chunk is encoded when it is complete, while the cache still has it.
        """
        assert self.memory.average is not None
        views = self.gradients.views
        before = views.of(self.memory.average)
        after = views.of(self.gradients.vector)
        for part, gradient in reversed(taken):
            place = after[part.name]
            usable = self._as_averaged(gradient, place)
            averaged(usable, before[part.name], self._momentum_of(part, place), out=place)
            complete = self.gradients.completed(part)
            if complete:
                self._send(complete)

    def _as_averaged(self, gradient: Tensor | None, place: Tensor) -> Tensor:
        """A gradient as the average needs it: of its type, and without AMP's scale. One that is missing is zero."""
        if gradient is None:
            return place.zero_()
        if gradient.dtype != place.dtype or self._is_scaled:
            return place.copy_(gradient).mul_(1 / self.scale)
        return gradient

    def _momentum_of(self, part: Part, place: Tensor) -> float | Tensor:
        """The momentum of a part, in its shape if each coordinate has its own."""
        if isinstance(self.momentum, Tensor):
            return self.momentum[part.start : part.stop].view(place.shape)
        return self.momentum

    @property
    def _is_scaled(self) -> bool:
        """Whether gradients are to be divided. A scale on a GPU is not looked at, which would wait for it."""
        return isinstance(self.scale, Tensor) or self.scale != 1.0

    # ---- signs go out ----------------------------------------------------------------------------

    def _send(self, complete: list[int]) -> None:
        """Send complete chunks in turn. Where a sign depends on all coordinates, send all after the last gradient."""
        if not self.encoding.needs_whole_vector:
            for number in self._turns.ready(complete):
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
        self.encoded.add(spans, encoded)
        if not self._is_alone:
            self.exchange.send(numbers, joined([each.planes for each in encoded]))

    def _encode(self, span: Span) -> Encoded:
        """Encode a span of the vector; the new average takes the place of the gradient."""
        at = slice(span.start, span.stop)
        gradient = self.gradients.vector[at]
        memory = self.memory.map(lambda kept: kept[at])
        momentum = self.momentum[at] if isinstance(self.momentum, Tensor) else self.momentum
        if self._averages_early:
            memory = memory._replace(average=None)
            momentum = 0.0
        elif self._is_scaled:
            gradient.mul_(1 / self.scale)
        coin = self.encoded.coin and self.encoded.coin.after(span.first)
        encoded = encode(
            gradient,
            memory,
            self.encoding,
            coin,
            momentum=momentum,
            top=self.top,
            layout=self._layout,
            out=gradient,
        )
        if self.encoding.scales:
            gradient.copy_(encoded.signal)
        return encoded

    # ---- memory ----------------------------------------------------------------------------------

    def no_memory(self) -> Memory:
        """Memory of no gradient."""
        vector = self.gradients.vector
        average = torch.zeros_like(vector) if self.encoding.remembers else None
        keeps_residual = self.encoding.feedback or self.encoding.scales
        residual = torch.zeros_like(vector) if keeps_residual else None
        belief = torch.zeros_like(vector, dtype=torch.float32) if self.encoding.corrects else None
        return Memory(average, residual, belief)

    def keep_memory(self) -> None:
        """Keep what this round added. The new average is in the gradients' vector: swap the two."""
        average = self.memory.average
        if average is not None:
            self.gradients.vector, average = average, self.gradients.vector
        encoded = self.encoded.encoded
        residual = encoded[0].memory.residual if encoded else None
        self.memory = Memory(average, residual, self.memory.belief)

    def keep_memory_if(self, voted: Tensor) -> None:
        """Keep what this round added if this rank voted, which the device knows. The average stays in its place."""
        average, residual, belief = self.memory
        if average is not None:
            torch.where(voted, self.gradients.vector, average, out=average)
        if residual is not None:
            added = self.encoded.encoded[0].memory.residual
            assert added is not None
            residual = torch.where(voted, added, residual)
        self.memory = Memory(average, residual, belief)

    def claims(self, layout: Layout) -> Tensor:
        """What this rank claims in this round, (tensors,) int8; nothing unless votes carry claims."""
        if self.encoding.corrects:
            self.codes = claims(self.gradients.vector, layout)
            return self.codes
        if self.encoding.scales:
            self.codes = coded(mean_magnitudes(self.gradients.vector, layout)).cpu()
            return self.codes
        return torch.zeros(0, dtype=torch.int8)

    def keep_unsent(self, layout: Layout, limits: Tensor | None) -> None:
        """Keep what the scaled votes of this round left out, and what of them did not count.

        Args:
            layout: of the model.
            limits: the codes of the largest scales that counted; None: nothing was decided.

        """
        signal = self.gradients.vector
        assert self.codes is not None
        signs = unpack_signs(self.planes, layout.size)
        scale = spread(values(self.codes), layout, 0, layout.size)
        limit = None if limits is None else spread(values(limits), layout, 0, layout.size)
        residual = restored(unsent(signal, signs, scale), signs, scale, limit)
        self.memory = self.memory._replace(residual=residual)

    def correct(self, largest: Tensor | None, layout: Layout, counted: bool | Tensor) -> None:
        """Follow what the server believes of this worker, after a decision on corrections.

        Args:
            largest: exponents of the largest scales that count.
            layout: of the model.
            counted: whether this worker voted. A tensor is of a worker that is alone: nothing is decided without it.

        """
        belief = self.memory.belief
        assert belief is not None
        assert largest is not None
        assert self.codes is not None
        exponents = own(self.codes, largest.to(self.codes.device))
        for span, encoded in self.encoded.by_span():
            n = span.stop - span.start
            believed = belief[span.start : span.stop]
            before = believed.clone() if isinstance(counted, Tensor) else believed
            signs = None if counted is False else unpack_signs(encoded.planes, n)
            scale = scales(exponents.to(belief.device), layout, span.first, n)
            corrected(believed, signs, scale)
            if isinstance(counted, Tensor):
                torch.where(counted, believed, before, out=believed)

    def load_memory(self, saved: Memory) -> None:
        """Copy what is saved into the memory."""
        for tensor, its_value in zip(self.memory, saved, strict=True):
            if tensor is not None and its_value is not None:
                tensor.copy_(its_value)
