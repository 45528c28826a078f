"""Sixty-four coordinates at a time: the weights of `curves.py` in compiled code, with the same integers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from signvote.kernels.curves import WIDTH
from signvote.kernels.lanes import INT16, INT32, LANES, _data, _load, _splat, _spread, _store

COPIES = 32  # of a field, side by side in memory: a register of AVX-512, or two of AVX2
HALF = ir.VectorType(INT16, LANES)
WHOLE = ir.VectorType(INT32, LANES)


def _times(builder: Any, a: Any, b: Any) -> Any:
    """The upper halves of products: one instruction on AVX2 and AVX-512."""
    product = builder.mul(builder.sext(a, WHOLE), builder.sext(b, WHOLE))
    upper = builder.lshr(product, ir.Constant(WHOLE, [16] * LANES))
    return builder.trunc(upper, HALF)


@intrinsic
def add_curve(
    typing: Any,
    counters: Any,
    i: Any,
    vote: Any,
    voted: Any,
    curves: Any,
    at: Any,
    sums: Any,
) -> Any:
    """Add to sums the weights of counters[i : i + 64] by the curve at curves[at], with the signs of a vote.

    Where a worker did not vote, nothing is added. Returns where it did, with a counter too far for the curve.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, place, positive, has_voted, known, start, into = args
        kinds = signature.args
        memory = _data(context, builder, known, kinds[4])
        address = builder.gep(memory, [start])

        def field(k: int) -> Any:
            entry = builder.gep(address, [ir.Constant(ir.IntType(64), k * COPIES)])
            loaded = builder.load(builder.bitcast(entry, ir.VectorType(INT16, COPIES).as_pointer()))
            loaded.align = 2
            twice = ir.Constant(ir.VectorType(INT32, LANES), [lane % COPIES for lane in range(LANES)])
            return builder.shuffle_vector(loaded, loaded, twice)

        center, factor, reach, span, base, *coefficients = map(field, range(WIDTH))
        nothing = ir.Constant(HALF, None)
        d = builder.sub(_load(context, builder, source, kinds[0], place), center)
        u = builder.mul(d, factor)
        minus_square = _times(builder, u, builder.sub(nothing, u))  # LLVM takes longer for u^2
        quarter = builder.sub(ir.Constant(HALF, [-(2**13)] * LANES), minus_square)
        v = builder.shl(quarter, ir.Constant(HALF, [2] * LANES))
        total = coefficients[0]
        for coefficient in coefficients[1:]:
            total = builder.add(_times(builder, total, v), coefficient)
        w = builder.add(_times(builder, u, total), base)
        up = _spread(builder, positive)
        moves = _spread(builder, has_voted)
        signed = builder.select(up, w, builder.sub(nothing, w))
        added = builder.select(moves, signed, nothing)
        zero = ir.Constant(ir.IntType(64), 0)
        before = _load(context, builder, into, kinds[6], zero)
        _store(context, builder, builder.add(before, added), into, kinds[6], zero)
        far = builder.icmp_unsigned(">", builder.add(d, reach), span)
        return builder.and_(builder.bitcast(far, ir.IntType(64)), has_voted)

    word = types.uint64
    return word(counters, i, word, word, curves, types.int64, sums), generate


@intrinsic
def move_sums(typing: Any, sums: Any, tally: Any) -> Any:
    """Add 64 sums to a tally, whose numbers have more bits, and set them to 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.IntType(64), 0)
        few = _load(context, builder, args[0], signature.args[0], zero)
        many = _load(context, builder, args[1], signature.args[1], zero)
        total = builder.add(many, builder.sext(few, WHOLE))
        _store(context, builder, total, args[1], signature.args[1], zero)
        _store(context, builder, ir.Constant(HALF, None), args[0], signature.args[0], zero)
        return context.get_dummy_value()

    return types.void(sums, tally), generate


@intrinsic
def within(typing: Any, tally: Any, bound: Any) -> Any:
    """A word: where the size of a tally is at most the bound."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.IntType(64), 0)
        values = _load(context, builder, args[0], signature.args[0], zero)
        bound = _splat(builder, args[1])
        shifted = builder.add(values, bound)
        close = builder.icmp_unsigned("<=", shifted, builder.add(bound, bound))
        return builder.bitcast(close, ir.IntType(64))

    return types.uint64(tally, types.int32), generate
