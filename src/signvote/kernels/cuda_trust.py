"""The paper's vote in Triton: a weight for every worker and coordinate, counters updated in the same pass.

The weight w(c) = round(1024 log((2 R - c) / c)), clipped, stands in a table, but a lookup by every thread
of a warp costs a line of cache each. So it is computed, in float32, whose error is below a hundredth:

    two logarithms up to 15, each with a relative error of 2^-22 (the instruction's bound), their
    difference and its product with 1024 log 2 rounded: 1024 log 2 (2 * 15 * 2^-22 + 2^-20) + 2^-10 < 0.007

and only where that could decide the rounding, in two of a hundred cases, the table is asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import BITS, ONES, coin_words, flipped, inside, log2, peek

SCALE = tl.constexpr(709.782712893384)  # 1024 log 2
SAFE = tl.constexpr(0.49)  # a fraction up to here cannot be on the wrong side of 1/2
INTEGERS = tl.constexpr(8388608.0)  # 2^23: from here on the last bit of a float32 is 1
ITS_BITS = tl.constexpr(0x4B000000)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 2^23: added and taken away, it rounds to an integer


@triton.jit
def _weight(count, table, size, low, high, there, COMPUTE):
    """W of these counters: row `table` has it at `size` + counter, and `size` is 2 R + 1."""
    rounded, unsure = tl.zeros_like(count).to(tl.float32), there & (count >= 0)
    if COMPUTE:
        above = (count | ITS_BITS).to(tl.float32, bitcast=True)  # 2^23 + c, without a conversion
        against, agreed = above - INTEGERS, tl.maximum(size - 1, 1).to(tl.float32) + INTEGERS - above
        exact = tl.clamp((log2(agreed) - log2(against)) * SCALE, low, high)
        rounded = (exact + ROUNDING) - ROUNDING
        unsure = tl.abs(exact - rounded) > SAFE
    entry = peek(table + (size + count), unsure, rounded.to(tl.uint32, bitcast=True))
    return entry.to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(word, lane):
    return (word[:, None] >> lane[None, :].to(tl.uint32)) & 1


@triton.jit(do_not_specialize=["key", "first", "n"])
def vote_by_coordinate_(
    out, decided, votes, support, counters, slots, tables, table_of, sizes, bounds, workers,
    stride: tl.int64, counter_stride: tl.int64, table_stride: tl.int64, key: tl.int64, first: tl.int64,
    n: tl.int64, COIN: tl.constexpr, ALIGNED: tl.constexpr, SYMBOL: tl.constexpr,
    SUM: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Decide WORDS words: first everybody's weights, then, by the decision, everybody's counters."""
    start = tl.program_id(0).to(tl.int64) * WORDS
    word, lane = tl.arange(0, WORDS), tl.arange(0, BITS)
    left = tl.minimum(n - start * BITS, WORDS * BITS).to(tl.int32)
    there = word * BITS < left
    votes += start
    at = (start + word) // 2 * counter_stride + word % 2 * BITS  # a word of 64 coordinates is two of these
    cells = counters + at[:, None] + lane[None, :]
    zero, tally = tl.zeros([WORDS], tl.uint32), tl.zeros([WORDS, BITS], SUM)
    for m in range(workers):
        slot = tl.load(slots + m)
        if slot >= 0:
            count = tl.load(cells + slot * 64, mask=there[:, None], other=0).to(tl.int32)
            table, size = tables + tl.load(table_of + m) * table_stride, tl.load(sizes + m)
            low, high = 0.0, 0.0
            if bounds is not None:
                low, high = tl.load(bounds + 2 * m).to(tl.float32), tl.load(bounds + 2 * m + 1).to(tl.float32)
            w = _weight(count, table, size, low, high, there[:, None], bounds is not None)
            positive = _bits_of(peek(votes + m * stride + word, there, zero), lane)
            w = tl.where(positive != 0, w, -w)
            if support is not None:
                voted = _bits_of(peek(support + start + m * stride + word, there, zero), lane)
                w = tl.where(voted != 0, w, 0.0)
            tally += w.to(SUM)

    bit = (1 << lane.to(tl.uint32))[None, :].to(tl.uint32)
    more = tl.sum(tl.where(tally > 0, bit, 0).to(tl.uint32), 1)
    same = tl.sum(tl.where(tally == 0, bit, 0).to(tl.uint32), 1)
    live = inside(word, 0, left)
    sure = live
    if COIN:
        more |= same & coin_words(key, first, start + word, ALIGNED)
    else:
        sure &= flipped(same)
    edge = there & (live != ONES)
    old = tl.load(out + start + word, mask=edge, other=0)
    tl.store(out + start + word, (more & live) | (old & flipped(live)), mask=there)
    if decided is not None:
        old = tl.load(decided + start + word, mask=edge, other=0)
        tl.store(decided + start + word, sure | (old & flipped(live)), mask=there)

    for m in range(workers):
        slot = tl.load(slots + m)
        if slot >= 0:
            count = tl.load(cells + slot * 64, mask=there[:, None], other=0)
            voted = live
            if support is not None:
                voted &= peek(support + start + m * stride + word, there, zero)
            wrong = (peek(votes + m * stride + word, there, zero) ^ more) & voted & sure
            missing = voted ^ sure
            if SYMBOL:
                wrong |= missing
            added = _bits_of(wrong, lane) * 2
            if not SYMBOL and (support is not None or not COIN):
                added += _bits_of(missing, lane)
            tl.store(cells + slot * 64, count + added.to(tl.uint16), mask=there[:, None])
