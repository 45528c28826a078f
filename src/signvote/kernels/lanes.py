"""Sixty-four coordinates at a time: the few vector instructions that numba does not generate by itself.

Each is written as target-independent LLVM vectors (`<64 x ...>`), so LLVM finds the best code for AVX2,
AVX-512 and NEON. `word` is a uint64 whose bit i belongs to element i of the 64 addressed.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

LANES = 64
REGISTER = 16  # words: 4 registers of AVX2, 2 of AVX-512
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


def _hint(*, to_write: bool) -> Any:
    """An intrinsic that asks for the cache line at a memory address. Any address is safe: a hint never faults."""

    @intrinsic
    def hint(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            line = builder.inttoptr(args[0], BYTES)
            kind = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
            declared = builder.module.declare_intrinsic("llvm.prefetch", (BYTES,), kind)
            write = ir.Constant(INT32, int(to_write))
            keep = ir.Constant(INT32, 3)
            data_cache = ir.Constant(INT32, 1)
            builder.call(declared, [line, write, keep, data_cache])
            return context.get_dummy_value()

        return types.void(types.uint64), generate

    return hint


prefetch = _hint(to_write=False)
prefetch_to_write = _hint(to_write=True)


# ---- a register of words ---------------------------------------------------------------------


class _Register(types.Type):  # type: ignore[misc]
    """REGISTER words that stay in the registers of the processor, with the operators ^, &, | and ~."""

    def __init__(self) -> None:
        super().__init__("Register")


register = _Register()


@register_model(_Register)
class _RegisterModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.VectorType(ir.IntType(64), REGISTER))


@intrinsic
def load(typing: Any, address: Any) -> Any:
    """The register at a memory address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(_place(builder, args[0]))
        loaded.align = 8
        return loaded

    return register(types.uint64), generate


@intrinsic
def store(typing: Any, value: Any, address: Any) -> Any:
    """Write a register to a memory address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[0], _place(builder, args[1]))
        stored.align = 8
        return context.get_dummy_value()

    return types.void(register, types.uint64), generate


def _place(builder: Any, address: Any) -> Any:
    """A memory address as a pointer to a register."""
    vector = ir.VectorType(ir.IntType(64), REGISTER)
    return builder.inttoptr(address, vector.as_pointer())


@intrinsic
def repeated(typing: Any, word: Any) -> Any:
    """The same word in every place of a register."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], REGISTER)

    return register(types.uint64), generate


@intrinsic
def ones_in(typing: Any, words: Any) -> Any:
    """The number of ones in each word of a register."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = args[0].type
        kind = ir.FunctionType(words, [words])
        count = builder.module.declare_intrinsic(f"llvm.ctpop.v{REGISTER}i64", fnty=kind)
        return builder.call(count, args)

    return register(register), generate


@intrinsic
def total(typing: Any, words: Any) -> Any:
    """The sum of the words of a register."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [args[0].type])
        add = builder.module.declare_intrinsic(f"llvm.vector.reduce.add.v{REGISTER}i64", fnty=kind)
        return builder.call(add, args)

    return types.uint64(register), generate


def _operator(symbol: Any, instruction: str) -> None:
    """Give registers an operator."""

    @intrinsic
    def both(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return register(register, register), generate

    @overload(symbol, strict=False)
    def for_registers(a: Any, b: Any) -> Any:
        if a is register and b is register:
            return lambda a, b: both(a, b)
        return None


_operator(operator.xor, "xor")
_operator(operator.and_, "and_")
_operator(operator.or_, "or_")
_operator(operator.add, "add")
