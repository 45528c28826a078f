"""The evidence of a round in few bytes. Every rank counts on its own pieces; all ranks need the sum.

    equal counts    travel once: A differs from B as often as B from A. Where every worker votes on every
                    coordinate, all have cast the same number of votes
    zeros           do not travel: a rank counts nothing in groups of coordinates that its pieces do not touch
    others          travel in the fewest bytes: a count cannot exceed the coordinates counted, nor the magnitudes of
                    scaled votes and the beliefs about corrections `MOST` for each

All of this follows from what every rank knows, so nothing travels that describes it. Sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from signvote.core import loudness, scaled
from signvote.core.rule import Ranges
from signvote.core.trust import Evidence
from signvote.kernels import WORD, download

COUNTS = (
    "mismatches",
    "cast",
    "differ",
    "common",
    "magnitudes",
    "beliefs",
)  # fields of Evidence that are sent
PAIRS = ("differ", "common")
MAGNITUDES = "magnitudes"  # by tensor
MOST = {MAGNITUDES: scaled.MOST, "beliefs": loudness.MOST}  # for each coordinate; other counts: 1
VOTES = ("cast", "common")  # the same for all workers if every worker votes on every coordinate
BYTES = 8  # of a count before it is packed

Array = np.ndarray[Any, Any]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of the counts, by name


class Places(NamedTuple):
    """What one rank sends: some of the numbers, and some bytes of these."""

    numbers: Array  # their indices
    bytes: Array  # indices into the bytes of these numbers


class Packing:
    """The way in which counts of certain shapes travel.

    A *number* stands for all counts that are equal.

    Args:
        shapes: of the counts.
        groups: the ranges of coordinates that the rule counts by.
        owned: the ranges of coordinates that each rank decides.
        tensors: the range of each tensor, for magnitudes.
        dense: whether every worker votes on every coordinate, and every coordinate is decided.

    """

    def __init__(
        self,
        shapes: Shapes,
        groups: Ranges,
        owned: Sequence[Ranges],
        tensors: Ranges = (),
        *,
        dense: bool,
    ) -> None:
        first: list[Array] = []  # of each number: the first count that it stands for
        number: list[Array] = []  # of each count: the number that stands for it
        bounds: list[Array] = []  # (numbers, ranks)
        counts = 0
        numbers = 0
        for name, shape in shapes:
            key, group = _keys(name, shape, dense)
            _, firsts, inverse = np.unique(key, return_index=True, return_inverse=True)
            spans = tensors if name == MAGNITUDES else groups
            coordinates = _coordinates(name, shape, spans, owned)
            is_zero = key[firsts] < 0
            counted = coordinates[:, group[firsts]]
            at_most = np.where(is_zero, 0, counted) * MOST.get(name, 1)
            first.append(counts + firsts)
            number.append(numbers + inverse.reshape(-1))
            bounds.append(at_most.T)
            counts += key.size
            numbers += firsts.size
        self._first = np.concatenate(first)
        self._number = torch.from_numpy(np.concatenate(number))
        widths = _bytes_for(np.concatenate(bounds))
        self._places = [_places(widths[:, rank]) for rank in range(len(owned))]
        longest = max(places.bytes.size for places in self._places)
        self.words = -(-(longest + 1) // BYTES)  # of a message; its last byte shows whether the counts fit

    def pack(self, counts: Tensor, rank: int) -> Tensor:
        """The message of a rank, from all its counts in a row."""
        places = self._places[rank]
        picked = torch.from_numpy(self._first[places.numbers])
        kept = torch.from_numpy(places.bytes)
        message = torch.zeros(self.words, dtype=torch.int64)
        packed = message.view(torch.uint8)
        raw = counts[picked].view(torch.uint8)
        packed[: len(kept)] = raw[kept]
        restored = self._restored(packed.numpy(), rank)
        fits = torch.equal(restored[self._number], counts)
        packed[-1] = not fits
        return message

    def _restored(self, packed: Array, rank: int) -> Tensor:
        """All numbers of a rank, from the bytes that it sent."""
        places = self._places[rank]
        raw = np.zeros(places.numbers.size * BYTES, np.uint8)
        raw[places.bytes] = packed[: places.bytes.size]
        numbers = np.zeros(self._first.size, np.int64)
        numbers[places.numbers] = raw.view(np.int64)
        return torch.from_numpy(numbers)

    def total(self, messages: Tensor) -> Tensor | None:
        """The sums of all counts over all ranks, in a row; None if the counts of a rank did not fit."""
        rows = messages.contiguous().numpy().view(np.uint8)
        if rows[:, -1].any():
            return None
        by_rank = [self._restored(row, rank) for rank, row in enumerate(rows)]
        sums = torch.stack(by_rank).sum(0)
        return sums[self._number]


class Packings:
    """The packings of one engine. Shapes change only with the number of ranks that vote.

    Args:
        groups: the ranges of coordinates that the rule counts by.
        owned: the ranges of coordinates that each rank decides.
        tensors: the range of each tensor, for magnitudes.
        dense: see Packing.

    """

    def __init__(self, groups: Ranges, owned: Sequence[Ranges], tensors: Ranges = (), *, dense: bool) -> None:
        self.groups = groups
        self.owned = owned
        self.tensors = tensors
        self.dense = dense
        self._known: dict[Shapes, Packing] = {}

    def of(self, evidence: Evidence) -> Packing:
        """The packing for counts of such shapes."""
        found = []
        for name, count in _counts(evidence).items():
            found.append((name, tuple(count.shape)))
        shapes = tuple(found)
        if shapes not in self._known:
            self._known[shapes] = Packing(shapes, self.groups, self.owned, self.tensors, dense=self.dense)
        return self._known[shapes]


def in_a_row(evidence: Evidence) -> Tensor:
    """All counts of some evidence, on the CPU."""
    arrived = download(*_counts(evidence).values())
    return torch.cat([count.reshape(-1) for count in arrived()])


def with_counts(evidence: Evidence, row: Tensor) -> Evidence:
    """The same evidence with other counts."""
    counts = _counts(evidence)
    sizes = [count.numel() for count in counts.values()]
    parts = torch.split(row, sizes)
    shaped: dict[str, Any] = {}
    for (name, count), part in zip(counts.items(), parts, strict=True):
        shaped[name] = part.view(count.shape)
    return replace(evidence, **shaped)


def _counts(evidence: Evidence) -> Mapping[str, Tensor]:
    """The counts that there are."""
    fields = {name: getattr(evidence, name) for name in COUNTS}
    return {name: count for name, count in fields.items() if count is not None}


def _keys(name: str, shape: tuple[int, ...], dense: bool) -> tuple[Array, Array]:
    """For each count a key, the same for counts that are equal, -1 for those that are 0; and its group."""
    if name == MAGNITUDES:
        tensors = np.arange(shape[0])
        return tensors, tensors
    at = np.indices(shape)
    is_of_pairs = name in PAIRS
    workers = max(shape[-2:]) if is_of_pairs else shape[0]
    is_square = shape[-2:] == (workers, workers)
    if is_of_pairs:
        *groups, one, other = at
        lower = np.minimum(one, other) if is_square else one
        higher = np.maximum(one, other) if is_square else other
        who = lower * workers + higher
    else:
        who, *groups = at
    group = groups[0] if groups else np.zeros_like(who)
    if dense and name in VOTES:
        who = np.zeros_like(who)
    key = group * workers**2 + who
    if name == "differ" and is_square:
        key = np.where(one == other, -1, key)
    return key.reshape(-1), group.reshape(-1)


def _coordinates(name: str, shape: tuple[int, ...], groups: Ranges, owned: Sequence[Ranges]) -> Array:
    """How many coordinates of each group each rank decides at most, (ranks, groups).

    Pairs are compared in whole words. Counts by other groups than the rule's are bounded by all coordinates.
    """
    is_of_pairs = name in PAIRS
    count = shape[0] if is_of_pairs else shape[-1]
    if is_of_pairs and len(shape) == 2:
        count = 1
    ranges = groups
    if count != len(groups):
        everything = (0, groups[-1][1])
        ranges = [everything] * count
    starts, stops = np.array(ranges).reshape(-1, 2).T
    if is_of_pairs:
        starts = starts // WORD * WORD
        stops = -(-stops // WORD) * WORD
    found = []
    for its_ranges in owned:
        mine = np.array(its_ranges)
        first = np.maximum(mine[:, :1], starts)
        last = np.minimum(mine[:, 1:], stops)
        inside = (last - first).clip(0)
        found.append(inside.sum(0))
    return np.stack(found)


def _bytes_for(bounds: Array) -> Array:
    """The fewest bytes that hold numbers up to these; none for 0."""
    limits = 256 ** np.arange(BYTES - 1)
    width: Array = (bounds[..., None] >= limits).sum(-1)
    return width


def _places(widths: Array) -> Places:
    """What a rank sends, by the bytes that each number has there."""
    (numbers,) = widths.nonzero()
    width = widths[numbers][:, None]
    is_kept = np.arange(BYTES) < width
    (places,) = is_kept.reshape(-1).nonzero()
    return Places(numbers, places)
