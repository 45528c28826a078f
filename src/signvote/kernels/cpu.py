"""The kernels of `Backend` in numba: tensors are split among threads and padded to full blocks.

Each thread gets a range of words. Counts are integers, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from signvote.kernels import (
    WORD,
    Coin,
    Coins,
    CoordinateWeights,
    Planes,
    coordinates,
    loops,
    reference,
    words_for,
)
from signvote.kernels.adders import network, room, vote_words_
from signvote.kernels.curve_lanes import COPIES
from signvote.kernels.curves import WORST, curves
from signvote.kernels.words import BLOCK, ONES, ZERO, Array

Counts = tuple[Array, Array]
T = TypeVar("T")

WORDS_PER_THREAD = 4096  # less than this is not worth a thread


def unpack(plane: Tensor, n: int) -> Tensor:
    """By numpy, which is thirty times faster than torch."""
    octets = plane[..., : words_for(n)].contiguous().numpy().view(np.uint8)
    bits = np.unpackbits(octets, axis=-1, count=n, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
    """Whole words in place; the last, where coordinates are missing, on a copy padded with zeros."""
    if x.ndim == 2:
        return _sign_rows(x, coin)
    assert not isinstance(coin, Coins)
    n = x.numel()
    whole, left = divmod(n, WORD)
    signs = torch.empty(words_for(n), dtype=torch.int64)
    support = None if coin else torch.empty_like(signs)
    planes = _arrays(Planes(signs, support), 1)
    integer = reference.INTEGERS[x.element_size()]
    integers = x.view(integer).numpy()
    exponent = integers.dtype.type(reference.EXPONENT[x.dtype])

    def work(lo: int, hi: int) -> bool:
        finite = loops.sign_planes(
            integers,
            exponent,
            *_coin(coin),
            *planes,
            lo,
            hi,
        )
        return bool(finite)

    finite = all(_threaded(work, whole))
    if left:
        tail = np.zeros(WORD, integers.dtype)
        tail[:left] = integers[whole * WORD :]
        toss = coin and coin.after(whole * WORD)
        last_signs, last_support = (plane[whole:] for plane in planes)
        tail_is_finite = loops.sign_planes(
            tail,
            exponent,
            *_coin(toss),
            last_signs,
            last_support,
            0,
            1,
        )
        finite &= bool(tail_is_finite)
        last_signs[0] &= ONES >> np.uint64(WORD - left)
    return Planes(signs, support), finite


def _sign_rows(x: Tensor, coins: Coin | Coins | None) -> tuple[Planes, Tensor]:
    """Row by row."""
    tosses: list[Coin | None] = [None] * len(x)
    if isinstance(coins, Coins):
        keys = coins.keys.tolist()
        tosses = [Coin(key % 2**64, coins.first) for key in keys]
    found = [sign_planes(row, toss) for row, toss in zip(x, tosses, strict=True)]
    rows, finite = zip(*found, strict=True)
    signs = torch.stack([planes.signs for planes in rows])
    support = None if coins else torch.stack([planes.support for planes in rows])
    return Planes(signs, support), torch.tensor(finite)


def _reduced(weights: Tensor) -> Tensor:
    """The weights divided by what divides all of them: the same signs, and fewer digits to add.

    >>> _reduced(torch.tensor([4096, -1024, 0])).tolist()
    [4, -1, 0]
    """
    divisor = np.gcd.reduce(weights.numpy())
    return weights // max(1, int(divisor))


def _signed_digits(weights: Tensor) -> Array:
    """The weights as rows (k, worker, flip): each stands for +2^k, or -2^k where flip is all ones.

    The non-adjacent form: of two neighboring binary digits at most one is not zero, a third in all.
    """
    w = weights.numpy().astype(np.int64)
    size = np.abs(w)
    half = size >> 1
    three_halves = size + half
    plus = three_halves & ~half
    minus = half & ~three_halves
    k = np.arange(32)[:, None]
    not_zero = (plus | minus) >> k & 1
    column, worker = np.nonzero(not_zero)
    subtracted = minus[worker] >> column & 1
    negative = subtracted != (w[worker] < 0)
    flip = -negative.astype(np.int64)
    return np.stack([column, worker, flip], axis=1)


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Each thread adds with a network of its own, since that has memory for carries."""
    digit = _signed_digits(_reduced(weights))
    begin, end = span
    low = begin // WORD
    signs, support = _arrays(votes, 2)
    planes = len(signs) + len(support)

    def work(lo: int, hi: int) -> Counts:
        return vote_words_(  # type: ignore[no-any-return]
            *_arrays(out, 1),
            signs,
            support,
            room(planes),
            *network(digit, len(signs), has_support=bool(len(support))),
            *_coin(coin),
            begin,
            end,
            low + lo,
            low + hi,
        )

    counts = _threaded(work, words_for(end) - low)
    return _summed(counts, len(weights))


