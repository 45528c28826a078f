"""Weights per coordinate without looking them up: a curve through a table, and how far it is off at most.

A rule's table has the weight of each value c of a counter, 0 to 2 R. A log-likelihood ratio depends on c - R alone,
but for a constant, and is odd. So a polynomial in 16-bit integers comes close to it, 64 coordinates at a time:

    d = c - R        u = d * factor        v = 8 u^2 - 1        4 w ~ base + u (a4 + v (a3 + v (a2 + v (a1 + v a0))))

A product of two numbers of 16 bits is the upper half of their product, so u is a number in (-1/2, 1/2) and v one in
(-1, 1), and coefficients double with each power. Near its ends, where p is below 0.1 or above 0.9, the table is too
steep for this: counters that are further from R than `reach` are `far`.

Nothing is left to chance: `error` is the largest difference to the table at all other values of a counter. Where a
tally is further from zero than the errors of all its curves together, its sign is that of the exact tally.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from signvote.kernels.lanes import INT16, INT32, LANES, _data, _load, _splat, _spread, _store
from signvote.kernels.words import Array

UNIT = 4  # of a curve, in those of a table: quarters
DEGREE = 4
REACH = 0.8  # of R
FIELDS = ("center", "factor", "reach", "span", "base")  # of a curve in memory, then its coefficients
WIDTH = len(FIELDS) + DEGREE + 1
TOGETHER = 3  # curves whose sum fits 16 bits
LARGEST = 2**15 // TOGETHER - 1
WORST = 32 * UNIT  # error of a curve that is of no use
COPIES = 32  # of a field, side by side in memory: a register of AVX-512, or two of AVX2
NODES = 64  # counters that a curve is fitted to
HALF = ir.VectorType(INT16, LANES)
WHOLE = ir.VectorType(INT32, LANES)


class Curves(NamedTuple):
    """The curves of all tables."""

    curves: Array  # (tables, WIDTH) int16
    error: Array  # (tables,): in quarters


def curves(tables: Array, sizes: Sequence[int]) -> Curves:
    """The curve of each table, from its weights of votes for +1."""
    found = [_curve(row[size : 2 * size].tobytes()) for row, size in zip(tables, sizes, strict=True)]
    rows, errors = zip(*found, strict=True)
    return Curves(np.stack(rows), np.array(errors))


@lru_cache(maxsize=64)
def _curve(table: bytes) -> tuple[Array, int]:
    """A curve and its error; with an error above WORST it is of no use."""
    weights: Array = np.frombuffer(table, np.int32).astype(np.int64) * UNIT
    center = len(weights) // 2
    base = int(weights[center])
    reach = center
    if (weights != base).any():
        reach = int(REACH * center)
    factor = (2**15 - 1) // max(1, reach)
    curve = np.zeros(WIDTH, np.int16)
    curve[: len(FIELDS)] = np.array([center, factor, reach, 2 * reach, base]).astype(np.uint16).view(np.int16)
    coefficients = _fitted(weights[center + 1 : center + reach + 1] - base, factor)
    if max(np.abs(coefficients).max(), abs(base)) >= 2**15:
        return curve, WORST + 1
    curve[len(FIELDS) :] = coefficients
    near = np.arange(center - reach, center + reach + 1)
    approximate = values(curve, near)
    error = np.abs(approximate - weights[near]).max()
    fits = np.abs(approximate).max() <= LARGEST
    return curve, int(error) if fits else WORST + 1


def _fitted(weights: Array, factor: int) -> Array:
    """The coefficients, highest power first, for the weights at d = 1, 2, ..., less the base."""
    if not weights.any():
        return np.zeros(DEGREE + 1)
    last = len(weights)
    d = np.unique(np.linspace(1, last, min(last, NODES)).astype(np.int64))
    u = d * factor / 2**16
    v = 8 * u**2 - 1
    powers = u[:, None] * (v / 2)[:, None] ** np.arange(DEGREE + 1)
    found = np.linalg.lstsq(powers, weights[d - 1], rcond=None)[0]
    coefficients: Array = np.rint(found[::-1])
    return coefficients


def values(curve: Array, counters: Array) -> Array:
    """What `add_curve` adds for votes for +1, as int64: the same integers."""
    center, factor, _, _, base, *coefficients = curve.astype(np.int64).tolist()
    u = (counters - center) * factor
    v = (-(2**13) - (u * -u >> 16)) * 4
    total = np.full_like(u, coefficients[0])
    for coefficient in coefficients[1:]:
        total = (total * v >> 16) + coefficient
    return (u * total >> 16) + base  # type: ignore[no-any-return]


# ---- the same in compiled code ---------------------------------------------------------------


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
