"""What a rank has encoded in a round, and the order in which chunks of it travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from signvote.core.encoding import Encoded
from signvote.engines.ddp.placement import Span
from signvote.kernels import Coin, Planes


class RoundEncoded:
    """The votes of one round so far, by chunk or all at once.

    Args:
        coin: what its zeros get.

    """

    def __init__(self, coin: Coin | None) -> None:
        self.coin = coin
        self.spans: list[Span] = []
        self.encoded: list[Encoded] = []

    def add(self, spans: Sequence[Span], encoded: Sequence[Encoded]) -> None:
        """Note the votes on some spans."""
        self.spans += spans
        self.encoded += encoded

    def by_span(self) -> Iterator[tuple[Span, Encoded]]:
        """Each span, and what it was encoded as."""
        return zip(self.spans, self.encoded, strict=True)

    @property
    def finite(self) -> bool | Tensor:
        """Whether all signals were finite; on a GPU it stays there."""
        flags = [encoded.finite for encoded in self.encoded]
        on_device = [flag for flag in flags if isinstance(flag, Tensor)]
        if not on_device:
            return all(flags)
        if len(on_device) == 1:
            return on_device[0]
        return torch.stack(on_device).all()

    @property
    def planes(self) -> Planes:
        """All votes, in the order of the coordinates."""
        ordered = sorted(self.by_span(), key=lambda pair: pair[0].start)
        return joined([encoded.planes for _, encoded in ordered])


class Turns:
    """Chunks in the order in which they travel: the last goes first, as in a backward pass.

    The order must be the same on every rank, and gradients do not arrive in the same order: a rank may not use a layer
    that another one uses.

    Args:
        chunks: how many there are.

    >>> turns = Turns(3)
    >>> list(turns.ready([1])), list(turns.ready([2])), list(turns.ready([0]))
    ([], [2, 1], [0])

    """

    def __init__(self, chunks: int) -> None:
        self._waiting: set[int] = set()  # complete, and not sent yet
        self._next = chunks - 1

    def ready(self, complete: Iterable[int]) -> Iterator[int]:
        """The chunks whose turn it is, now that these are complete."""
        self._waiting.update(complete)
        while self._next in self._waiting:
            self._next -= 1
            yield self._next + 1


def joined(parts: Sequence[Planes]) -> Planes:
    """Planes of consecutive words as one."""
    if len(parts) == 1:
        return parts[0]
    signs = torch.cat([planes.signs for planes in parts])
    supports = [planes.support for planes in parts if planes.support is not None]
    return Planes(signs, torch.cat(supports) if supports else None)
