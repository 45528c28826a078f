"""Exact tallies as bit planes, which add: T[n] = sum_m w_m Y[m,n] (paper, eq. 3).

A tally keeps the binary digits of

    P[n] = sum_m |w_m| (1 + sign(w_m) Y[m,n])         0 <= P <= 2 b,   b = sum_m |w_m|,   T = P - b

in planes, one for each digit, one bit a coordinate. Digits that no sum can have are not kept: M dense votes of one
weight need the bits of M, 4 for 15 workers and 10 for 1,000. Which digits there are follows from the weights, so
equal sums have equal planes, whatever the order of the ballots and however partial tallies were merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.bits import Bytes, bytes_for, plane_from_bytes
from signvote.core.layout import Layout
from signvote.core.wire import Form, Topic, seal, unseal
from signvote.errors import BallotError, ConfigError
from signvote.kernels import Planes

Term = tuple[int, Bytes]  # a digit, and a plane to add there
Terms = Callable[
    [slice, Bytes], Iterable[Term]
]  # those of some bytes; the second plane has 1 where they count

BLOCK = 2**15  # bytes of a plane that are added at a time: some dozens of them stay in a core's cache
MOST = 2**40  # the largest sum of weights
ALL = np.uint8(255)


class Tally:
    """A weighted sum of ballots: exact, and in as few bits a coordinate as the sum can need.

    Args:
        layout: of the model.
        run: the run's number.
        round: whose ballots are added.
        groups: 1: a ballot has one weight. More: one for each tensor of the layout.

    >>> layout = Layout([("w", (3,))])
    >>> tally = Tally(layout, run=0, round=1)
    >>> tally.add(Ballot.cast(layout, Planes(torch.tensor([0b011]), None), worker=1, round=1, run=0), 2)
    >>> tally.add(Ballot.cast(layout, Planes(torch.tensor([0b110]), None), worker=2, round=1, run=0), -2)
    >>> tally.values(0, 3).tolist()
    [4, 0, -4]

    """

    def __init__(self, layout: Layout, *, run: int, round: int, groups: int = 1) -> None:
        self.topic = Topic(layout, run, round)
        self.spans = [(0, layout.size)]  # of coordinates with a common weight
        if groups > 1:
            self.spans = [(segment.start, segment.stop) for segment in layout.segments]
        self.bounds = [0] * len(self.spans)  # b of each group
        self.low = 0  # the lowest digit that is kept
        self.planes: list[Bytes] = []  # of digits low, low + 1, ...

    # ---- adding ----------------------------------------------------------------------------------

    def add(self, ballot: Ballot, weight: int) -> None:
        """Add a ballot with the same weight for all coordinates."""
        self.add_all([ballot], torch.full((1, len(self.spans)), weight))

    def add_all(self, ballots: Sequence[Ballot], weights: Tensor) -> None:
        """Add several ballots, which is faster than one by one.

        Args:
            ballots: of this layout.
            weights: integers, (ballots, groups).

        """
        sizes = weights.long().abs()
        rows = zip(ballots, sizes.tolist(), strict=True)
        lowest = [_lowest_digit(ballot, row) for ballot, row in rows if any(row)]
        self._make_room(sizes.sum(0).tolist(), lowest)
        for span, column in zip(self.spans, weights.T.tolist(), strict=True):

            def terms(at: slice, live: Bytes) -> Iterator[Term]:
                for ballot, weight in zip(ballots, column, strict=True):  # noqa: B023
                    yield from _terms(ballot, weight, at, live)

            self._gather(span, terms)

    def merge(self, other: Tally) -> None:
        """Add the sum of other ballots."""
        if (self.topic, self.spans) != (other.topic, other.spans):
            raise ConfigError("tallies of different layouts, runs, rounds or groups cannot be merged")
        self._make_room(other.bounds, [other.low] if other.planes else [])

        def terms(at: slice, live: Bytes) -> Iterator[Term]:
            for k, plane in enumerate(other.planes, other.low):
                yield k, plane[at]

        self._gather((0, self.topic.layout.size), terms)

    def add_values(self, values: Tensor, bound: int) -> None:
        """Add integers, one for each coordinate, none larger than `bound`."""
        self._make_room([bound] * len(self.spans), [0])
        digits = (values.long() + bound).numpy()

        def terms(at: slice, live: Bytes) -> Iterator[Term]:
            some = digits[8 * at.start : 8 * at.stop]
            for k in range((2 * bound).bit_length()):
                yield k, np.packbits(some >> k & 1, bitorder="little")

        self._gather((0, self.topic.layout.size), terms)

    def _make_room(self, more: Sequence[int], lowest: Sequence[int]) -> None:
        """Add to the bounds, and add the digits that sums may now have."""
        if not lowest:
            return
        bounds = [bound + extra for bound, extra in zip(self.bounds, more, strict=True)]
        if max(bounds) > MOST:
            raise ConfigError(f"the weights sum up to {max(bounds)}; a tally holds {MOST}")
        self.bounds = bounds
        low = min(lowest)
        if not self.planes:
            self.low = low
        below = [self._zeros() for _ in range(low, self.low)]
        self.low = min(low, self.low)
        self.planes = below + self.planes
        while len(self.planes) < self._digits:
            self.planes.append(self._zeros())

    @property
    def _digits(self) -> int:
        """How many digits sums may have."""
        return (2 * max(self.bounds) >> self.low).bit_length()

    def _zeros(self) -> Bytes:
        return np.zeros(bytes_for(self.topic.layout.size), np.uint8)

    def _gather(self, span: tuple[int, int], terms: Terms) -> None:
        """Add terms to the planes of a span, block by block."""
        for at, live in _blocks(*span):
            columns: list[list[Bytes]] = [[plane[at]] for plane in self.planes]
            columns += [[], []]  # for carries that are all zero
            for k, plane in terms(at, live):
                _gain(columns, k - self.low, plane)
            for k, plane in enumerate(self.planes):
                plane[at] = _digit(columns, k)

    # ---- reading ---------------------------------------------------------------------------------

    def compare(self) -> Planes:
        """The sign of the tally where it has one: at a tie there is no sign, and no support."""
        n = self.topic.layout.size
        positive, decided = self._zeros(), self._zeros()
        for span, bound in zip(self.spans, self.bounds, strict=True):
            for at, live in _blocks(*span):
                more, same = self._compared(at, bound)
                positive[at] |= more & live
                decided[at] |= ~same & live
        return Planes(plane_from_bytes(positive, n), plane_from_bytes(decided, n))

    def _compared(self, at: slice, bound: int) -> tuple[Bytes, Bytes]:
        """Where P exceeds and where it equals the bound, from the lowest digit to the highest."""
        more = np.zeros(at.stop - at.start, np.uint8)
        is_reachable = bound % (1 << self.low) == 0
        same = np.full_like(more, ALL if is_reachable else 0)
        for k, plane in enumerate(self.planes, self.low):
            digit = plane[at]
            if bound >> k & 1:
                more &= digit
                same &= digit
            else:
                more |= digit
                same &= ~digit
        return more, same

    def values(self, first: int, n: int) -> Tensor:
        """T at coordinates first to first + n, (n,) int64; `first` must be a multiple of 8."""
        at = slice(first // 8, bytes_for(first + n))
        total = torch.zeros(n, dtype=torch.int64)
        for k, plane in enumerate(self.planes, self.low):
            bits = np.unpackbits(plane[at], count=n, bitorder="little")
            total += torch.from_numpy(bits).long() << k
        for (start, stop), bound in zip(self.spans, self.bounds, strict=True):
            total[max(0, start - first) : max(0, stop - first)] -= bound
        return total

    # ---- on the wire -----------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The message: equal sums of equal weights have equal bytes."""
        low = np.array([self.low], np.uint8)
        planes = np.concatenate([np.zeros(0, np.uint8), *self.planes])
        return seal(Form.TALLY, self.topic, len(self.planes), np.array(self.bounds, np.uint64), low, planes)

    @classmethod
    def from_bytes(cls, message: bytes, *, layout: Layout, run: int, round: int, groups: int = 1) -> Tally:
        """The tally in a message. A BallotError if it is damaged, or does not fit these arguments."""
        tally = cls(layout, run=run, round=round, groups=groups)
        count, (bounds, low, planes) = unseal(Form.TALLY, tally.topic, message)
        if len(bounds) != len(tally.spans) or len(low) != 1:
            raise BallotError("length", f"a tally of {len(bounds)} groups; wanted {len(tally.spans)}")
        tally.bounds = bounds.tolist()
        tally.low = int(low[0])
        size = bytes_for(layout.size)
        if max(tally.bounds) > MOST or count != tally._digits or len(planes) != count * size:
            raise BallotError(
                "length", f"{len(planes)} bytes in {count} planes are not the digits of a tally"
            )
        tally.planes = [planes[k * size :][:size].copy() for k in range(count)]
        padding = ~_live(slice(size - 1, size), 0, layout.size)
        if any((plane[-1:] & padding).any() for plane in tally.planes):
            raise BallotError("padding", "bits of a tally are set beyond the last coordinate")
        return tally


