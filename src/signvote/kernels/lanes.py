"""Sixty-four coordinates at a time: the few vector instructions that numba cannot be talked into.

Each is written as target-independent LLVM vectors (`<64 x ...>`), so AVX2, AVX-512 and NEON all get
their own best code. `word` is a uint64 whose bit i belongs to element i of the 64 addressed.
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
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    lane = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    first = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(lane, undefined, first)


def _address(context: Any, builder: Any, array: Any, array_type: Any, index: Any, lanes: int) -> Any:
    """Pointer to array[index], typed as `lanes` elements."""
    data = context.make_array(array_type)(context, builder, array).data
    vector = ir.VectorType(context.get_data_type(array_type.dtype), lanes)
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _alignment(array_type: Any) -> int:
    return int(array_type.dtype.bitwidth) // 8


def _load(context: Any, builder: Any, array: Any, array_type: Any, index: Any, lanes: int = LANES) -> Any:
    loaded = builder.load(_address(context, builder, array, array_type, index, lanes))
    loaded.align = _alignment(array_type)
    return loaded


def _store(context: Any, builder: Any, value: Any, array: Any, array_type: Any, index: Any) -> None:
    address = _address(context, builder, array, array_type, index, value.type.count)
    builder.store(value, address).align = _alignment(array_type)


def _spread(builder: Any, word: Any) -> Any:
    """The bits of a uint64 as 64 booleans, by way of 16-bit lanes: bitcast alone is slow on AVX2."""
    quarters = builder.bitcast(word, ir.VectorType(INT16, 4))
    undefined = ir.Constant(quarters.type, ir.Undefined)
    which = ir.Constant(ir.VectorType(INT32, LANES), [lane // 16 for lane in range(LANES)])
    lanes = builder.shuffle_vector(quarters, undefined, which)
    own_bit = ir.Constant(lanes.type, [1 << lane % 16 for lane in range(LANES)])
    return builder.icmp_signed("==", builder.and_(lanes, own_bit), own_bit)


@intrinsic
def classify(typing: Any, integers: Any, index: Any, exponent: Any) -> Any:
    """(positive, zero, nonfinite) words of integers[index : index + 64], floats seen as integers.

    A float is zero when all bits but the first are, and not finite when all `exponent` bits are set;
    so denormals are numbers whatever the processor's flush mode is. Plain integers: exponent -1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, args[0], signature.args[0], args[1])
        mask = _splat(builder, args[2])
        nothing = ir.Constant(x.type, None)
        magnitude = builder.shl(x, ir.Constant(x.type, [1] * LANES))
        found = (
            builder.icmp_signed(">", x, nothing),
            builder.icmp_signed("==", magnitude, nothing),
            builder.icmp_signed("==", builder.and_(x, mask), mask),
        )
        words = [builder.bitcast(bits, ir.IntType(LANES)) for bits in found]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 3)(integers, index, integers.dtype), generate


@intrinsic
def add_where(typing: Any, source: Any, i: Any, word: Any, amount: Any, target: Any, k: Any) -> Any:
    """target[k : k + 64] = source[i : i + 64] + amount where word has a 1, + 0 elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, args[0], signature.args[0], args[1])
        where = _spread(builder, args[2])
        added = builder.select(where, _splat(builder, args[3]), ir.Constant(x.type, None))
        _store(context, builder, builder.add(x, added), args[4], signature.args[4], args[5])
        return context.get_dummy_value()

    return types.void(source, i, types.uint64, source.dtype, target, k), generate


@intrinsic
def put_where(typing: Any, word: Any, value: Any, target: Any, k: Any) -> Any:
    """target[k : k + 64] = value where word has a 1; the rest stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old = _load(context, builder, args[2], signature.args[2], args[3])
        where = _spread(builder, args[0])
        new = builder.select(where, _splat(builder, args[1]), old)
        _store(context, builder, new, args[2], signature.args[2], args[3])
        return context.get_dummy_value()

    return types.void(types.uint64, target.dtype, target, k), generate


@intrinsic
def step_where(typing: Any, floats: Any, index: Any, positive: Any, voted: Any, step: Any) -> Any:
    """floats[index : index + 8] -= step where positive, += step elsewhere, only where voted."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, args[0], signature.args[0], args[1], 8)
        up, moves = (builder.bitcast(bits, ir.VectorType(BIT, 8)) for bits in args[2:4])
        step = _splat(builder, args[4], 8)
        stepped = builder.select(up, builder.fsub(x, step), builder.fadd(x, step))
        moved = builder.select(moves, stepped, x)
        _store(context, builder, moved, args[0], signature.args[0], args[1])
        return context.get_dummy_value()

    return types.void(floats, index, types.uint8, types.uint8, floats.dtype), generate


@intrinsic
def peek(typing: Any, address: Any, index: Any) -> Any:
    """The int32 at memory address + 4 * index: one instruction, where an array would need two."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = builder.inttoptr(args[0], INT32.as_pointer())
        wide = builder.zext(args[1], ir.IntType(64))
        return builder.load(builder.gep(table, [wide]))

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
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), BYTES)
        signature_ = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (BYTES,), signature_)
        write, keep, data_cache = (ir.Constant(INT32, n) for n in (1, 3, 1))
        builder.call(hint, [address, write, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, index), generate
