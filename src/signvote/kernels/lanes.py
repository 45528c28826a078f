"""Sixty-four coordinates at a time: the few vector instructions that numba does not generate by itself.

Each is written as target-independent LLVM vectors (`<64 x ...>`), so LLVM finds the best code for AVX2,
AVX-512 and NEON. `word` is a uint64 whose bit i belongs to element i of the 64 addressed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
BIT = ir.IntType(1)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
BYTES = ir.IntType(8).as_pointer()


def _splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A vector with `scalar` in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    zero = ir.Constant(INT32, 0)
    lane = builder.insert_element(undefined, scalar, zero)
    indices = ir.VectorType(INT32, lanes)
    first = ir.Constant(indices, [0] * lanes)
    return builder.shuffle_vector(lane, undefined, first)


def _address(
    context: Any,
    builder: Any,
    array: Any,
    array_type: Any,
    index: Any,
    lanes: int,
) -> Any:
    """Pointer to array[index], typed as `lanes` elements."""
    data = _data(context, builder, array, array_type)
    element = context.get_data_type(array_type.dtype)
    vector = ir.VectorType(element, lanes)
    address = builder.gep(data, [index])
    return builder.bitcast(address, vector.as_pointer())


def _data(context: Any, builder: Any, array: Any, array_type: Any) -> Any:
    """Pointer to the first element."""
    make = context.make_array(array_type)
    return make(context, builder, array).data


def _alignment(array_type: Any) -> int:
    return int(array_type.dtype.bitwidth) // 8


def _load(
    context: Any,
    builder: Any,
    array: Any,
    array_type: Any,
    index: Any,
    lanes: int = LANES,
) -> Any:
    address = _address(context, builder, array, array_type, index, lanes)
    loaded = builder.load(address)
    loaded.align = _alignment(array_type)
    return loaded


def _store(
    context: Any,
    builder: Any,
    value: Any,
    array: Any,
    array_type: Any,
    index: Any,
) -> None:
    address = _address(context, builder, array, array_type, index, value.type.count)
    stored = builder.store(value, address)
    stored.align = _alignment(array_type)


def _spread(builder: Any, word: Any) -> Any:
    """The bits of a uint64 as 64 booleans, by way of 16-bit lanes: bitcast alone is slow on AVX2."""
    quarters = builder.bitcast(word, ir.VectorType(INT16, 4))
    undefined = ir.Constant(quarters.type, ir.Undefined)
    quarter_of = [lane // 16 for lane in range(LANES)]
    which = ir.Constant(ir.VectorType(INT32, LANES), quarter_of)
    lanes = builder.shuffle_vector(quarters, undefined, which)
    bit_of = [1 << lane % 16 for lane in range(LANES)]
    own_bit = ir.Constant(lanes.type, bit_of)
    masked = builder.and_(lanes, own_bit)
    return builder.icmp_signed("==", masked, own_bit)


@intrinsic
def classify(typing: Any, integers: Any, index: Any, exponent: Any) -> Any:
    """(positive, zero, nonfinite) words of integers[index : index + 64], floats seen as integers.

    A float is zero when all bits but the first are, and not finite when all `exponent` bits are set;
    so denormals are numbers whatever the processor's flush mode is. Plain integers: exponent -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, bits = args
        x = _load(context, builder, array, signature.args[0], at)
        mask = _splat(builder, bits)
        nothing = ir.Constant(x.type, None)
        one = ir.Constant(x.type, [1] * LANES)
        magnitude = builder.shl(x, one)
        masked = builder.and_(x, mask)
        found = (
            builder.icmp_signed(">", x, nothing),
            builder.icmp_signed("==", magnitude, nothing),
            builder.icmp_signed("==", masked, mask),
        )
        word = ir.IntType(LANES)
        words = [builder.bitcast(booleans, word) for booleans in found]
        return context.make_tuple(builder, signature.return_type, words)

    three_words = types.UniTuple(types.uint64, 3)
    return three_words(integers, index, integers.dtype), generate


@intrinsic
def add_where(
    typing: Any,
    source: Any,
    i: Any,
    word: Any,
    amount: Any,
    target: Any,
    k: Any,
) -> Any:
    """target[k : k + 64] = source[i : i + 64] + amount where word has a 1, + 0 elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, bits, number, into, place = args
        x = _load(context, builder, array, signature.args[0], at)
        where = _spread(builder, bits)
        numbers = _splat(builder, number)
        nothing = ir.Constant(x.type, None)
        added = builder.select(where, numbers, nothing)
        total = builder.add(x, added)
        _store(context, builder, total, into, signature.args[4], place)
        return context.get_dummy_value()

    return types.void(source, i, types.uint64, source.dtype, target, k), generate


@intrinsic
def put_where(typing: Any, word: Any, value: Any, target: Any, k: Any) -> Any:
    """target[k : k + 64] = value where word has a 1; the rest stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, number, into, place = args
        array_type = signature.args[2]
        old = _load(context, builder, into, array_type, place)
        where = _spread(builder, bits)
        numbers = _splat(builder, number)
        new = builder.select(where, numbers, old)
        _store(context, builder, new, into, array_type, place)
        return context.get_dummy_value()

    return types.void(types.uint64, target.dtype, target, k), generate


@intrinsic
def step_where(
    typing: Any,
    floats: Any,
    index: Any,
    positive: Any,
    voted: Any,
    step: Any,
    keep: Any,
) -> Any:
    """floats[index : index + 8] *= keep; then -= step where positive, += step elsewhere, only where voted.

    The product is rounded before the sum, as in torch: nothing allows LLVM to fuse the two.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, at, positive_bits, voted_bits, size, factor = args
        array_type = signature.args[0]
        booleans = ir.VectorType(BIT, 8)
        before = _load(context, builder, array, array_type, at, 8)
        factors = _splat(builder, factor, 8)
        x = builder.fmul(before, factors)
        up = builder.bitcast(positive_bits, booleans)
        moves = builder.bitcast(voted_bits, booleans)
        steps = _splat(builder, size, 8)
        lower = builder.fsub(x, steps)
        higher = builder.fadd(x, steps)
        stepped = builder.select(up, lower, higher)
        moved = builder.select(moves, stepped, x)
        _store(context, builder, moved, array, array_type, at)
        return context.get_dummy_value()

    bits = (types.uint8, types.uint8)
    return types.void(floats, index, *bits, floats.dtype, floats.dtype), generate


@intrinsic
def peek(typing: Any, address: Any, index: Any) -> Any:
    """The int32 at memory address + 4 * index: one instruction, where an array would need two."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, entry = args
        table = builder.inttoptr(start, INT32.as_pointer())
        wide = builder.zext(entry, ir.IntType(64))
        entry_address = builder.gep(table, [wide])
        return builder.load(entry_address)

    return types.int32(types.uint64, types.uint32), generate


@intrinsic
def popcount(typing: Any, word: Any) -> Any:
    """Number of ones in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], to be written soon. Any index is safe: a hint never faults."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, at = args
        data = _data(context, builder, values, signature.args[0])
        element = builder.gep(data, [at])
        address = builder.bitcast(element, BYTES)
        hint_type = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (BYTES,), hint_type)
        write = ir.Constant(INT32, 1)
        keep = ir.Constant(INT32, 3)
        data_cache = ir.Constant(INT32, 1)
        builder.call(hint, [address, write, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, index), generate
