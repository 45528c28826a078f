"""The coordinates that this rank holds, and their places in its flat vector.

    coordinates of the model    0 ....... A ....... 500 ....... B ....... 900
    held by this rank                 [ 250 .. 500 )   [ 700 .. 900 )
    its flat vector             [ 58 .. 308 )          [ 380 .. 580 )         58 = 250 mod 64, 380 = 700 mod 64

A rank without shards holds everything, and both are the same. With shards, each run of consecutive coordinates starts
in a word of its own, at the bit that it has in the model. So words of votes hold the same bits on every rank, and a
coin, a sample or a tensor's range means the same coordinates as without shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from signvote.core.layout import Layout
from signvote.engines.ddp.shares import Shares
from signvote.kernels import WORD


class Held(NamedTuple):
    """The part of a parameter that a rank holds: coordinates `start` to `stop`, in row-major order."""

    start: int
    stop: int


class Part(NamedTuple):
    """The part of one parameter that this rank holds."""

    name: str
    first: int  # its first coordinate in the model
    start: int  # in the flat vector; equal to `first` modulo 64
    stop: int


class Span(NamedTuple):
    """Consecutive coordinates in the flat vector and in the model."""

    start: int  # in the flat vector
    stop: int
    first: int  # the coordinate of the model at `start`
    hole: int = 0  # coordinates at the start that belong to nobody


@dataclass(frozen=True)
class Placement:
    """Where the parts of the parameters lie.

    >>> layout = Layout([("a", (10, 50)), ("b", (8, 50))])
    >>> Placement.of(layout, {"a": Held(250, 500), "b": Held(200, 400)}).runs
    (Span(start=58, stop=308, first=250, hole=0), Span(start=380, stop=580, first=700, hole=0))
    >>> Placement.of(layout).runs
    (Span(start=0, stop=900, first=0, hole=0),)
    """

    parts: tuple[Part, ...]
    runs: tuple[Span, ...]
    size: int  # of the flat vector

    @classmethod
    def of(cls, layout: Layout, held: Mapping[str, Held] | None = None) -> Placement:
        """Place the parts that a rank holds; None: all of every parameter."""
        parts: list[Part] = []
        runs: list[Span] = []
        for segment in layout.segments:
            part = Held(0, segment.stop - segment.start)
            if held is not None:
                part = held[segment.name]
            first = segment.start + part.start
            length = part.stop - part.start
            start = _next_start(runs, first) if length else _end(runs)
            stop = start + length
            parts.append(Part(segment.name, first, start, stop))
            if start < stop:
                _extend(runs, Span(start, stop, first))
        size = runs[-1].stop if runs else WORD
        return cls(tuple(parts), tuple(runs), size)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The runs within a range of whole words. Each starts at a word: with a hole, if its run starts inside one."""
        for run in self.runs:
            begin = max(start, run.start // WORD * WORD)
            end = min(stop, run.stop)
            if begin < end:
                first = run.first - run.start + begin
                yield Span(begin, end, first, hole=max(0, run.start - begin))

    def decided_by(self, shares: Shares, rank: int) -> list[tuple[int, int]]:
        """The ranges of the model's coordinates that a rank decides; at least one, which may be empty."""
        ranges = []
        for start, stop in shares.owned(rank):
            for span in self.spans(start, stop):
                length = span.stop - span.start
                ranges.append((span.first, span.first + length))
        return ranges or [(0, 0)]


def _next_start(runs: list[Span], first: int) -> int:
    """Where a part that begins at coordinate `first` goes."""
    if not runs:
        return first % WORD
    last = runs[-1]
    if last.first + last.stop - last.start == first:
        return last.stop
    next_word = -(-last.stop // WORD) * WORD
    return next_word + first % WORD


def _end(runs: list[Span]) -> int:
    """The end of the vector so far, where a part without coordinates goes."""
    return runs[-1].stop if runs else 0


def _extend(runs: list[Span], span: Span) -> None:
    """Add a span: to the last run if it continues it."""
    if not runs:
        runs.append(span)
        return
    last = runs[-1]
    expected = last.first + span.start - last.start  # the coordinate that continues it here
    if last.stop == span.start and span.first == expected:
        runs[-1] = last._replace(stop=span.stop)
    else:
        runs.append(span)
