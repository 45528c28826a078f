"""How often each two workers differ, in Triton.

A GPU counts the ones of a word four times slower than it adds words, so seven words of differences are
first added into their binary digits: three counts, not seven.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import carry, full_add, inside, parity, popcount, zeros

SEVEN = tl.constexpr(7)  # words a thread takes of each plane: what full adders turn into three


@triton.jit
def _sevens(planes, first, workers, stride, at, left, ROWS, STEP):
    """Seven words a thread of each of ROWS planes, of which `left` bits are left: word 7 r + i is of plane r."""
    words = ()
    for r in tl.static_range(ROWS):
        plane = planes + tl.minimum(first + r, workers - 1) * stride + at
        for i in tl.static_range(SEVEN):
            there = (at + i * STEP) * 32 < left
            words = words + (tl.load(plane + i * STEP, mask=there, other=0),)
    if left < SEVEN * STEP * 32:
        cut = ()
        for r in tl.static_range(ROWS):
            for i in tl.static_range(SEVEN):
                cut = cut + (words[SEVEN * r + i] & inside(at + i * STEP, 0, left),)
        words = cut
    return words


@triton.jit
def _gain(sums, K, value):
    """Sums with a value added to number K; two numbers share a register, 16 bits each."""
    total = sums[K // 2] + (value << 16 if K % 2 else value)
    return sums[: K // 2] + (total,) + sums[K // 2 + 1 :]


@triton.jit
def _total(sums, K):
    """Number K of the sums, over all threads."""
    value = sums[K // 2].to(tl.uint32, bitcast=True)
    return tl.sum((value >> 16 if K % 2 else value & 0xFFFF).to(tl.int32))


@triton.jit
def _unlike(y, z, R, S):
    """On how many coordinates seven words of plane R of y differ from those of plane S of z.

    Full adders turn the seven differences into their binary digits. Most differences are never computed
    by themselves: a sum takes y and z as two inputs, and a carry needs only the sums.
    """
    y0, y1, y2 = y[SEVEN * R], y[SEVEN * R + 1], y[SEVEN * R + 2]
    y3, y4, y5, y6 = y[SEVEN * R + 3], y[SEVEN * R + 4], y[SEVEN * R + 5], y[SEVEN * R + 6]
    z0, z1, z2 = z[SEVEN * S], z[SEVEN * S + 1], z[SEVEN * S + 2]
    z3, z4, z5, z6 = z[SEVEN * S + 3], z[SEVEN * S + 4], z[SEVEN * S + 5], z[SEVEN * S + 6]
    a = y0 ^ z0
    two = parity(a, y1, z1)
    three = parity(two, y2, z2)
    p = carry(a, two, three)
    b = y3 ^ z3
    two = parity(b, y4, z4)
    six = parity(two, y5, z5)
    q = carry(b, two, six)
    two = three ^ six
    low = parity(two, y6, z6)
    middle, high = full_add(p, q, carry(three, two, low))
    return popcount(low) + 2 * popcount(middle) + 4 * popcount(high)


@triton.jit
def _ones(words):
    """Ones in seven words."""
    x, p = full_add(words[0], words[1], words[2])
    y, q = full_add(words[3], words[4], words[5])
    low, r = full_add(x, y, words[6])
    middle, high = full_add(p, q, r)
    return popcount(low) + 2 * popcount(middle) + 4 * popcount(high)


@triton.jit
def _both(u, v, R, S):
    """Where plane R of u and plane S of v are 1."""
    words = ()
    for i in tl.static_range(SEVEN):
        words = words + (u[SEVEN * R + i] & v[SEVEN * S + i],)
    return words


@triton.jit
def _unlike_in(y, z, where, R, S):
    """Where plane R of y and plane S of z differ, in these words."""
    words = ()
    for i in tl.static_range(SEVEN):
        words = words + ((y[SEVEN * R + i] ^ z[SEVEN * S + i]) & where[i],)
    return words


@triton.jit(do_not_specialize=["n", "tiles"])
def disagreements_(
    counts, votes, support, stride: tl.int64, n: tl.int64, tiles: tl.int64, workers,
    ROWS: tl.constexpr, SAME: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Pairs of ROWS workers with each other (SAME), or of two different sets of ROWS workers.

    Each program takes every so many tiles and writes its own part of its own two matrices.
    """
    r, s = tl.program_id(1) * ROWS, (tl.program_id(1) if SAME else tl.program_id(2)) * ROWS
    if not SAME and r >= s:
        return
    at = tl.arange(0, STEP)
    differ, common = zeros(ROWS * ROWS, STEP), zeros(ROWS * ROWS, STEP)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = tile * (SEVEN * STEP)
        left = tl.minimum(n - start * 32, SEVEN * STEP * 32).to(tl.int32)
        y = _sevens(votes + start, r, workers, stride, at, left, ROWS, STEP)
        z = y if SAME else _sevens(votes + start, s, workers, stride, at, left, ROWS, STEP)
        u, v = None, None
        if support is not None:
            u = _sevens(support + start, r, workers, stride, at, left, ROWS, STEP)
            v = u if SAME else _sevens(support + start, s, workers, stride, at, left, ROWS, STEP)
        for i in tl.static_range(ROWS):
            for j in tl.static_range(i if SAME else 0, ROWS):
                if support is None:
                    if not SAME or i < j:
                        differ = _gain(differ, i * ROWS + j, _unlike(y, z, i, j))
                else:
                    both = _both(u, v, i, j)
                    differ = _gain(differ, i * ROWS + j, _ones(_unlike_in(y, z, both, i, j)))
                    common = _gain(common, i * ROWS + j, _ones(both))
    counts += tl.program_id(0) * (2 * workers * workers)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(i if SAME else 0, ROWS):
            place, mask = (r + i) * workers + s + j, (r + i < workers) & (s + j < workers)
            tl.store(counts + place, _total(differ, i * ROWS + j), mask=mask)
            if support is not None:
                tl.store(counts + workers * workers + place, _total(common, i * ROWS + j), mask=mask)
