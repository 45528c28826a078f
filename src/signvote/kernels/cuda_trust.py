"""The paper's vote in Triton: a weight for every worker and coordinate, counters updated in the same pass.

A thread has eight coordinates: a byte of every plane, and 16 bytes of every worker's counters. All tensors
of the main kernel are one number a thread. Memory is kept busy by asking early: while a thread works on
one tile, its part of the next is on the way into shared memory, where it has places of its own. Only votes
come in words, of which each thread of a quad asks for its share and reads its byte of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import BY_HAND, coin_words, four_words, look_up, zeros

MEMBER = tl.constexpr(4)  # numbers about a worker: where its counters stand, its weights, its part; and none
PAIR = tl.constexpr(0x00010001)


@triton.jit(do_not_specialize=["workers", "entries", "longest"])
def prepare_(
    members, small, counts, slots, tables, table_of, sizes, workers, entries, longest,
    MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make tables of int16, which take half the cache, counts of zero, and the numbers about each worker.

    A weight stands entry + part * counter bytes into the tables: part is 2, or 0 for who takes none, and
    then the entry is a zero.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(small + at, tl.load(tables + at, mask=at < entries).to(tl.int16), mask=at < entries)
    if tl.program_id(0) == 0:
        m = tl.arange(0, MEMBERS)
        known, there = tl.minimum(m, workers - 1), m < workers
        slot = tl.load(slots + m, mask=there, other=-1).to(tl.int32)
        present, size = slot >= 0, tl.load(sizes + known)
        entry = tl.load(table_of + known).to(tl.int32) * longest + tl.where(present, size, 2 * size)
        tl.store(members + MEMBER * m, tl.where(present, slot * 32, -1))
        tl.store(members + MEMBER * m + 1, 2 * entry)
        tl.store(members + MEMBER * m + 2, tl.where(present, 2, 0))
        tl.store(counts + m, 0, mask=there)
        tl.store(counts + workers + m, 0, mask=there)


# ---- shared memory, which Triton's interpreter does without ----------------------------------


@triton.jit
def _room(thread, BYTES: tl.constexpr):
    return tl.inline_asm_elementwise(
        f"{{ .shared .align 16 .b8 room[{BYTES}]; mov.u32 $0, room; }}", "=r,r", [thread], tl.uint32, False, 1
    )


@triton.jit
def _room_by_hand(thread, BYTES: tl.constexpr):
    return thread.to(tl.uint32)


@triton.jit
def _settle(base, members, thread, WORKERS: tl.constexpr):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $3, $4; @p cp.async.ca.shared.global [$1], [$2], 16;"
        "cp.async.wait_all; bar.sync 0; mov.u32 $0, 0; }", "=r,r,l,r,r",
        [base + 16 * thread.to(tl.uint32), (members + MEMBER * thread).to(tl.int64), thread, thread * 0 + WORKERS],
        tl.uint32, False, 1,
    )  # fmt: skip


@triton.jit
def _settle_by_hand(base, members, thread, WORKERS: tl.constexpr):
    pass


@triton.jit
def _member(base, members, m):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 none; ld.volatile.shared.v4.b32 {$0, $1, $2, none}, [$3]; }",
        "=r,=r,=r,r", [base + 16 * m], (tl.int32, tl.uint32, tl.uint32), False, 1,
    )  # fmt: skip


@triton.jit
def _member_in_memory(base, members, m):
    members += MEMBER * m
    nothing = base ^ base
    place, entry, part = tl.load(members), tl.load(members + 1), tl.load(members + 2)
    return place + nothing.to(tl.int32), entry.to(tl.uint32) + nothing, part.to(tl.uint32) + nothing


@triton.jit
def _ask(room, cells):
    tl.inline_asm_elementwise(
        "cp.async.cg.shared.global [$1], [$2], 16; mov.u32 $0, 0;",
        "=r,r,l", [room, cells.to(tl.int64)], tl.uint32, False, 1,
    )  # fmt: skip


@triton.jit
def _ask_word(room, byte):
    tl.inline_asm_elementwise(
        "{ .reg .b64 word; and.b64 word, $2, -4; cp.async.ca.shared.global [$1], [word], 4; mov.u32 $0, 0; }",
        "=r,r,l", [room, byte.to(tl.int64)], tl.uint32, False, 1,
    )  # fmt: skip


@triton.jit
def _asked(room):
    tl.inline_asm_elementwise("cp.async.commit_group; mov.u32 $0, 0;", "=r,r", [room], tl.uint32, False, 1)


@triton.jit
def _arrived(room):
    tl.inline_asm_elementwise(
        "cp.async.wait_group 0; bar.warp.sync -1; mov.u32 $0, 0;", "=r,r", [room], tl.uint32, False, 1
    )


@triton.jit
def _nothing_by_hand(room, pointer=None):
    pass


@triton.jit
def _take(room, cells):
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r", [room], (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False, 1,
    )  # fmt: skip


@triton.jit
def _take_by_hand(room, cells):
    return four_words(cells)


@triton.jit
def _take_byte(room, byte):
    return tl.inline_asm_elementwise("ld.volatile.shared.u8 $0, [$1];", "=r,r", [room], tl.uint32, False, 1)


@triton.jit
def _take_byte_by_hand(room, byte):
    return tl.load(byte).to(tl.uint32)


@triton.jit
def _put(cells, words, where):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.cs.v4.b32 [$1], {$3, $4, $5, $6}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r", [cells.to(tl.int64), where, words[0], words[1], words[2], words[3]],
        tl.uint32, False, 1,
    )  # fmt: skip


@triton.jit
def _put_by_hand(cells, words, where):
    for i in tl.static_range(4):
        tl.store(cells + i, words[i], mask=where != 0)


room_for = _room_by_hand if BY_HAND else _room  # where the program's shared memory begins
settle = _settle_by_hand if BY_HAND else _settle  # bring the numbers about workers there, for all threads
member_of = _member_in_memory if BY_HAND else _member  # those about worker m
ask = _nothing_by_hand if BY_HAND else _ask  # for 16 bytes of counters
ask_word = _nothing_by_hand if BY_HAND else _ask_word  # for the word that has this byte
asked = _nothing_by_hand if BY_HAND else _asked  # that was all
arrived = _nothing_by_hand if BY_HAND else _arrived  # wait until a warp has all it asked for
take = _take_by_hand if BY_HAND else _take  # what came from these cells
take_byte = _take_byte_by_hand if BY_HAND else _take_byte
put = _put_by_hand if BY_HAND else _put  # 16 bytes into memory


# ---- the vote --------------------------------------------------------------------------------


@triton.jit
def _bit(byte, k, SCALED):
    """Bit k of each byte, where it stands or, not SCALED, in the lowest place."""
    if SCALED:
        return (byte & (1 << k)).to(tl.int32)
    return ((byte >> k) & 1).to(tl.int32)


@triton.jit
def _weighed(sums, cells, y, voted, tables, entry, part, SCALED):
    """Add a worker's weights at eight coordinates, all to the first eight sums and those for to the others."""
    for k in tl.static_range(8):
        count = (cells[k // 2] >> 16) if k % 2 else (cells[k // 2] & 0xFFFF)
        weight = look_up(tables, count * part + entry)
        everybody, those_for = weight, weight * _bit(y, k, SCALED)
        if voted is not None:
            everybody = weight * _bit(voted, k, SCALED)
        sums = sums[:k] + (sums[k] + everybody,) + sums[k + 1 :]
        sums = sums[: 8 + k] + (sums[8 + k] + those_for,) + sums[9 + k :]
    return sums


@triton.jit
def _decided(sums, zero, VOTED, SCALED):
    """The bytes of where more are for than against, and of where as many."""
    more, least = zero, zero
    for k in tl.static_range(7, -1, -1):
        left = (sums[k] << k if SCALED and not VOTED else sums[k]) - 2 * sums[8 + k]
        more = (more << 1) | (left.to(tl.uint32, bitcast=True) >> 31)
        least = (least << 1) | ((left - 1).to(tl.uint32, bitcast=True) >> 31)
    return more, more ^ least


@triton.jit
def _spread(bits, i):
    """Bits 2 i and 2 i + 1 of a byte, which was multiplied by 0x8001, in the two halves of a word."""
    return (bits >> (2 * i)) & PAIR


@triton.jit
def _updated(words, y, voted, more, sure, live, missing_adds, SURE):
    """A worker's counters after the decision."""
    mine = live
    if voted is not None:
        mine &= voted
    against, missing = ((y ^ more) & mine & sure) * 0x8001, (mine ^ sure) * 0x8001
    new = ()
    for i in tl.static_range(4):
        word = words[i] + _spread(against, i) * 2
        if voted is not None or not SURE:
            word += _spread(missing, i) * missing_adds
        new = new + (word,)
    return new


@triton.jit
def _write(plane, new, live):
    """The new bits where they live, the old ones elsewhere."""
    old = tl.load(plane, mask=(live != 0) & (live != 255), other=0).to(tl.uint32)
    tl.store(plane, ((new & live) | (old & (live ^ 255))).to(tl.uint8), mask=live != 0)


@triton.jit
def _places(counters, at, stride, last):
    """Where the counters of the first worker stand for these bytes, and the bytes, none beyond the last word."""
    return counters + tl.minimum(at >> 3, last) * stride + (at & 7) * 4, tl.minimum(at, 8 * last + 7)


@triton.jit
def _member_at(base, members, m, ONCE):
    """Where a worker's counters and weights stand, and 2 if it takes part, else 0."""
    if ONCE:
        return member_of(base, members, m)
    return _member_in_memory(base, members, m)


@triton.jit
def _counters(room, cells, m, ONCE):
    """A thread's 16 bytes of worker m's counters."""
    if ONCE:
        return take(room + 16 * room.shape[0] * m, cells)
    return four_words(cells)


@triton.jit
def _ask_ballots(words, byte, votes, support, workers, stride, WORKERS):
    """Ask for a word of everybody's votes; a thread of a quad asks for every fourth worker's."""
    threads: tl.constexpr = words.shape[0]
    quarter = tl.arange(0, threads) % 4
    for i in tl.static_range((WORKERS + 3) // 4):
        worker = tl.minimum(4 * i + quarter, workers - 1) * stride + byte
        ask_word(words + 4 * threads * i, votes + worker)
        if support is not None:
            ask_word(words + 4 * threads * (4 + i), support + worker)


@triton.jit
def _ballot(words, plane, m, stride, byte, ONCE):
    """A thread's byte of worker m's votes."""
    if ONCE:
        threads: tl.constexpr = words.shape[0]
        from_thread = (tl.arange(0, threads) % 4 * 3).to(tl.uint32)  # the first of the quad, byte by byte
        words += m // 4 * (4 * threads) + m % 4 * 4 - from_thread
        return take_byte(words, plane + m * stride + byte)
    return tl.load(plane + m * stride + byte).to(tl.uint32)


@triton.jit(
    do_not_specialize=["workers", "stride", "missing_adds", "key", "first", "n", "last", "tiles"]
)  # fmt: skip
def vote_by_coordinate_(
    out, decided, votes, support, counters, members, tables, workers, stride: tl.int64,
    counter_stride: tl.int64, missing_adds, key: tl.int64, first: tl.int64, n: tl.int64, last: tl.int64,
    tiles: tl.int64, COIN: tl.constexpr, WORKERS: tl.constexpr, ONCE: tl.constexpr, SCALED: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Decide tiles of 32 bytes a warp: first everybody's weights, then, by the decision, everybody's counters.

    If there are few workers, at most WORKERS, their counters are read ONCE, ahead: the next tile's when
    this one's are done with. Each program takes every so many tiles.
    """
    THREADS: tl.constexpr = 32 * WARPS
    VOTED: tl.constexpr = support is not None
    MEMBERS: tl.constexpr = 16 * WORKERS  # bytes of shared memory
    COUNTERS: tl.constexpr = 16 * THREADS * WORKERS
    BALLOTS: tl.constexpr = 16 * THREADS * (2 if VOTED else 1)  # twice: of this tile and of the next
    thread = tl.arange(0, THREADS)
    zero, nothing = tl.zeros([THREADS], tl.uint32), zeros(16, THREADS)
    step, mine = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    base, room, words, turn = zero, zero, zero, tl.program_id(0).to(tl.uint32) * 0
    if ONCE:
        base = room_for(thread, MEMBERS + COUNTERS + 2 * BALLOTS)
        room = base + MEMBERS + 16 * thread.to(tl.uint32)
        words = base + (MEMBERS + COUNTERS) + 4 * thread.to(tl.uint32)
        settle(base, members, thread, WORKERS)
        cells, byte = _places(counters, mine * THREADS + thread, counter_stride, last)
        _ask_ballots(words, byte, votes, support, workers, stride, WORKERS)
        for m in range(workers):
            place, _, _ = member_of(base, members, m)
            ask(room + 16 * THREADS * m, cells + tl.maximum(place, 0))
        asked(room)
    for tile in range(mine, tiles, step):
        at = tile * THREADS + thread
        cells, byte = _places(counters, at, counter_stride, last)
        later, later_byte = _places(counters, at + step * THREADS, counter_stride, last)
        ballots = words + turn
        if ONCE:
            arrived(room)
            turn ^= BALLOTS
            _ask_ballots(words + turn, later_byte, votes, support, workers, stride, WORKERS)
        sums = nothing
        for m in tl.range(0, workers, loop_unroll_factor=UNROLL):
            place, entry, part = _member_at(base, members, m, ONCE)
            place = tl.maximum(place, 0)
            count = _counters(room, cells + place, m, ONCE)
            y, voted = _ballot(ballots, votes, m, stride, byte, ONCE), None
            if VOTED:
                voted = _ballot(ballots + 16 * THREADS, support, m, stride, byte, ONCE)
                y &= voted
            sums = _weighed(sums, count, y, voted, tables, entry, part, SCALED)

        more, same = _decided(sums, zero, VOTED, SCALED)
        live = (1 << tl.minimum(tl.maximum(n - 8 * at, 0), 8).to(tl.uint32)).to(tl.uint32) - 1
        sure = live
        if COIN:
            more |= same & (coin_words(key, first, at >> 2, False) >> (thread % 4 * 8).to(tl.uint32))
        else:
            sure &= same ^ 255
        _write(out + at, more, live)
        if decided is not None:
            _write(decided + at, sure, live)

        for m in tl.range(0, workers, loop_unroll_factor=UNROLL):
            place, _, _ = _member_at(base, members, m, ONCE)
            where = tl.where(place < 0, 0, live)
            place = tl.maximum(place, 0)
            count = _counters(room, cells + place, m, ONCE)
            if ONCE:
                ask(room + 16 * THREADS * m, later + place)
            y, voted = _ballot(ballots, votes, m, stride, byte, ONCE), None
            if VOTED:
                voted = _ballot(ballots + 16 * THREADS, support, m, stride, byte, ONCE)
            put(cells + place, _updated(count, y, voted, more, sure, live, missing_adds, COIN), where)
        if ONCE:
            asked(room)
    if ONCE:
        arrived(room)  # what nobody will use
