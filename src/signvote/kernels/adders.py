"""A vote as an adder network, 64 coordinates to a machine word.

Worker m's weight is written in signed digits, w = sum of +-2^k, at most every second one not zero;
each digit sends the worker's bits (inverted for a minus) into column k. Whenever a column holds three
planes, a full adder turns them into one there and a carry in the next:

    sum = a ^ b ^ c        carry = majority(a, b, c)        64 coordinates an instruction, exact

At the end the columns are the binary digits of the tally, and comparing them with half of the
largest possible tally gives the decision. Work per coordinate is about one adder per digit.
"""

from __future__ import annotations

import numpy as np

from signvote.kernels.lanes import popcount
from signvote.kernels.words import BLOCK, ONES, ZERO, Array, Word, Words, compiled, inlined, inside, toss_

COLUMNS = 56  # binary digits of the largest tally; column k has rows 2 k and 2 k + 1
SPARE = 2 * COLUMNS  # two rows for carries on their way


@inlined
def _place(held: Array, k: int) -> int:
    """The row for a plane that column k gains: its free slot, or a spare row if it holds two."""
    if held[k] < 2:
        return 2 * k + held[k]  # type: ignore[no-any-return]
    return SPARE + (k & 1)


@inlined
def _full_add_(
    a: Words,
    b: Words,
    b_flip: Word,
    c: Words,
    c_flip: Word,
    carry: Words,
) -> None:
    """Set a, carry <- the two binary digits of a + b + c; b and c may be inverted."""
    for j in range(BLOCK):
        x = a[j]
        y = b[j] ^ b_flip
        z = c[j] ^ c_flip
        carry[j] = (x & y) | ((x ^ y) & z)
        a[j] = x ^ y ^ z


@compiled
def _gain_(planes: Words, held: Array, k: int, row: int) -> None:
    """Column k gains the plane in row `row`, which lies at _place(held, k)."""
    while held[k] == 2:
        carry = _place(held, k + 1)
        first = planes[2 * k]
        second = planes[2 * k + 1]
        _full_add_(first, second, ZERO, planes[row], ZERO, planes[carry])
        held[k] = 1
        row = carry
        k += 1
    held[k] += 1


@compiled
def _tally_(planes: Words, held: Array, votes: Words, digit: Array, at: int) -> None:
    """Columns <- sum over digits of 2^k (1 + Y) when all workers voted."""
    i = 0
    while i < len(digit):
        k = digit[i, 0] + 1
        flip = np.uint64(digit[i, 2])
        vote = votes[digit[i, 1], at : at + BLOCK]
        i += 1
        carry = _place(held, k + 1)
        if held[k] == 2:
            first = planes[2 * k]
            second = planes[2 * k + 1]
            _full_add_(first, second, ZERO, vote, flip, planes[carry])
        elif held[k] == 1 and i < len(digit) and digit[i, 0] + 1 == k:
            other = votes[digit[i, 1], at : at + BLOCK]
            other_flip = np.uint64(digit[i, 2])
            i += 1
            first = planes[2 * k]
            _full_add_(first, vote, flip, other, other_flip, planes[carry])
        else:
            slot = planes[2 * k + held[k]]
            for j in range(BLOCK):
                slot[j] = vote[j] ^ flip
            held[k] += 1
            continue
        held[k] = 1
        _gain_(planes, held, k + 1, carry)


@compiled
def _tally_partial_(
    planes: Words,
    held: Array,
    votes: Words,
    support: Words,
    digit: Array,
    at: int,
) -> None:
    """Columns <- sum over digits of 2^k (1 + Y): 2 for a vote for, 1 for an abstention, 0 for a vote against."""
    for i in range(len(digit)):
        k = digit[i, 0]
        m = digit[i, 1]
        flip = np.uint64(digit[i, 2])
        vote = votes[m, at : at + BLOCK]
        voted = support[m, at : at + BLOCK]
        row = _place(held, k)
        plane = planes[row]
        for j in range(BLOCK):
            plane[j] = ~voted[j]
        _gain_(planes, held, k, row)
        row = _place(held, k + 1)
        plane = planes[row]
        for j in range(BLOCK):
            plane[j] = vote[j] ^ (flip & voted[j])
        _gain_(planes, held, k + 1, row)


