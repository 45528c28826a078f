"""Triton on bits: coins, masks, adders, and the two kernels between numbers and signs.

Planes are seen here as 32-bit words, two for each 64-bit word of `Planes` in the same order: a GPU's
registers, shifts and logic are 32 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from signvote.kernels import reference

BITS = tl.constexpr(32)
ONES = tl.constexpr(0xFFFFFFFF)
WEYL = tl.constexpr(reference.WEYL)
SHIFT_1, FACTOR_1 = (tl.constexpr(number) for number in reference.MIX[0])
SHIFT_2, FACTOR_2 = (tl.constexpr(number) for number in reference.MIX[1])
SHIFT_3 = tl.constexpr(31)


@triton.jit
def zeros(count, size):
    """A tuple of `count` sums, each of one number a thread or so."""
    sums = ()
    for _ in tl.static_range(count):
        zero = tl.zeros([size], tl.int32)
        sums = sums + (zero,)
    return sums


@triton.jit
def flipped(x):
    """~x, which Triton's interpreter cannot do with unsigned words."""
    return x ^ ONES


@triton.jit
def full_add(a, b, c):
    """The two binary digits of a + b + c, 32 coordinates at once: two instructions."""
    low = a ^ b ^ c
    high = (a & b) | (c & (a | b))
    return low, high


@triton.jit
def _popcount(x):
    return libdevice.popc(x.to(tl.int32, bitcast=True))


@triton.jit
def _popcount_by_hand(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _look_up(table, offset):
    return tl.inline_asm_elementwise(
        "{ .reg .b64 entry; cvt.u64.u32 entry, $2; add.s64 entry, $1, entry; ld.global.nc.s16 $0, [entry]; }",
        "=r,l,r",
        [table.to(tl.int64), offset],
        tl.int32,
        True,
        1,
    )


@triton.jit
def _look_up_by_hand(table, offset):
    entry = table + (offset >> 1).to(tl.int32)
    return tl.load(entry).to(tl.int32)


@triton.jit
def _four_words(pointer):
    return tl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [pointer.to(tl.int64)],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        False,
        1,
    )


@triton.jit
def _two_words(pointer):
    return tl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        [pointer.to(tl.int64)],
        (tl.uint32, tl.uint32),
        False,
        1,
    )


@triton.jit
def _two_words_by_hand(pointer):
    return tl.load(pointer), tl.load(pointer + 1)


@triton.jit
def _four_words_by_hand(pointer):
    low = _two_words_by_hand(pointer)
    high = _two_words_by_hand(pointer + 2)
    return low + high


@triton.jit
def _product(sums, a, b):
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,0,1,2,3",
        [
            a[0],
            a[1],
            a[2],
            a[3],
            b[0],
            b[1],
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
def _product_by_hand(sums, a, b):
    warps: tl.constexpr = b[0].shape[0] // 32
    by = tl.arange(0, 4).to(tl.uint32) * 8
    both = tl.join(b[0], b[1])
    columns = tl.reshape(both, [warps, 8, 8, 1]) << (24 - by)
    columns = columns.to(tl.int32, bitcast=True) >> 24
    columns = tl.reshape(columns.to(tl.float32), [warps, 8, 32])
    columns = tl.permute(columns, [0, 2, 1])
    added = ()
    for i in tl.static_range(2):
        joined = tl.join(a[i], a[i + 2])
        rows = (tl.reshape(joined, [warps, 8, 8, 1]) >> by) & 255
        rows = tl.reshape(rows.to(tl.float32), [warps, 8, 32])
        products = tl.dot(rows, columns).to(tl.int32)
        by_thread = tl.reshape(products, [warps * 32, 2])
        added = added + tl.split(by_thread)
    return (
        sums[0] + added[0],
        sums[1] + added[1],
        sums[2] + added[2],
        sums[3] + added[3],
    )


@triton.jit
def _turned(word, thread):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d, e, f; shfl.sync.idx.b32 a, $4, 0, 0x1c1f, -1;"
        "shfl.sync.idx.b32 b, $4, 1, 0x1c1f, -1; shfl.sync.idx.b32 c, $4, 2, 0x1c1f, -1;"
        "shfl.sync.idx.b32 d, $4, 3, 0x1c1f, -1; prmt.b32 e, a, b, 0x5140; prmt.b32 f, c, d, 0x5140;"
        "prmt.b32 a, a, b, 0x7362; prmt.b32 c, c, d, 0x7362; prmt.b32 $0, e, f, 0x5410;"
        "prmt.b32 $1, e, f, 0x7632; prmt.b32 $2, a, c, 0x5410; prmt.b32 $3, a, c, 0x7632; }",
        "=&r,=&r,=&r,=&r,r",
        [word],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        False,
        1,
    )


