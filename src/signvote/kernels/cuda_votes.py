"""A vote as an adder network in Triton, 32 coordinates to a machine word.

As in `adders`: a weight is a sum of signed digits +-2^k, and a digit sends the worker's bits, inverted
for a minus, into column k. Here a column takes four or eight planes at a time:

    held + a + b + c + d ...    `held` being the carries from the column before, as binary planes

and the lowest plane of the sum is the column's digit of the tally, the others are the carries into the
next column. `plan_` writes down which planes go where, so weights that change compile nothing anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import ONES, coin_words, flipped, full_add, inside, popcount, zeros

COLUMNS = tl.constexpr(32)  # of weights below 2^31; a plan has as many rows again for carries
HEAD = tl.constexpr(4)  # a plan's row: inputs, digit of the middle, columns, ties; then (worker, sign) pairs
GROUP = tl.constexpr(8)  # planes a column takes at a time, at most


@triton.jit
def plan_(
    plan, counts, weights, workers, width, stride: tl.int64, DOUBLE: tl.constexpr, DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the plan of these weights: which workers' planes go into which column, and what is half.

    Row k starts with the number of digits in column k and digit k of the middle (0 or all ones), the
    tally of a tie; then come pairs, where a plane starts and its sign, filled up with signs of 0. The
    non-adjacent form: of neighbouring binary digits at most one is not zero, a third in all. With
    DOUBLE each digit stands for two planes. A DENSE plan has only the signs, one for each worker. The
    counts start at zero.
    """
    at = tl.arange(0, BLOCK)
    tl.store(counts + at, 0, mask=at < workers)
    tl.store(counts + workers + at, 0, mask=at < workers)
    w = tl.load(weights + at, mask=at < workers, other=0).to(tl.int64)
    size = tl.abs(w)
    half, whole = size >> 1, size + (size >> 1)
    plus, minus = whole & ~half, half & ~whole
    total = tl.sum(plus + minus)  # the sum of 2^k over digits
    columns = 0
    for k in range(COLUMNS):
        digit = ((plus >> k) & 1) - ((minus >> k) & 1)
        sign = tl.where(w < 0, -digit, digit).to(tl.int32)
        here = tl.abs(sign)
        inputs = tl.sum(here)
        place = tl.where(here != 0, tl.cumsum(here) - 1, inputs + tl.cumsum(1 - here) - 1)
        pair = plan + k * width + HEAD + 2 * place
        tl.store(plan + k * width, inputs)
        if DENSE:
            tl.store(plan + k * width + HEAD + at, sign, mask=at < workers)
        else:
            tl.store(pair, tl.where(at < workers, at, 0) * stride, mask=2 * place < width - HEAD)
            tl.store(pair + 1, sign, mask=2 * place < width - HEAD)
        columns = tl.where(inputs > 0, k + 1, columns)
    middle = total if DOUBLE else total >> 1
    for k in range(2 * COLUMNS):
        tl.store(plan + k * width + 1, -((middle >> k) & 1))
    tl.store(plan + 2, columns)
    tl.store(plan + 3, -1 if DOUBLE else (total & 1) - 1)  # an odd total has no tie


@triton.jit
def _vote_of(pair, votes, there):
    """The plane of one digit: a worker's bits, inverted for -1, nothing for 0.

    Written as a product, since a GPU multiplies beside its logic and not instead of it.
    """
    start, sign = tl.multiple_of(tl.load(pair), votes.shape[1]), tl.load(pair + 1).to(tl.int32)
    return tl.load(votes + start, mask=there) * sign.to(tl.uint32) + (sign >> 1).to(tl.uint32)


@triton.jit
def _twice(pair, votes, support, there):
    """The two planes of one digit where workers may abstain: both for a vote for, one for none."""
    start, sign = tl.multiple_of(tl.load(pair), votes.shape[1]), tl.load(pair + 1).to(tl.int32)
    voted = tl.load(support + start, mask=there)
    vote = tl.load(votes + start, mask=there) ^ (sign >> 1).to(tl.uint32)
    used = (-(sign & 1)).to(tl.uint32)
    return vote & voted & used, (vote | flipped(voted)) & used


