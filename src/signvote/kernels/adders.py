"""A vote as an adder network, 64 coordinates to a machine word, 1,024 to a register.

Worker m's weight is written in signed digits, w = sum of +-2^k, at most every second one not zero;
each digit sends the worker's bits (inverted for a minus) into column k. From the lowest column to the
highest, full adders turn three planes into one there and a carry in the next:

    sum = a ^ b ^ c        carry = majority(a, b, c)        exact

One plane is left in each column, a binary digit of the tally. Comparing all digits with those of half of the
largest tally gives the decision. Work per coordinate is about one adder per digit. The sum of a column
stays in a register, so an adder costs two loads and a store.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from signvote.kernels.lanes import REGISTER, load, ones_in, popcount, prefetch, repeated, store, total
from signvote.kernels.words import ONES, ZERO, Array, Word, Words, compiled, inside, toss_

FRAMES = 8  # parts of a block: REGISTER words of every plane
BLOCK_BYTES = 2**17  # of all planes, where the workers allow it: the second cache holds a block
NEXT = np.uint64(8 * REGISTER)  # bytes from one register in memory to the next
LINE = np.uint64(64)  # bytes of a cache line
ONE = np.uint64(1)
TWO = np.uint64(2)


class Network(NamedTuple):
    """Which planes are added, sorted by column. Input i is the register at home[i] + frame * moves[i]."""

    home: Words  # a plane's place in a frame, or the address of a carry
    moves: Words  # 1: a plane; 0: a carry
    flip: Words  # all ones: the input is inverted
    ends: Words  # for each column, its last input + 1
    half: Word  # of the largest tally
    carries: Words  # those made in even columns, then those made in odd ones


def network(digit: Array, workers: int, *, has_support: bool) -> Network:
    """The network for signed digits: see `cpu._signed_digits`. A frame has the votes' planes, then the support's.

    The tally is the sum of 2^k (1 + Y) over the digits: a vote for adds a one to column k + 1, and a silent worker
    one to column k. For a minus both are inverted, which makes the tally and its half 2^k larger.
    """
    k, m, flip = digit.T
    half = np.sum(1 << k)
    column = k + 1
    if has_support:
        half += np.sum((1 << k) * (flip != 0))
        column = np.concatenate([column, k])
        m = np.concatenate([m, workers + m])
        flip = np.concatenate([flip, ~flip])
    columns = max(1, int(np.sum(1 << column)).bit_length())
    made = _carries(np.bincount(column, minlength=columns))
    side = max(made) * REGISTER
    carries = torch.empty(2, side, dtype=torch.int64).numpy()  # torch starts it at a cache line
    number = np.concatenate([np.arange(n) for n in made])
    after = np.repeat(np.arange(columns), made)
    address = carries.ctypes.data + 8 * (side * (after % 2) + REGISTER * number)
    into = np.concatenate([column, after + 1])
    order = np.argsort(into, kind="stable")
    home = np.concatenate([m * int(NEXT), address])[order]
    moves = (order < len(column)).astype(np.uint64)
    flips = np.concatenate([flip, np.zeros(len(after), np.int64)])[order]
    ends = np.searchsorted(into[order], np.arange(columns), side="right")
    return Network(
        home.astype(np.uint64),
        moves,
        flips.astype(np.uint64),
        ends.astype(np.uint64),
        np.uint64(half),
        carries.view(np.uint64),
    )


def room(planes: int) -> Words:
    """Memory for the frames of a block."""
    frames = BLOCK_BYTES // (8 * REGISTER * max(1, planes))
    shape = (min(max(1, frames), FRAMES), planes, REGISTER)
    return torch.empty(shape, dtype=torch.int64).numpy().view(np.uint64)


def _carries(votes: Array) -> list[int]:
    """How many carries each column makes, from its votes and the carries of the column before."""
    made = []
    carried = 0
    for n in votes.tolist():
        carried = (n + carried) // 2
        made.append(carried)
    return made


@compiled
def _compare_(
    more: Words,
    same: Words,
    block: Words,
    home: Words,
    moves: Words,
    flip: Words,
    ends: Words,
    half: Word,
    carries: Words,
) -> None:
    """Set more, same <- where the tally exceeds, equals `half`, frame by frame."""
    frame = np.uint64(block.ctypes.data)
    place = np.uint64(more.ctypes.data)
    other = np.uint64(same.ctypes.data)
    for _ in range(len(block)):
        above = repeated(ZERO)
        equal = repeated(ONES)
        i = ZERO
        for k in range(len(ends)):
            end = ends[k]
            carry = np.uint64(carries[k % 2].ctypes.data)
            kept = repeated(ZERO)
            if (end - i) & ONE:
                kept = load(home[i] + frame * moves[i]) ^ repeated(flip[i])
                i += ONE
            while i < end:
                x = load(home[i] + frame * moves[i]) ^ repeated(flip[i])
                y = load(home[i + ONE] + frame * moves[i + ONE]) ^ repeated(flip[i + ONE])
                either = x ^ y
                store((x & y) | (either & kept), carry)
                kept = kept ^ either
                carry += NEXT
                i += TWO
            if (half >> np.uint64(k)) & ONE:
                above = above & kept
                equal = equal & kept
            else:
                above = above | kept
                equal = equal & (kept ^ repeated(ONES))
        store(above, place)
        store(equal, other)
        frame += np.uint64(block.strides[0])
        place += NEXT
        other += NEXT


@compiled
def vote_words_(
    out: Words,
    decided: Words,
    votes: Words,
    support: Words,
    block: Words,
    home: Words,
    moves: Words,
    flip: Words,
    ends: Words,
    half: Word,
    carries: Words,
    key: Word,
    first: Word,
    has_coin: bool,
    begin: int,
    end: int,
    lo: int,
    hi: int,
) -> tuple[Array, Array]:
    """`Backend.vote_` on words lo to hi. Other threads may work on other words meanwhile.

    Planes that are missing have no elements. `block` is room for frames, (frames, planes, REGISTER).
    Only coordinates begin to end are written and counted.
    """
    workers = votes.shape[0]
    differ = np.zeros(workers, np.int64)
    cast = np.zeros(workers, np.int64)
    width = block.shape[0] * REGISTER
    more = np.empty(width, np.uint64)
    same = np.empty(width, np.uint64)
    live = np.empty(width, np.uint64)
    for at in range(lo, hi, width):
        n = min(width, hi - at)
        _gather_(block, 0, votes, at, n)
        _gather_(block, workers, support, at, n)
        _compare_(more, same, block, home, moves, flip, ends, half, carries)
        _limit_(live, at, begin, end)
        if has_coin:
            toss_(more, same, key, first, at, n)
        for j in range(width):
            same[j] = ~same[j]
        if not has_coin:
            _write_(decided[at : at + n], same, live)
        _write_(out[at : at + n], more, live)
        for j in range(width):
            live[j] &= same[j]  # a tie shows nothing about a worker
        _count_(differ, cast, block, more, live)
    return differ, cast


@compiled
def _gather_(block: Words, row: int, planes: Words, at: int, n: int) -> None:
    """Copy words at to at + n of these planes into the frames, from a row on; zeros follow the last word."""
    frame_size = np.uint64(block.strides[0])
    width = np.uint64(8 * len(block) * REGISTER)
    for m in range(planes.shape[0]):
        source = np.uint64(planes.ctypes.data) + np.uint64(m * planes.strides[0] + 8 * at)
        target = np.uint64(block.ctypes.data) + NEXT * np.uint64(row + m)
        for _ in range(n // REGISTER):
            prefetch(source + width)
            prefetch(source + width + LINE)
            store(load(source), target)
            source += NEXT
            target += frame_size
    if n < len(block) * REGISTER:
        _gather_end_(block, row, planes, at, n)


@compiled
def _gather_end_(block: Words, row: int, planes: Words, at: int, n: int) -> None:
    """The same for the frames that words fill only in part, or not at all."""
    for f in range(n // REGISTER, len(block)):
        for m in range(planes.shape[0]):
            for j in range(REGISTER):
                word = f * REGISTER + j
                block[f, row + m, j] = planes[m, at + word] if word < n else ZERO


@compiled
def _write_(target: Words, plane: Words, where: Words) -> None:
    """Set target <- plane where `where` is 1."""
    for j in range(len(target)):
        old = target[j] & ~where[j]
        new = plane[j] & where[j]
        target[j] = old | new


@compiled
def _limit_(live: Words, at: int, begin: int, end: int) -> None:
    """Set live <- the coordinates begin to end of the words from `at` on."""
    if begin <= 64 * at and 64 * (at + len(live)) <= end:
        live[:] = ONES
        return
    for j in range(len(live)):
        live[j] = inside(at + j, begin, end)


@compiled
def _count_(differ: Array, cast: Array, block: Words, decision: Words, live: Words) -> None:
    """Add each worker's votes among the live coordinates, and those against the decision."""
    workers = len(differ)
    frames, planes, _ = block.shape
    frame_size = np.uint64(block.strides[0])
    first = np.uint64(block.ctypes.data)
    everyone = ZERO
    for j in range(len(live)):
        everyone += popcount(live[j])
    for m in range(workers):
        frame = first + NEXT * np.uint64(m)
        d = np.uint64(decision.ctypes.data)
        w = np.uint64(live.ctypes.data)
        wrong = repeated(ZERO)
        votes = repeated(ZERO)
        for _ in range(frames):
            counted = load(w)
            if planes > workers:
                counted = counted & load(frame + NEXT * np.uint64(workers))
                votes = votes + ones_in(counted)
            wrong = wrong + ones_in((load(frame) ^ load(d)) & counted)
            frame += frame_size
            d += NEXT
            w += NEXT
        differ[m] += np.int64(total(wrong))
        cast[m] += np.int64(total(votes) if planes > workers else everyone)
