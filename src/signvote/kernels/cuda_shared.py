"""Shared memory for `cuda_trust`, in PTX: asynchronous copies from memory, and reads that wait for nothing.

Triton's interpreter has no shared memory. There the functions `..._by_hand` read memory directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from signvote.kernels.cuda_bits import BY_HAND, four_words

MEMBER = tl.constexpr(
    4
)  # numbers about a worker: where its counters are, its weights, its part; one is unused


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
        "cp.async.wait_all; bar.sync 0; mov.u32 $0, 0; }",
        "=r,r,l,r,r",
        [
            base + 16 * thread.to(tl.uint32),
            (members + MEMBER * thread).to(tl.int64),
            thread,
            thread * 0 + WORKERS,
        ],
        tl.uint32,
        False,
        1,
    )


@triton.jit
def _settle_by_hand(base, members, thread, WORKERS: tl.constexpr):
    pass


@triton.jit
def _member(base, members, m):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 none; ld.volatile.shared.v4.b32 {$0, $1, $2, none}, [$3]; }",
        "=r,=r,=r,r",
        [base + 16 * m],
        (tl.int32, tl.uint32, tl.uint32),
        False,
        1,
    )


@triton.jit
def member_in_memory(base, members, m):
    """The numbers about worker m, the same for every thread."""
    members += MEMBER * m
    nothing = base ^ base
    place = tl.load(members)
    entry = tl.load(members + 1)
    part = tl.load(members + 2)
    return (
        place + nothing.to(tl.int32),
        entry.to(tl.uint32) + nothing,
        part.to(tl.uint32) + nothing,
    )


@triton.jit
def _ask(room, cells):
    tl.inline_asm_elementwise(
        "cp.async.cg.shared.global [$1], [$2], 16; mov.u32 $0, 0;",
        "=r,r,l",
        [room, cells.to(tl.int64)],
        tl.uint32,
        False,
        1,
    )


@triton.jit
def _ask_word(room, byte):
    tl.inline_asm_elementwise(
        "{ .reg .b64 word; and.b64 word, $2, -4; cp.async.ca.shared.global [$1], [word], 4; mov.u32 $0, 0; }",
        "=r,r,l",
        [room, byte.to(tl.int64)],
        tl.uint32,
        False,
        1,
    )


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
        "=r,=r,=r,=r,r",
        [room],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        False,
        1,
    )


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
        "=r,l,r,r,r,r,r",
        [cells.to(tl.int64), where, words[0], words[1], words[2], words[3]],
        tl.uint32,
        False,
        1,
    )


@triton.jit
def _put_by_hand(cells, words, where):
    for i in tl.static_range(4):
        tl.store(cells + i, words[i], mask=where != 0)


room_for = _room_by_hand if BY_HAND else _room  # where the program's shared memory begins
settle = _settle_by_hand if BY_HAND else _settle  # bring the numbers about workers there, for all threads
member_of = member_in_memory if BY_HAND else _member  # those about worker m
ask = _nothing_by_hand if BY_HAND else _ask  # for 16 bytes of counters
ask_word = _nothing_by_hand if BY_HAND else _ask_word  # for the word that has this byte
asked = _nothing_by_hand if BY_HAND else _asked  # that was all
arrived = _nothing_by_hand if BY_HAND else _arrived  # wait until a warp has all it asked for
take = _take_by_hand if BY_HAND else _take  # what came from these cells
take_byte = _take_byte_by_hand if BY_HAND else _take_byte
put = _put_by_hand if BY_HAND else _put  # 16 bytes into memory
