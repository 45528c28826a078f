"""The paper's vote in Triton: a weight for every worker and coordinate, counters updated in the same pass.

Counters are seen as 32-bit words, two neighbouring coordinates in each. Those of a tile are all asked for
before the first is used, and stay in registers until the decision is known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import BITS, ONES, coin_words, flipped, inside, look_up, peek

PAIRS = tl.constexpr(16)  # of coordinates in a word


@triton.jit
def _members(slots, table_of, sizes, table_stride, first, workers, WORKERS):
    """Where the counters of WORKERS workers from the first on stand, or -1, and where their weights do."""
    places, entries = (), ()
    for m in tl.static_range(WORKERS):
        slot = tl.load(slots + first + m, mask=first + m < workers, other=-1).to(tl.int32)
        row = tl.load(table_of + first + m, mask=slot >= 0, other=0).to(tl.int32) * table_stride
        places = places + (slot * 32,)
        entries = entries + (row + tl.load(sizes + first + m, mask=slot >= 0, other=0),)
    return places, entries


@triton.jit
def _counters(cells, places, there):
    """The counters of these workers; zeros for those who take no part."""
    counters = ()
    for m in tl.static_range(len(places)):
        mask = there & (places[m] >= 0)
        counters = counters + (tl.load(cells + places[m], mask=mask, other=0, cache_modifier=".cg"),)
    return counters


@triton.jit
def _signs(word, voted, by, part):
    """+1 or -1 for bit `by` of each word, 0 where there is no vote or the worker takes no part."""
    sign = ((word >> by) & 1).to(tl.int32) * (2 * part) - part
    if voted is not None:
        sign *= ((voted >> by) & 1).to(tl.int32)
    return sign


@triton.jit
def _weighed(tallies, counters, y, voted, places, tables, entries):
    """Add the weighted votes of these workers at even and at odd coordinates."""
    even, odd = tallies
    by = 2 * tl.arange(0, PAIRS)[None, :].to(tl.uint32)
    for m in tl.static_range(len(counters)):
        part = (places[m] >= 0).to(tl.int32)
        table = tables + entries[m]
        low, high = look_up(table, counters[m] & 0xFFFF), look_up(table, counters[m] >> 16)
        cast = None
        if len(voted) > 0:
            cast = voted[m][:, None]
        even += low * _signs(y[m][:, None], cast, by, part)
        odd += high * _signs(y[m][:, None], cast, by + 1, part)
    return even, odd


@triton.jit
def _words(plane, first, workers, stride, there, WORKERS):
    """A word of each of WORKERS workers' planes; none where there are no planes."""
    words = ()
    if plane is not None:
        zero = tl.zeros(there.shape, tl.uint32)
        for m in tl.static_range(WORKERS):
            words = words + (peek(plane + tl.minimum(first + m, workers - 1) * stride, there, zero),)
    return words


@triton.jit
def _positive(even, odd):
    """Words of the bits where tallies are positive, and of those where they are zero."""
    bit = (1 << 2 * tl.arange(0, PAIRS).to(tl.uint32))[None, :].to(tl.uint32)
    more = tl.where(even > 0, bit, 0) + tl.where(odd > 0, 2 * bit, 0)
    same = tl.where(even == 0, bit, 0) + tl.where(odd == 0, 2 * bit, 0)
    return tl.sum(more.to(tl.uint32), 1), tl.sum(same.to(tl.uint32), 1)


@triton.jit
def _write(plane, new, live, there):
    old = tl.load(plane, mask=there & (live != ONES), other=0)
    tl.store(plane, (new & live) | (old & flipped(live)), mask=there)


@triton.jit
def _spread(word, scale):
    """Bits 2 i and 2 i + 1 of a word, times `scale`, in the two halves of the i-th of 16 numbers."""
    two = word[:, None] >> 2 * tl.arange(0, PAIRS)[None, :].to(tl.uint32)
    return (two & 1) * scale + (two & 2) * (scale << 15)


@triton.jit
def _update(cells, counters, y, voted, places, more, sure, live, there, SYMBOL, SURE):
    """Write the counters of these workers after the decision."""
    for m in tl.static_range(len(counters)):
        mine = live
        if len(voted) > 0:
            mine &= voted[m]
        against = (y[m] ^ more) & mine & sure
        missing = mine ^ sure
        added = _spread(against | missing if SYMBOL else against, 2)
        if not SYMBOL and (len(voted) > 0 or not SURE):
            added += _spread(missing, 1)
        tl.store(cells + places[m], counters[m] + added, mask=there & (places[m] >= 0))


@triton.jit(do_not_specialize=["key", "first", "n"])
def vote_by_coordinate_(
    out, decided, votes, support, counters, slots, tables, table_of, sizes, workers,
    stride: tl.int64, counter_stride: tl.int64, table_stride, key: tl.int64, first: tl.int64,
    n: tl.int64, COIN: tl.constexpr, ALIGNED: tl.constexpr, SYMBOL: tl.constexpr,
    WORKERS: tl.constexpr, ONCE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Decide WORDS words: first everybody's weights, then, by the decision, everybody's counters.

    WORKERS workers are taken at a time. If they are all, ONCE, their counters are read once.
    """
    word = tl.arange(0, WORDS)
    start = tl.program_id(0).to(tl.int64) * WORDS
    left = tl.minimum(n - start * BITS, WORDS * BITS).to(tl.int32)
    here = word * BITS < left
    there = here[:, None]
    at = (start + word) // 2 * counter_stride + word % 2 * PAIRS  # 64 coordinates are two of these words
    cells = counters + at[:, None] + tl.arange(0, PAIRS)[None, :]
    plane, cover = votes + start + word, None if support is None else support + start + word
    even = tl.zeros([WORDS, PAIRS], tl.int32)
    tallies = even, even
    places, c, y, v = (), (), (), ()
    if ONCE:
        places, entries = _members(slots, table_of, sizes, table_stride, 0, workers, WORKERS)
        c = _counters(cells, places, there)
        y = _words(plane, 0, workers, stride, here, WORKERS)
        v = _words(cover, 0, workers, stride, here, WORKERS)
        tallies = _weighed(tallies, c, y, v, places, tables, entries)
    else:
        for m in range(0, workers, WORKERS):
            these, rows = _members(slots, table_of, sizes, table_stride, m, workers, WORKERS)
            count = _counters(cells, these, there)
            signs = _words(plane, m, workers, stride, here, WORKERS)
            voted = _words(cover, m, workers, stride, here, WORKERS)
            tallies = _weighed(tallies, count, signs, voted, these, tables, rows)

    more, same = _positive(tallies[0], tallies[1])
    live = inside(word, 0, left)
    sure = live
    if COIN:
        more |= same & coin_words(key, first, start + word, ALIGNED)
    else:
        sure &= flipped(same)
    _write(out + start + word, more, live, here)
    if decided is not None:
        _write(decided + start + word, sure, live, here)

    if ONCE:
        _update(cells, c, y, v, places, more, sure, live, there, SYMBOL, COIN)
    else:
        for m in range(0, workers, WORKERS):
            these, _ = _members(slots, table_of, sizes, table_stride, m, workers, WORKERS)
            count = _counters(cells, these, there)
            signs = _words(plane, m, workers, stride, here, WORKERS)
            voted = _words(cover, m, workers, stride, here, WORKERS)
            _update(cells, count, signs, voted, these, more, sure, live, there, SYMBOL, COIN)