@triton.jit
def _four(pair, votes, support, there):
    """The next four planes of a column."""
    if support is None:
        a, b = _vote_of(pair, votes, there), _vote_of(pair + 2, votes, there)
        c, d = _vote_of(pair + 4, votes, there), _vote_of(pair + 6, votes, there)
    else:
        a, b = _twice(pair, votes, support, there)
        c, d = _twice(pair + 2, votes, support, there)
    return a, b, c, d


@triton.jit
def _add(held, pair, inputs, votes, support, there):
    """Held, as binary planes, with up to eight inputs added; four where there are no more."""
    a, b, c, d = _four(pair, votes, support, there)
    low, p = full_add(held[0], a, b)
    low, q = full_add(low, c, d)
    middle, s = full_add(held[1], p, q)
    if inputs > 4:
        a, b, c, d = _four(pair + (8 if support is None else 4), votes, support, there)
        low, p = full_add(low, a, b)
        low, q = full_add(low, c, d)
        middle, t = full_add(middle, p, q)
        high, carry = full_add(held[2], s, t)
    else:
        high, carry = held[2] ^ s, held[2] & s
    held = (low, middle, high) + held[3:]
    for i in tl.static_range(3, len(held)):
        held, carry = held[:i] + (held[i] ^ carry,) + held[i + 1 :], held[i] & carry
    return held