@triton.jit
def _turned_by_hand(word, thread):
    words = ()
    for k in tl.static_range(4):
        turned = tl.zeros(word.shape, tl.uint32)
        for i in tl.static_range(4):
            other = tl.gather(word, thread // 4 * 4 + i, 0)
            byte = (other >> 8 * k) & 255
            turned |= byte << 8 * i
        words = words + (turned,)
    return words


@triton.jit
def _of_quad(word, thread):
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $4, 0, 0x1c1f, -1; shfl.sync.idx.b32 $1, $4, 1, 0x1c1f, -1;"
        "shfl.sync.idx.b32 $2, $4, 2, 0x1c1f, -1; shfl.sync.idx.b32 $3, $4, 3, 0x1c1f, -1;",
        "=&r,=&r,=&r,=&r,r",
        [word],
        (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        False,
        1,
    )


@triton.jit
def _of_quad_by_hand(word, thread):
    words = ()
    for i in tl.static_range(4):
        other = tl.gather(word, thread // 4 * 4 + i, 0)
        words = words + (other,)
    return words


# Triton's interpreter, in which the kernels run without a GPU, knows no libdevice and no instructions.
BY_HAND = triton.knobs.runtime.interpret
popcount = _popcount_by_hand if BY_HAND else _popcount  # the ones in each word
look_up = _look_up_by_hand if BY_HAND else _look_up  # int16 so many bytes into a table
four_words = _four_words_by_hand if BY_HAND else _four_words
two_words = _two_words_by_hand if BY_HAND else _two_words
product = _product_by_hand if BY_HAND else _product  # of votes' and weights' bytes: see `cuda_votes`
turned = _turned_by_hand if BY_HAND else _turned  # the four threads' first bytes, their second, ...
of_quad = _of_quad_by_hand if BY_HAND else _of_quad  # the words that the four threads of a quad hold


@triton.jit
def inside(word, begin, end):
    """The bits of 32-bit words that lie in begin <= coordinate < end."""
    low = tl.maximum(begin - word * BITS, 0)
    spare = tl.maximum(word * BITS - end + BITS, 0)
    ones = tl.full(word.shape, ONES, tl.uint32)
    above = tl.where(low < BITS, ones << low.to(tl.uint32), 0)
    below = tl.where(spare < BITS, ones >> spare.to(tl.uint32), 0)
    return above & below


@triton.jit
def _hash(key, index):
    z = (index + 1).to(tl.uint64) * WEYL + key.to(tl.uint64)
    z = (z ^ (z >> SHIFT_1)) * FACTOR_1
    z = (z ^ (z >> SHIFT_2)) * FACTOR_2
    return z ^ (z >> SHIFT_3)


@triton.jit
def coin_words(key, first, word, ALIGNED):
    """Coins of the 32 coordinates that start at first + 32 word; ALIGNED: first is a multiple of 32."""
    at = first + word.to(tl.int64) * BITS
    by = (at & 63).to(tl.uint64)
    coins = _hash(key, at >> 6) >> by
    if not ALIGNED:
        following = _hash(key, (at >> 6) + 1) << ((64 - by) & 63)
        coins |= tl.where(by > BITS, following, 0)
    return coins.to(tl.uint32)


@triton.jit(do_not_specialize=["key", "first", "n"])
def sign_planes_(
    x,
    signs,
    support,
    finite,
    key: tl.int64,
    keys,
    first: tl.int64,
    n: tl.int64,
    stride: tl.int64,
    words: tl.int64,
    blocks,
    MAGNITUDE: tl.constexpr,
    EXPONENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Signs of one block of one row. x is seen as integers: a denormal is no zero, whatever the flush mode.

    A missing `support` means that zeros toss a coin: `key`'s, or where there are `keys` the row's own.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    start = block * WORDS
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, BITS)
    left = tl.minimum(n - start * BITS, WORDS * BITS).to(tl.int32)
    at = word[:, None] * BITS + lane[None, :]
    x += row * stride + start * BITS
    if left == WORDS * BITS:  # no mask: loads 16 bytes wide
        number = tl.load(x + at)
    else:
        number = tl.load(x + at, mask=at < left, other=0)
    if number.dtype == tl.int16:
        number = number.to(tl.int32)
    magnitude = number & MAGNITUDE
    broken = tl.max(magnitude) >= EXPONENT
    tl.store(finite + row, False, mask=broken)

    bit = (1 << lane.to(tl.uint32))[None, :].to(tl.uint32)
    plus_bits = tl.where(number > 0, bit, 0)
    zero_bits = tl.where(magnitude == 0, bit, 0)
    plus = tl.sum(plus_bits.to(tl.uint32), 1)
    zero = tl.sum(zero_bits.to(tl.uint32), 1)
    live = inside(word, 0, left)
    here = row * words + start + word
    mask = word < words - start
    if support is None:
        if keys is not None:
            key = tl.load(keys + row)
        coins = coin_words(key, first, start + word, ALIGNED)
        plus |= zero & coins & live
    else:
        tl.store(support + here, flipped(zero) & live, mask=mask)
    tl.store(signs + here, plus, mask=mask)


@triton.jit
def _word_at(plane, word, words, by, ALIGNED):
    """The 32 bits of a plane that start `by` bits into a word; nothing beyond the plane's end."""
    bits = tl.load(plane + word, mask=word < words, other=0)
    if not ALIGNED:
        after = tl.load(plane + word + 1, mask=word + 1 < words, other=0)
        bits = (bits >> by) | (after << (BITS - by))
    return bits


@triton.jit(do_not_specialize=["begin", "n"])
def step_(
    x,
    signs,
    support,
    begin: tl.int64,
    words: tl.int64,
    n: tl.int64,
    minus_step: tl.float64,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Step: x <- x + (-step) sign, in the type torch computes in: WIDE is float64, else float32."""
    real = tl.float64 if WIDE else tl.float32
    start = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, BITS)
    left = tl.minimum(n - start * BITS, WORDS * BITS).to(tl.int32)
    at = word[:, None] * BITS + lane[None, :]
    x += start * BITS
    first = begin // BITS + start
    by = (begin % BITS).to(tl.uint32)
    sign_words = _word_at(signs, first + word, words, by, ALIGNED)
    positive = (sign_words[:, None] >> lane.to(tl.uint32)) & 1
    sign = tl.where(positive != 0, 1.0, -1.0).to(real)
    if support is not None:
        support_words = _word_at(support, first + word, words, by, ALIGNED)
        voted = (support_words[:, None] >> lane.to(tl.uint32)) & 1
        sign = tl.where(voted != 0, sign, 0.0)
    moved = tl.full([1, 1], minus_step, real) * sign
    if left == WORDS * BITS:
        before = tl.load(x + at)
        after = before.to(real) + moved
        tl.store(x + at, after.to(x.dtype.element_ty))
    else:
        old = tl.load(x + at, mask=at < left, other=0)
        new = old.to(real) + moved
        tl.store(x + at, new.to(x.dtype.element_ty), mask=at < left)


@triton.jit
def step_all_(
    table,
    signs,
    support,
    blocks,
    step: tl.float32,
    keep: tl.float32,
    decided,
    BLOCK: tl.constexpr,
):
    """Step one block of a float32 tensor: x <- keep x - step sign, rounded after each of both, as two launches would.

    A column of the table, (3, blocks): the address of the block, the coordinate of its first element, its elements.
    """
    block = tl.program_id(0)
    x = tl.load(table + block).to(tl.pointer_type(tl.float32))
    first = tl.load(table + blocks + block)
    left = tl.load(table + 2 * blocks + block).to(tl.int32)
    at = tl.arange(0, BLOCK)
    inside = at < left
    coordinate = first + at
    word = coordinate // BITS
    bit = (coordinate % BITS).to(tl.uint32)
    positive = (tl.load(signs + word, mask=inside, other=0) >> bit) & 1
    sign = tl.where(positive != 0, 1.0, -1.0)
    if support is not None:
        voted = (tl.load(support + word, mask=inside, other=0) >> bit) & 1
        sign = tl.where(voted != 0, sign, 0.0)
    if decided is not None:
        keep = tl.where(tl.load(decided), keep, 1.0)
    before = tl.load(x + at, mask=inside, other=0)
    tl.store(x + at, before * keep - step * sign, mask=inside)