def tally(votes: Planes, weights: Tensor, n: int) -> Tensor:
    """Word by word. `reference` does votes with abstentions."""
    if votes.support is not None:
        return reference.tally(votes, weights, n)
    words = words_for(n)
    total = torch.zeros(words * WORD, dtype=torch.int32)
    signs, _ = _arrays(votes, 2)

    def work(lo: int, hi: int) -> None:
        loops.tally(total.numpy(), signs, weights.numpy(), lo, hi)

    _threaded(work, words)
    return total[:n]


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """Word by word, votes and counters. Workers that take no part are dropped first."""
    counters, slots, tables, table_of, sizes, zero_is_symbol = weights
    present = slots >= 0
    if not present.all():
        voters = votes.map(lambda p: p[present])
        theirs = weights._replace(
            slots=slots[present],
            table_of=table_of[present],
            sizes=sizes[present],
        )
        counts = torch.zeros(2, len(slots), dtype=torch.int64)
        their_counts = vote_by_coordinate_(out, voters, theirs, coin, n)
        counts[:, present] = torch.stack(their_counts)
        return counts[0], counts[1]
    planes = _arrays(out, 1)
    ballots = _arrays(votes, 2)
    bytes_per_table = tables.stride(0) * tables.element_size()
    rows = tables.data_ptr() + table_of.numpy() * bytes_per_table
    trust = (
        counters.numpy(),
        slots.numpy(),
        rows.astype(np.uint64),
        sizes.numpy().astype(np.uint16),
        *_approximations(weights),
    )

    def work(lo: int, hi: int) -> Counts:
        return coordinates.vote_by_coordinate_(  # type: ignore[no-any-return]
            *planes,
            *ballots,
            *trust,
            torch.zeros(WORD, dtype=torch.int16).numpy(),
            *_coin(coin),
            n,
            zero_is_symbol,
            lo,
            hi,
        )

    parts = _threaded(work, words_for(n))
    return _summed(parts, len(slots))


def _approximations(weights: CoordinateWeights) -> tuple[Array, Array, np.int32]:
    """The curves of the tables, each worker's, and the most by which they are off; -1: they are of no use."""
    table_of = weights.table_of.numpy()
    if not len(table_of):
        return np.empty(0, np.int16), table_of, np.int32(-1)
    size_of = dict(zip(table_of.tolist(), weights.sizes.tolist(), strict=True))
    used = sorted(size_of)
    known = curves(weights.tables.numpy()[used], [size_of[row] for row in used])
    curve_of = np.searchsorted(used, table_of)
    error = known.error[curve_of]
    bound = -1 if (error > WORST).any() else int(error.sum())
    fields = torch.from_numpy(known.curves).flatten().repeat_interleave(COPIES)  # starts at a cache line
    return fields.numpy(), curve_of, np.int32(bound)


def disagreements(votes: Planes, n: int, others: Planes | None = None) -> tuple[Tensor, Tensor]:
    """Of pairs among the same workers half are counted, and mirrored."""
    if others is not None:
        return _disagreements_with(votes, n, others)
    ballots = _arrays(votes, 2)

    def work(lo: int, hi: int) -> Counts:
        return loops.disagreements(*ballots, n, lo, hi)  # type: ignore[no-any-return]

    workers = votes.signs.shape[0]
    parts = _threaded(work, words_for(n))
    differ, both = _summed(parts, (workers, workers))
    return _mirrored(differ), _mirrored(both)


def _disagreements_with(votes: Planes, n: int, others: Planes) -> tuple[Tensor, Tensor]:
    ballots = _arrays(votes, 2)
    theirs = _arrays(others, 2)

    def work(lo: int, hi: int) -> Counts:
        return loops.disagreements_with(*ballots, *theirs, n, lo, hi)  # type: ignore[no-any-return]

    parts = _threaded(work, words_for(n))
    return _summed(parts, (len(votes.signs), len(others.signs)))


def _mirrored(upper: Tensor) -> Tensor:
    """An upper triangle as a symmetric matrix."""
    return upper + upper.triu(1).T


def step_(x: Tensor, decision: Planes, begin: int, step: float, keep: float = 1.0) -> None:
    """Whole words in place; the last, where coordinates are missing, on a copy. `reference` does the half floats."""
    if x.dtype not in (torch.float32, torch.float64):
        reference.step_(x, decision, begin, step, keep)
        return
    values = x.detach().numpy()
    planes = _arrays(decision, 1)
    size = values.dtype.type(step)
    factor = values.dtype.type(keep)
    whole, left = divmod(x.numel(), WORD)

    def work(lo: int, hi: int) -> None:
        loops.step_(values, *planes, begin, size, factor, lo, hi)

    _threaded(work, whole)
    if left:
        at = whole * WORD
        tail = np.zeros(WORD, values.dtype)
        tail[:left] = values[at:]
        loops.step_(tail, *planes, begin + at, size, factor, 0, 1)
        values[at:] = tail[:left]


step_all_ = reference.step_all_  # nobody calls it: on a CPU a launch costs nothing


# ---- between torch and numba -----------------------------------------------------------------


def _arrays(planes: Planes, dimensions: int) -> tuple[Array, Array]:
    """Both planes as numpy words; a missing one has no elements."""
    signs = planes.signs.numpy().view(np.uint64)
    if planes.support is None:
        return signs, np.empty((0,) * dimensions, np.uint64)
    return signs, planes.support.numpy().view(np.uint64)


def _coin(coin: Coin | None) -> tuple[np.uint64, np.uint64, bool]:
    """Key, first coordinate, and whether there is a coin."""
    if coin is None:
        return ZERO, ZERO, False
    return np.uint64(coin.key), np.uint64(coin.first), True


def _threaded(work: Callable[[int, int], T], words: int) -> list[T]:
    """work(lo, hi) over the words, on as many threads as torch may use and the work is worth."""
    worth = words // WORDS_PER_THREAD
    threads = max(1, min(torch.get_num_threads(), worth))
    blocks = -(-words // (threads * BLOCK))
    length = max(1, blocks) * BLOCK
    spans = [(lo, min(lo + length, words)) for lo in range(0, words, length)]
    if len(spans) <= 1:
        return [work(lo, hi) for lo, hi in spans]
    with ThreadPoolExecutor(len(spans)) as pool:
        return list(pool.map(lambda span: work(*span), spans))


def _summed(counts: list[Counts], shape: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The counts of all threads, added."""
    first = np.zeros(shape, np.int64)
    second = np.zeros(shape, np.int64)
    for one, other in counts:
        first += one
        second += other
    return torch.from_numpy(first), torch.from_numpy(second)