@triton.jit
def _tally(plan, width, votes, support, zero, there, CARRIES, MANY):
    """Where the tally is positive and where it is zero: its digits against those of the middle, low to high."""
    planes_per_digit = 1 if support is None else 2
    held = ()
    for _ in tl.static_range(CARRIES):
        held = held + (zero,)
    more, same = zero, zero + tl.load(plan + 3).to(tl.uint32)
    for _ in range(tl.load(plan + 2).to(tl.int32)):
        inputs, half = tl.load(plan).to(tl.int32) * planes_per_digit, tl.load(plan + 1).to(tl.uint32)
        pair = plan + HEAD
        held = held + (zero,)
        if MANY:
            for _ in range((inputs - 1) // GROUP):
                held = _add(held, pair, GROUP, votes, support, there)
                pair += 2 * GROUP // planes_per_digit
                inputs -= GROUP
        held = _add(held, pair, inputs, votes, support, there)
        more, same = _compare(more, same, held[0], half)
        held = held[1:]
        plan += width
    for i in tl.static_range(CARRIES):
        more, same = _compare(more, same, held[i], tl.load(plan + i * width + 1).to(tl.uint32))
    return more, same


@triton.jit
def _compare(more, same, digit, half):
    """One binary digit more, all ones or zeros in `half`: the highest that differs decides."""
    differs = digit ^ half
    return (more & flipped(differs)) | (digit & differs), same & flipped(differs)


@triton.jit
def _ones(planes, held, DIGITS):
    """How many of the planes have a one, plus what is held, in binary; full adders make two planes of three."""
    digits = ()
    for i in tl.static_range(DIGITS):
        if i < len(held):
            planes = planes + (held[i],)
        carries = ()
        for _ in tl.static_range(len(planes) // 2):
            if len(planes) > 2:
                low, carry = full_add(planes[0], planes[1], planes[2])
                planes = planes[3:] + (low,)
            else:
                low, carry = planes[0] ^ planes[1], planes[0] & planes[1]
                planes = (low,)
            carries = carries + (carry,)
        digits = digits + planes
        planes = carries
    return digits


@triton.jit
def _dense_tally(plan, width, ballots, zero, CARRIES):
    """As `_tally`, with every worker in every column: three times the work, and nothing to wait for."""
    held = ()
    for _ in tl.static_range(CARRIES):
        held = held + (zero,)
    more, same = zero, zero + tl.load(plan + 3).to(tl.uint32)
    for _ in range(tl.load(plan + 2).to(tl.int32)):
        planes = ()
        for m in tl.static_range(len(ballots)):
            sign = tl.load(plan + HEAD + m)  # its upper half is all ones for a minus
            planes = planes + (ballots[m] * sign.to(tl.uint32) + (sign >> 32).to(tl.uint32),)
        digits = _ones(planes, held, CARRIES + 1)
        more, same = _compare(more, same, digits[0], tl.load(plan + 1).to(tl.uint32))
        held = digits[1:]
        plan += width
    for i in tl.static_range(CARRIES):
        more, same = _compare(more, same, held[i], tl.load(plan + i * width + 1).to(tl.uint32))
    return more, same


@triton.jit
def _majority(ballots, voted, zero, DIGITS):
    """Where more are for than against, and where as many; who does not vote is half for, half against."""
    planes = ballots
    for m in tl.static_range(len(voted)):
        planes = planes[:m] + (ballots[m] & voted[m],) + planes[m + 1 :] + (ballots[m] | flipped(voted[m]),)
    more, same = zero, zero + (0 if len(planes) % 2 else ONES)
    digits = _ones(planes, (), DIGITS)
    for k in tl.static_range(DIGITS):
        if (len(planes) // 2 >> k) % 2:
            more, same = more & digits[k], same & digits[k]
        else:
            more, same = more | digits[k], same & flipped(digits[k])
    return more, same


@triton.jit(do_not_specialize=["rows", "key", "first", "begin", "end", "tiles_from", "tiles_to"])
def vote_(
    out, decided, votes, support, counts, plan, width, units: tl.int64, rows, key: tl.int64,
    first: tl.int64, begin: tl.int64, end: tl.int64, tiles_from, tiles_to, COIN: tl.constexpr,
    ALIGNED: tl.constexpr, WORKERS: tl.constexpr, CARRIES: tl.constexpr, MANY: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, EARLY: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Decide tiles of ROWS x WIDE words, and count for each of WORKERS workers where it differs.

    Without a plan all have the same weight, and CARRIES binary digits hold the number of planes. A plane
    is `rows` rows of WIDE words, which a thread loads at once, and lies `units` rows after the one before.
    The last tile is moved back to be full, unless the planes are SMALL; what it shares with the tile
    before is decided twice and counted once. Each program takes every so many tiles.
    """
    row = tl.arange(0, ROWS)[:, None]
    at = row * WIDE + tl.arange(0, WIDE)[None, :]
    there = row < rows if SMALL else None
    wrong, cast, sure = zeros(WORKERS, ROWS), zeros(WORKERS, ROWS), tl.zeros([ROWS], tl.int32)
    for tile in range(tiles_from + tl.program_id(0), tiles_to, tl.num_programs(0)):
        new = tile * ROWS
        start = (new if SMALL else tl.minimum(new, rows - ROWS)).to(tl.int64) * WIDE
        y, voted = votes + start + at, None if support is None else support + start + at
        zero = tl.zeros([ROWS, WIDE], tl.uint32)
        ballots, cover = (), ()
        if EARLY:  # all planes are asked for at once; adders find them in the cache
            ballots = _load(y, units * WIDE, there, WORKERS)
            cover = _load(voted, units * WIDE, there, WORKERS)
        if plan is None:
            more, same = _majority(ballots, cover, zero, CARRIES)
        elif DENSE:
            more, same = _dense_tally(plan, width, ballots, zero, CARRIES)
        else:
            more, same = _tally(plan, width, y, voted, zero, there, CARRIES, MANY)
        if not EARLY:
            ballots = _load(y, units * WIDE, there, WORKERS)
            cover = _load(voted, units * WIDE, there, WORKERS)

        low, high = begin - start * 32, end - start * 32
        edge = (low > 0) | (high < ROWS * WIDE * 32)
        live = zero + ONES
        if edge:
            live = inside(at, low, high)
        if COIN:
            if tl.max(same) != 0:  # most tiles have no tie, and coins cost
                more |= same & coin_words(key, first + start * 32, at, ALIGNED)
            same = zero
        _write(out + start + at, more, live, there, edge)
        if decided is not None:
            _write(decided + start + at, flipped(same), live, there, edge)

        if SMALL:
            live = tl.where(there, live, 0)
        elif edge | (start < new * WIDE):
            live = tl.where(row * WIDE >= new * WIDE - start, live, 0)
        live &= flipped(same)
        wrong, cast = _count(wrong, cast, ballots, cover, more, live)
        if support is None and not COIN:
            sure += tl.sum(popcount(live), 1)
    everyone = tl.sum(sure).to(tl.int64)
    if COIN and tl.program_id(0) == 0:
        everyone = end - begin
    _add_counts(counts, wrong, cast, everyone, support, WORKERS)


@triton.jit
def _load(planes, stride, there, WORKERS):
    """The words of each worker; none where there are no planes."""
    words = ()
    if planes is not None:
        for m in tl.static_range(WORKERS):
            words = words + (tl.load(planes + m * stride, mask=there),)
    return words


@triton.jit
def _write(plane, new, live, there, edge):
    """The new bits where they live; at an edge of the span the old ones elsewhere."""
    if there is not None:
        edge = there & edge
    old = tl.load(plane, mask=edge)
    tl.store(plane, (new & live) | (old & flipped(live)), mask=there)


@triton.jit
def _count(wrong, cast, ballots, voted, decision, live):
    """Add each worker's votes against the decision, and those cast, among the live coordinates."""
    for m in tl.static_range(len(ballots)):
        counted = live
        if len(voted) > 0:
            counted &= voted[m]
            cast = cast[:m] + (cast[m] + tl.sum(popcount(counted), 1),) + cast[m + 1 :]
        differs = (ballots[m] ^ decision) & counted
        wrong = wrong[:m] + (wrong[m] + tl.sum(popcount(differs), 1),) + wrong[m + 1 :]
    return wrong, cast


@triton.jit
def _add_counts(counts, wrong, cast, everyone, support, WORKERS):
    """Integers add up to the same whatever the order; without support all workers cast as many votes."""
    for m in tl.static_range(WORKERS):
        tl.atomic_add(counts + m, tl.sum(wrong[m]).to(tl.int64), sem="relaxed")
        seen = everyone if support is None else tl.sum(cast[m])
        tl.atomic_add(counts + WORKERS + m, seen.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "begin", "end", "tiles_from", "tiles_to"])
def count_(
    decision, decided, votes, support, counts, slots, units: tl.int64, rows, workers, begin: tl.int64,
    end: tl.int64, tiles_from: tl.int64, tiles_to: tl.int64, WORKERS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Count for WORKERS of the workers a program where they differ from a decision that stands."""
    worker = tl.program_id(1) * WORKERS
    row = tl.arange(0, ROWS)[:, None]
    at = row * WIDE + tl.arange(0, WIDE)[None, :]
    wrong, cast = zeros(WORKERS, ROWS), zeros(WORKERS, ROWS)
    for tile in range(tiles_from + tl.program_id(0), tiles_to, tl.num_programs(0)):
        start = tile * (ROWS * WIDE)
        there = row < rows - tile * ROWS
        live = inside(at, begin - start * 32, end - start * 32)
        if decided is not None:
            live &= tl.load(decided + start + at, mask=there, other=0)
        chosen = tl.load(decision + start + at, mask=there, other=0)
        for m in tl.static_range(WORKERS):
            plane = start + tl.minimum(worker + m, workers - 1) * units * WIDE + at
            counted = live
            if support is not None:
                counted &= tl.load(support + plane, mask=there, other=0)
            differs = (tl.load(votes + plane, mask=there, other=0) ^ chosen) & counted
            wrong = wrong[:m] + (wrong[m] + tl.sum(popcount(differs), 1),) + wrong[m + 1 :]
            cast = cast[:m] + (cast[m] + tl.sum(popcount(counted), 1),) + cast[m + 1 :]
    for m in tl.static_range(WORKERS):
        takes_part = worker + m < workers
        if slots is not None:
            takes_part &= tl.load(slots + worker + m, mask=takes_part, other=-1) >= 0
        tl.atomic_add(counts + worker + m, tl.sum(wrong[m]).to(tl.int64), mask=takes_part, sem="relaxed")
        tl.atomic_add(
            counts + workers + worker + m, tl.sum(cast[m]).to(tl.int64), mask=takes_part, sem="relaxed"
        )