@compiled
def _compare_(
    planes: Words,
    held: Array,
    top: int,
    half: int,
    more: Words,
    same: Words,
) -> None:
    """Set more, same <- where the tally exceeds, equals `half`, from the lowest digit to the highest."""
    more[:] = ZERO
    same[:] = ONES
    for k in range(top):
        digit = planes[2 * k]
        second = planes[2 * k + 1]
        if held[k] == 0:
            digit[:] = ZERO
        elif held[k] == 2:
            row = _place(held, k + 1)
            carry = planes[row]
            for j in range(BLOCK):
                carry[j] = digit[j] & second[j]
                digit[j] ^= second[j]
            _gain_(planes, held, k + 1, row)
        if (half >> k) & 1:
            for j in range(BLOCK):
                more[j] &= digit[j]
                same[j] &= digit[j]
        else:
            for j in range(BLOCK):
                more[j] |= digit[j]
                same[j] &= ~digit[j]


@compiled
def vote_blocks_(
    out: Words,
    decided: Words,
    votes: Words,
    support: Words,
    digit: Array,
    key: Word,
    first: Word,
    has_coin: bool,
    begin: int,
    end: int,
    lo: int,
    hi: int,
) -> tuple[Array, Array]:
    """`Backend.vote_` on words lo to hi, whole blocks of them. Other threads may work on other words meanwhile.

    Planes that are missing have no elements. `digit` has the weights' signed digits, sorted by their
    place: see `cpu._signed_digits`. Only coordinates begin to end are written and counted.
    """
    workers = votes.shape[0]
    differ = np.zeros(workers, np.int64)
    cast = np.zeros(workers, np.int64)
    planes = np.empty((SPARE + 2, BLOCK), np.uint64)
    held = np.zeros(COLUMNS, np.int64)
    more = np.empty(BLOCK, np.uint64)
    same = np.empty(BLOCK, np.uint64)
    live = np.empty(BLOCK, np.uint64)
    half = np.int64(0)
    for i in range(len(digit)):
        half += np.int64(1) << digit[i, 0]
    top = 1
    while (2 * half) >> top:
        top += 1
    for at in range(lo, hi, BLOCK):
        held[:] = 0
        if support.shape[0]:
            _tally_partial_(planes, held, votes, support, digit, at)
        else:
            _tally_(planes, held, votes, digit, at)
        _compare_(planes, held, top, half, more, same)

        for j in range(BLOCK):
            live[j] = inside(at + j, begin, end)
        if has_coin:
            toss_(more, same, key, first, at, BLOCK)
        for j in range(BLOCK):
            same[j] = ~same[j]
        if not has_coin:
            _write_(decided[at : at + BLOCK], same, live)
        _write_(out[at : at + BLOCK], more, live)
        for j in range(BLOCK):
            live[j] &= same[j]  # a tie shows nothing about a worker
        _count_(differ, cast, votes, support, more, live, at)
    return differ, cast


@compiled
def _write_(target: Words, plane: Words, where: Words) -> None:
    """Set target <- plane where `where` is 1."""
    for j in range(BLOCK):
        kept = target[j] & ~where[j]
        new = plane[j] & where[j]
        target[j] = kept | new


@compiled
def _count_(
    differ: Array,
    cast: Array,
    votes: Words,
    support: Words,
    decision: Words,
    live: Words,
    at: int,
) -> None:
    """Add each worker's votes among the live coordinates, and those against the decision."""
    everyone = ZERO
    for j in range(BLOCK):
        everyone += popcount(live[j])
    for m in range(votes.shape[0]):
        vote = votes[m, at : at + BLOCK]
        wrong = ZERO
        cast_here = everyone
        if support.shape[0]:
            voted = support[m, at : at + BLOCK]
            cast_here = ZERO
            for j in range(BLOCK):
                counted = live[j] & voted[j]
                cast_here += popcount(counted)
                wrong += popcount((vote[j] ^ decision[j]) & counted)
        else:
            for j in range(BLOCK):
                wrong += popcount((vote[j] ^ decision[j]) & live[j])
        differ[m] += np.int64(wrong)
        cast[m] += np.int64(cast_here)
