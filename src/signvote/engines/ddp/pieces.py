"""The pieces of the vector that this rank decides, as votes on consecutive coordinates of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from signvote.core.vote import everywhere
from signvote.engines.ddp.exchange import Exchange
from signvote.engines.ddp.placement import Placement, Span
from signvote.kernels import WORD, Planes, words_for


class Piece(NamedTuple):
    """Votes on consecutive coordinates of the model, and the place for their decision."""

    decision: Planes  # to be written
    votes: Planes  # (voters, words)
    first: int  # coordinate of the model
    n: int


def pieces(placement: Placement, exchange: Exchange, voters: list[int]) -> Iterator[Piece]:
    """All pieces of this rank; at least one, which may be empty.

    Args:
        placement: of this rank's coordinates.
        exchange: has the votes, and the buffers for decisions.
        voters: the ranks that vote, sorted by worker.

    """
    is_empty = True
    for number in range(exchange.shares.chunks):
        start, n = exchange.shares.piece(number, exchange.group.rank)
        whole = Piece(exchange.decided(number, n), exchange.received(number, voters, n), start, n)
        for span in placement.spans(start, start + n):
            for part in _without_hole(span):
                is_empty = False
                yield _cut(whole, part)
    if is_empty:
        yield _cut(whole, Span(start, start, first=0))


def _without_hole(span: Span) -> Iterator[Span]:
    """The span in two: the word with the hole, and the rest."""
    end = span.start + WORD
    if not span.hole or span.stop <= end:
        yield span
        return
    yield span._replace(stop=end)
    yield Span(end, span.stop, span.first + WORD)


def _cut(whole: Piece, span: Span) -> Piece:
    """A span of a piece. `whole.first` is its place in the vector."""
    first = (span.start - whole.first) // WORD
    last = words_for(span.stop - whole.first)
    n = span.stop - span.start
    votes = whole.votes.map(lambda plane: plane[:, first:last].contiguous())
    if span.hole:
        votes = _beyond(votes, span.hole, n)
    return Piece(whole.decision.map(lambda plane: plane[first:last]), votes, span.first, n)


def _beyond(votes: Planes, hole: int, n: int) -> Planes:
    """Votes on one word, without those on its first coordinates."""
    device = votes.signs.device
    held = everywhere(n, device) & ~everywhere(hole, device)
    support = held.expand_as(votes.signs) if votes.support is None else votes.support & held
    return Planes(votes.signs, support.contiguous())
