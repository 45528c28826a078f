"""A majority vote in Triton: equal weights are a matter of counting ones, with full adders.

Every bit of a 32-bit word is a coordinate, so one instruction adds 32 of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import ONES, coin_words, flipped, full_add, inside, popcount, zeros


@triton.jit
def _ones(planes, DIGITS):
    """How many of the planes have a one, in binary. Full adders turn three planes into two."""
    digits = ()
    for _ in tl.static_range(DIGITS):
        carries = ()
        for _ in tl.static_range(len(planes) // 2):
            if len(planes) > 2:
                low, carry = full_add(planes[0], planes[1], planes[2])
                planes = planes[3:] + (low,)
            else:
                low = planes[0] ^ planes[1]
                carry = planes[0] & planes[1]
                planes = (low,)
            carries = carries + (carry,)
        digits = digits + planes
        planes = carries
    return digits


@triton.jit
def _majority(ballots, voted, zero, DIGITS):
    """Where more votes are for than against, and where as many. An abstention is half for, half against."""
    planes = ballots
    for m in tl.static_range(len(voted)):
        for_certain = ballots[m] & voted[m]
        not_against = ballots[m] | flipped(voted[m])
        planes = planes[:m] + (for_certain,) + planes[m + 1 :] + (not_against,)
    more = zero
    same = zero + (0 if len(planes) % 2 else ONES)
    digits = _ones(planes, DIGITS)
    for k in tl.static_range(DIGITS):
        digit = digits[k]
        if (len(planes) // 2 >> k) % 2:
            more = more & digit
            same = same & digit
        else:
            more = more | digit
            same = same & flipped(digit)
    return more, same


@triton.jit(do_not_specialize=["rows", "key", "first", "begin", "end", "tiles_from", "tiles_to"])
def majority_(
    out,
    decided,
    votes,
    support,
    counts,
    units: tl.int64,
    rows,
    key: tl.int64,
    first: tl.int64,
    begin: tl.int64,
    end: tl.int64,
    tiles_from,
    tiles_to,
    COIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORKERS: tl.constexpr,
    DIGITS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Decide tiles of ROWS x WIDE words by equal weights, and count for each of WORKERS where it differs.

    DIGITS binary digits hold the number of planes. A plane is `rows` rows of WIDE words, which a thread
    loads at once, and lies `units` rows after the one before. The last tile is moved back to be full,
    unless the planes are SMALL; what it shares with the tile before is decided twice and counted once.
    Each program decides every n-th tile, where n is the number of programs.
    """
    row = tl.arange(0, ROWS)[:, None]
    at = row * WIDE + tl.arange(0, WIDE)[None, :]
    there = row < rows if SMALL else None
    wrong = zeros(WORKERS, ROWS)
    cast = zeros(WORKERS, ROWS)
    sure = tl.zeros([ROWS], tl.int32)
    for tile in range(tiles_from + tl.program_id(0), tiles_to, tl.num_programs(0)):
        new = tile * ROWS
        start = (new if SMALL else tl.minimum(new, rows - ROWS)).to(tl.int64) * WIDE
        y = votes + start + at
        voted = None if support is None else support + start + at
        zero = tl.zeros([ROWS, WIDE], tl.uint32)
        ballots = _load_rows(y, units * WIDE, there, WORKERS)
        cover = _load_rows(voted, units * WIDE, there, WORKERS)
        more, same = _majority(ballots, cover, zero, DIGITS)

        low = begin - start * 32
        high = end - start * 32
        edge = (low > 0) | (high < ROWS * WIDE * 32)
        live = zero + ONES
        if edge:
            live = inside(at, low, high)
        if COIN:  # noqa: SIM102
            if tl.max(same) != 0:  # most tiles have no tie, and coins cost
                coins = coin_words(key, first + start * 32, at, ALIGNED)
                more |= same & coins
        _write(out + start + at, more, live, there, edge)
        if decided is not None:
            _write(decided + start + at, flipped(same), live, there, edge)

        if SMALL:
            live = tl.where(there, live, 0)
        elif edge | (start < new * WIDE):
            shared = new * WIDE - start
            live = tl.where(row * WIDE >= shared, live, 0)
        live &= flipped(same)
        wrong, cast = _count(wrong, cast, ballots, cover, more, live)
        if support is None:
            sure += tl.sum(popcount(live), 1)
    everyone = tl.sum(sure).to(tl.int64)
    _add_counts(counts, wrong, cast, everyone, support, WORKERS)


@triton.jit
def _load_rows(planes, stride, there, WORKERS):
    """The words of each worker; none where there are no planes."""
    words = ()
    if planes is not None:
        for m in tl.static_range(WORKERS):
            word = tl.load(planes + m * stride, mask=there)
            words = words + (word,)
    return words


@triton.jit
def _write(plane, new, live, there, edge):
    """The new bits where they live; at an edge of the span the old ones elsewhere."""
    if there is not None:
        edge = there & edge
    old = tl.load(plane, mask=edge)
    kept = old & flipped(live)
    tl.store(plane, (new & live) | kept, mask=there)


@triton.jit
def _count(wrong, cast, ballots, voted, decision, live):
    """Add each worker's votes against the decision, and those cast, among the live coordinates."""
    for m in tl.static_range(len(ballots)):
        counted = live
        if len(voted) > 0:
            counted &= voted[m]
            more_cast = cast[m] + tl.sum(popcount(counted), 1)
            cast = cast[:m] + (more_cast,) + cast[m + 1 :]
        differs = (ballots[m] ^ decision) & counted
        more_wrong = wrong[m] + tl.sum(popcount(differs), 1)
        wrong = wrong[:m] + (more_wrong,) + wrong[m + 1 :]
    return wrong, cast


@triton.jit
def _add_counts(counts, wrong, cast, everyone, support, WORKERS):
    """Integers add up to the same whatever the order; without support all workers cast as many votes."""
    for m in tl.static_range(WORKERS):
        total = tl.sum(wrong[m]).to(tl.int64)
        tl.atomic_add(counts + m, total, sem="relaxed")
        seen = everyone if support is None else tl.sum(cast[m])
        tl.atomic_add(counts + WORKERS + m, seen.to(tl.int64), sem="relaxed")