def _lowest_digit(ballot: Ballot, sizes: Sequence[int]) -> int:
    """The lowest digit of P that a ballot with weights of these sizes can change: 2 w for a vote, w for none."""
    common = 0
    for size in sizes:
        common |= size
    lowest = (common & -common).bit_length() - 1
    return lowest if ballot.support is not None else lowest + 1


def _terms(ballot: Ballot, weight: int, at: slice, live: Bytes) -> Iterator[Term]:
    """What a ballot adds to P: for each binary digit 2^k of the weight 2^k (1 + Y), by the sign of the weight."""
    flip = ALL if weight < 0 else np.uint8(0)
    agree = (ballot.signs[at] ^ flip) & live
    absent = None
    if ballot.support is not None:
        voted = ballot.support[at]
        agree &= voted
        absent = ~voted & live
    for k in range(abs(weight).bit_length()):
        if abs(weight) >> k & 1:
            yield k + 1, agree
            if absent is not None:
                yield k, absent


def _blocks(begin: int, end: int) -> Iterator[tuple[slice, Bytes]]:
    """The bytes that hold coordinates begin to end, in blocks, and which bits are theirs."""
    for start in range(begin // 8, bytes_for(end), BLOCK):
        at = slice(start, min(start + BLOCK, bytes_for(end)))
        yield at, _live(at, begin, end)


def _live(at: slice, begin: int, end: int) -> Bytes:
    """The bits of some bytes that belong to coordinates begin to end."""
    live = np.full(at.stop - at.start, ALL)
    if begin > 8 * at.start:
        live[0] &= ALL << np.uint8(begin - 8 * at.start)
    if end < 8 * at.stop:
        live[-1] &= ALL >> np.uint8(8 * at.stop - end)
    return live


def _gain(columns: list[list[Bytes]], k: int, plane: Bytes) -> None:
    """Column k gains a plane: of three, a full adder leaves one there and one in the next column."""
    while len(columns[k]) == 2:
        a, b = columns[k]
        differ = a ^ b
        columns[k] = [differ ^ plane]
        plane = (a & b) | (differ & plane)
        k += 1
    columns[k].append(plane)


def _digit(columns: list[list[Bytes]], k: int) -> Bytes:
    """The binary digit of column k; what exceeds it is carried to the next column."""
    if len(columns[k]) == 2:
        a, b = columns[k]
        columns[k] = [a ^ b]
        _gain(columns, k + 1, a & b)
    return columns[k][0]
