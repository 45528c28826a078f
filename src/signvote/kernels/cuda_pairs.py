"""How often workers differ, from each other and from a decision, in Triton.

From each other: products of bit matrices on tensor cores.

With the votes for, against and all votes as matrices of bits P, N and V (workers x coordinates),

    differ = P N' + N P'        both = V V'

and a GPU has an instruction for such a product. It wants the matrices spread over the 32 threads of a warp
in its own way (PTX ISA, "Matrix Fragments for mma.m16n8k256"), so every tensor here is one number a
thread: thread t = 0 ... 3 of quad q = 0 ... 7 of a warp holds two words of rows q and q + 8, and of a
product what stands there in columns 2 t and 2 t + 1. Which coordinates a word is of does not matter, as
long as it is the same for all workers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import BY_HAND, ONES, flipped, inside, popcount, two_words, zeros

ROWS = tl.constexpr(16)  # workers on each side
WORDS = tl.constexpr(8)  # 32-bit words of each that are multiplied at a time


@triton.jit
def _product(sums, low, high, columns):
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,0,1,2,3",
        [
            low[0],
            high[0],
            low[1],
            high[1],
            columns[0],
            columns[1],
            sums[0],
            sums[1],
            sums[2],
            sums[3],
        ],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        False,
        1,
    )


@triton.jit
def _product_by_hand(sums, low, high, columns):
    warps: tl.constexpr = low[0].shape[0] // 32
    ones = ()
    for rows in tl.static_range(2):
        these = tl.zeros([warps, 8, 8], tl.int32)
        for i in tl.static_range(2):
            row = tl.reshape(high[i] if rows else low[i], [warps, 8, 1, 4])
            column = tl.reshape(columns[i], [warps, 1, 8, 4])
            these += tl.sum(popcount(row & column), 3)
        by_thread = tl.reshape(these, [warps * 32, 2])
        ones = ones + tl.split(by_thread)
    return (
        sums[0] + ones[0],
        sums[1] + ones[1],
        sums[2] + ones[2],
        sums[3] + ones[3],
    )


product = _product_by_hand if BY_HAND else _product  # rows q (low) and q + 8 (high) with columns q


@triton.jit
def _add(sums, x, y):
    """Add the products of 16 rows of x with 16 of y: columns 0 to 7, then columns 8 to 15."""
    low = x[:2]
    high = x[2:]
    left = product(sums[:4], low, high, y[:2])
    right = product(sums[4:], low, high, y[2:])
    return left + right


@triton.jit
def _load(planes, at, low, high, last, STEPS):
    """Two words each of rows q and q + 8, for every step; none where there are no planes."""
    words = ()
    if planes is not None:
        for i in tl.static_range(STEPS):
            place = planes + tl.minimum(at + i * WORDS, last)
            words = words + two_words(place + low)
            words = words + two_words(place + high)
    return words


@triton.jit
def _repeated(word, times):
    words = ()
    for _ in tl.static_range(times):
        words = words + (word,)
    return words


@triton.jit
def _cut(words, at, n):
    """Nothing from coordinate n on."""
    kept = ()
    for i in tl.static_range(len(words) // 4):
        word = at + i * WORDS
        first = inside(word, 0, n)
        second = inside(word + 1, 0, n)
        kept = kept + (
            words[4 * i] & first,
            words[4 * i + 1] & second,
            words[4 * i + 2] & first,
            words[4 * i + 3] & second,
        )
    return kept


@triton.jit
def _for_and_against(y, voted):
    """Votes for and votes against, as far as they were cast."""
    plus = ()
    minus = ()
    for i in tl.static_range(4):
        vote_for = y[i] & voted[i]
        vote_against = flipped(y[i]) & voted[i]
        plus = plus + (vote_for,)
        minus = minus + (vote_against,)
    return plus, minus


@triton.jit(do_not_specialize=["n", "words", "tiles"])
def disagreements_(
    counts,
    votes,
    support,
    stride: tl.int64,
    n: tl.int64,
    words: tl.int64,
    tiles: tl.int64,
    workers,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    SAME: tl.constexpr,
):
    """Pairs of 16 workers with 16 workers, the SAME ones if there are no others.

    A tile is WARPS x STEPS x WORDS words. Each program counts every n-th tile, where n is the number of
    programs, and adds its counts to the two matrices of `counts`.
    """
    r = tl.program_id(1) * ROWS
    s = tl.program_id(2) * ROWS
    if r > s:
        return
    thread = tl.arange(0, 32 * WARPS)
    q = thread % 32 // 4
    t = thread % 4
    here = thread // 32 * (STEPS * WORDS) + 2 * t
    last = workers - 1
    low = tl.minimum(r + q, last) * stride
    high = tl.minimum(r + q + 8, last) * stride
    left = tl.minimum(s + q, last) * stride
    right = tl.minimum(s + q + 8, last) * stride
    differ = zeros(8, 32 * WARPS)
    both = differ
    ones = tl.full([32 * WARPS], ONES, tl.uint32)
    everywhere = _repeated(ones, 4 * STEPS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile * (WARPS * STEPS * WORDS) + here
        y = _load(votes, at, low, high, words - 2, STEPS)
        v = everywhere if support is None else _load(support, at, low, high, words - 2, STEPS)
        z = y if SAME else _load(votes, at, left, right, words - 2, STEPS)
        w = v if SAME or support is None else _load(support, at, left, right, words - 2, STEPS)
        if (tile + 1) * (WARPS * STEPS * WORDS * 32) > n:
            v = _cut(v, at, n)
            w = _cut(w, at, n)
        for i in tl.static_range(STEPS):
            voted = v[4 * i : 4 * i + 4]
            mine = y[4 * i : 4 * i + 4]
            plus, minus = _for_and_against(mine, voted)
            their_voted = w[4 * i : 4 * i + 4]
            their_plus = plus
            their_minus = minus
            if not SAME:
                theirs = z[4 * i : 4 * i + 4]
                their_plus, their_minus = _for_and_against(theirs, their_voted)
            differ = _add(differ, plus, their_minus)
            differ = _add(differ, minus, their_plus)
            if support is not None:
                both = _add(both, voted, their_voted)
    _add_up(counts, differ, r, s, workers, WARPS)
    if support is not None:
        _add_up(counts + workers * workers, both, r, s, workers, WARPS)


@triton.jit
def _add_up(matrix, sums, r, s, workers, WARPS):
    """Add the sums of all warps to their place in a matrix and, off the diagonal, to its mirror image."""
    thread = tl.arange(0, 32)
    for i in tl.static_range(8):
        row = r + thread // 4 + i // 2 % 2 * 8
        column = s + thread % 4 * 2 + i % 2 + i // 4 * 8
        by_warp = tl.reshape(sums[i], [WARPS, 32])
        total = tl.sum(by_warp, 0).to(tl.int64)
        there = (row < workers) & (column < workers)
        place = matrix + row * workers + column
        mirror = matrix + column * workers + row
        tl.atomic_add(place, total, mask=there, sem="relaxed")
        tl.atomic_add(mirror, total, mask=there & (r < s), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "begin", "end", "tiles_from", "tiles_to"])
def count_(
    decision,
    decided,
    votes,
    support,
    counts,
    slots,
    units: tl.int64,
    rows,
    workers,
    begin: tl.int64,
    end: tl.int64,
    tiles_from: tl.int64,
    tiles_to: tl.int64,
    WORKERS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Count for WORKERS of the workers a program where they differ from a decision that stands."""
    worker = tl.program_id(1) * WORKERS
    row = tl.arange(0, ROWS)[:, None]
    at = row * WIDE + tl.arange(0, WIDE)[None, :]
    wrong = zeros(WORKERS, ROWS)
    cast = zeros(WORKERS, ROWS)
    for tile in range(tiles_from + tl.program_id(0), tiles_to, tl.num_programs(0)):
        start = tile * (ROWS * WIDE)
        there = row < rows - tile * ROWS
        live = inside(at, begin - start * 32, end - start * 32)
        if decided is not None:
            live &= tl.load(decided + start + at, mask=there, other=0)
        chosen = tl.load(decision + start + at, mask=there, other=0)
        for m in tl.static_range(WORKERS):
            known = tl.minimum(worker + m, workers - 1)
            plane = start + known * units * WIDE + at
            counted = live
            if support is not None:
                counted &= tl.load(support + plane, mask=there, other=0)
            vote = tl.load(votes + plane, mask=there, other=0)
            differs = (vote ^ chosen) & counted
            more_wrong = wrong[m] + tl.sum(popcount(differs), 1)
            more_cast = cast[m] + tl.sum(popcount(counted), 1)
            wrong = wrong[:m] + (more_wrong,) + wrong[m + 1 :]
            cast = cast[:m] + (more_cast,) + cast[m + 1 :]
    for m in tl.static_range(WORKERS):
        takes_part = worker + m < workers
        if slots is not None:
            slot = tl.load(slots + worker + m, mask=takes_part, other=-1)
            takes_part &= slot >= 0
        total_wrong = tl.sum(wrong[m]).to(tl.int64)
        total_cast = tl.sum(cast[m]).to(tl.int64)
        place = counts + worker + m
        tl.atomic_add(place, total_wrong, mask=takes_part, sem="relaxed")
        tl.atomic_add(place + workers, total_cast, mask=takes_part, sem="relaxed")
