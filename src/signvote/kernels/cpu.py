"""The kernels in numba, 64 coordinates to a machine word.

A vote is an adder network. Worker m's weight is written in signed digits, w = sum of +-2^k, at most
every second one not zero; each digit sends the worker's bits (inverted for a minus) into column k.
Whenever a column holds three planes, a full adder turns them into one there and a carry in the next:

    sum = a ^ b ^ c        carry = majority(a, b, c)        64 coordinates an instruction, exact

At the end the columns are the binary digits of the tally, and comparing them with half of the
largest possible tally gives the decision. Work per coordinate is about one adder per digit.

Threads share out words; counts are integers, so nothing depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

from signvote.kernels import WORD, Coin, Planes, reference, words_for
from signvote.kernels.lanes import (
    add_where,
    classify,
    popcount,
    prefetch,
    put_where,
    step_where,
)

Array = np.ndarray[Any, Any]
Counts = tuple[Array, Array]
T = TypeVar("T")

BLOCK = 128  # words a column is wide: 1 KiB, so that the planes of a vote stay in the first cache
COLUMNS = 56  # binary digits of the largest tally; column k has rows 2 k and 2 k + 1
SPARE = 2 * COLUMNS  # two rows for carries on their way
GROUP = 5  # workers whose weights are looked up together
WORDS_PER_THREAD = 4096  # less than this is not worth a thread
EXPONENT = {
    torch.float16: np.int16(0x7C00),
    torch.bfloat16: np.int16(0x7F80),
    torch.float32: np.int32(0x7F800000),
    torch.float64: np.int64(0x7FF0000000000000),
}

ZERO, ONES, ONE = np.uint64(0), np.uint64(2**64 - 1), np.uint64(1)
SHIFT_1, FACTOR_1 = (np.uint64(n) for n in reference.MIX[0])
SHIFT_2, FACTOR_2 = (np.uint64(n) for n in reference.MIX[1])
WEYL, SHIFT_3 = np.uint64(reference.WEYL), np.uint64(31)
SIX, LOW_SIX = np.uint64(6), np.uint64(63)

compiled = njit(nogil=True, cache=True, error_model="numpy")
inlined = njit(nogil=True, cache=True, error_model="numpy", inline="always")


# ---- coins -----------------------------------------------------------------------------------


@inlined
def _hash(key, index):  # type: ignore[no-untyped-def]
    z = (index + ONE) * WEYL + key
    z = (z ^ (z >> SHIFT_1)) * FACTOR_1
    z = (z ^ (z >> SHIFT_2)) * FACTOR_2
    return z ^ (z >> SHIFT_3)


@inlined
def _coin_word(key, first, word):  # type: ignore[no-untyped-def]
    """Coins of the 64 coordinates that start at first + 64 * word."""
    at = (first >> SIX) + np.uint64(word)
    by = first & LOW_SIX
    if by == ZERO:
        return _hash(key, at)
    return (_hash(key, at) >> by) | (_hash(key, at + ONE) << (np.uint64(64) - by))


# ---- signs -----------------------------------------------------------------------------------


@compiled
def _toss_(plane, where, key, first, at, n):  # type: ignore[no-untyped-def]
    """plane |= the coin's bits where `where` is 1; plane must be 0 there. Most often nowhere is."""
    anywhere = ZERO
    for j in range(n):
        anywhere |= where[j]
    if anywhere != ZERO:
        for j in range(n):
            plane[j] |= where[j] & _coin_word(key, first, at + j)


@compiled
def _sign_planes(integers, exponent, key, first, has_coin, signs, support, lo, hi):  # type: ignore[no-untyped-def]
    broken = ZERO
    zeros = np.empty(BLOCK, np.uint64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for j in range(n):
            signs[at + j], zeros[j], nonfinite = classify(integers, (at + j) * 64, exponent)
            broken |= nonfinite
        if has_coin:
            _toss_(signs[at : at + n], zeros, key, first, at, n)
        else:
            for j in range(n):
                support[at + j] = ~zeros[j]
    return broken == ZERO


def sign_planes(x: Tensor, coin: Coin | None) -> tuple[Planes, bool]:
    n, words = x.numel(), words_for(x.numel())
    signs = torch.empty(words, dtype=torch.int64)
    support = None if coin else torch.empty(words, dtype=torch.int64)
    exponent = EXPONENT[x.dtype]
    integers = x.view(reference.INTEGERS[x.element_size()]).numpy()
    planes = _arrays(Planes(signs, support), 1)
    whole, finite = n // WORD, True
    if whole:

        def work(lo: int, hi: int) -> bool:
            return bool(_sign_planes(integers, exponent, *_coin(coin), *planes, lo, hi))

        finite = all(_threaded(work, whole))
    if words > whole:  # the last word is partly padding: let the reference have it
        tail_coin = coin and Coin(coin.key, coin.first + whole * WORD)
        tail, tail_finite = reference.sign_planes(x[whole * WORD :], tail_coin)
        signs[whole:] = tail.signs
        if support is not None and tail.support is not None:
            support[whole:] = tail.support
        finite = finite and tail_finite
    return Planes(signs, support), finite


# ---- one weight per worker -------------------------------------------------------------------


@inlined
def _place(held, k):  # type: ignore[no-untyped-def]
    """The row for a plane that column k gains: its free slot, or a spare row if it holds two."""
    return 2 * k + held[k] if held[k] < 2 else SPARE + (k & 1)


@inlined
def _full_add_(a, b, b_flip, c, c_flip, carry):  # type: ignore[no-untyped-def]
    """a, carry <- the two binary digits of a + b + c; b and c may be inverted."""
    for j in range(BLOCK):
        x, y, z = a[j], b[j] ^ b_flip, c[j] ^ c_flip
        carry[j] = (x & y) | ((x ^ y) & z)
        a[j] = x ^ y ^ z


@compiled
def _gain_(planes, held, k, row):  # type: ignore[no-untyped-def]
    """Column k gains the plane in row `row`, which lies at _place(held, k)."""
    while held[k] == 2:
        carry = _place(held, k + 1)
        _full_add_(
            planes[2 * k], planes[2 * k + 1], ZERO, planes[row], ZERO, planes[carry]
        )
        held[k] = 1
        row = carry
        k += 1
    held[k] += 1


@compiled
def _tally_(planes, held, votes, digit, at):  # type: ignore[no-untyped-def]
    """Columns <- sum over digits of 2^k (1 + Y) when everybody voted."""
    i = 0
    while i < len(digit):
        k, flip = digit[i, 0] + 1, np.uint64(digit[i, 2])
        vote = votes[digit[i, 1], at : at + BLOCK]
        i += 1
        carry = _place(held, k + 1)
        if held[k] == 2:
            _full_add_(planes[2 * k], planes[2 * k + 1], ZERO, vote, flip, planes[carry])
        elif held[k] == 1 and i < len(digit) and digit[i, 0] + 1 == k:
            other, other_flip = votes[digit[i, 1], at : at + BLOCK], np.uint64(digit[i, 2])
            i += 1
            _full_add_(planes[2 * k], vote, flip, other, other_flip, planes[carry])
        else:
            slot = planes[2 * k + held[k]]
            for j in range(BLOCK):
                slot[j] = vote[j] ^ flip
            held[k] += 1
            continue
        held[k] = 1
        _gain_(planes, held, k + 1, carry)


@compiled
def _tally_partial_(planes, held, votes, support, digit, at):  # type: ignore[no-untyped-def]
    """Columns <- sum over digits of 2^k (1 + Y): 2 for a vote for, 1 for none, 0 for one against."""
    for i in range(len(digit)):
        k, m, flip = digit[i, 0], digit[i, 1], np.uint64(digit[i, 2])
        vote, voted = votes[m, at : at + BLOCK], support[m, at : at + BLOCK]
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
def _compare_(planes, held, top, half, more, same):  # type: ignore[no-untyped-def]
    """more, same <- where the tally exceeds, equals `half`, from the lowest digit to the highest."""
    more[:], same[:] = ZERO, ONES
    for k in range(top):
        digit, second = planes[2 * k], planes[2 * k + 1]
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


@inlined
def _inside(word, begin, end):  # type: ignore[no-untyped-def]
    """The bits of a word that lie in begin <= coordinate < end."""
    low, high = begin - word * 64, end - word * 64
    if high <= 0 or low >= 64:
        return ZERO
    mask = ONES << np.uint64(max(low, 0))
    return mask & (ONES >> np.uint64(64 - min(high, 64)))


@compiled
def _vote_(out, decided, votes, support, digit, key, first, has_coin, begin, end, lo, hi):  # type: ignore[no-untyped-def]
    workers = votes.shape[0]
    differ, cast = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    planes, held = np.empty((SPARE + 2, BLOCK), np.uint64), np.zeros(COLUMNS, np.int64)
    more, same = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
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
            live[j] = _inside(at + j, begin, end)
        if has_coin:
            _toss_(more, same, key, first, at, BLOCK)
        else:
            for j in range(BLOCK):
                same[j] = ~same[j]
            _write_(decided[at : at + BLOCK], same, live)
        _write_(out[at : at + BLOCK], more, live)
        if not has_coin:
            for j in range(BLOCK):
                live[j] &= same[j]
        _count_(differ, cast, votes, support, more, live, at)
    return differ, cast


@compiled
def _write_(target, plane, where):  # type: ignore[no-untyped-def]
    """target <- plane where `where` is 1."""
    for j in range(BLOCK):
        target[j] = (target[j] & ~where[j]) | (plane[j] & where[j])


@compiled
def _count_(differ, cast, votes, support, decision, live, at):  # type: ignore[no-untyped-def]
    """Add each worker's votes among the live coordinates, and those against the decision."""
    everyone = ZERO
    for j in range(BLOCK):
        everyone += popcount(live[j])
    for m in range(votes.shape[0]):
        vote = votes[m, at : at + BLOCK]
        wrong, cast_here = ZERO, everyone
        if support.shape[0]:
            voted = support[m, at : at + BLOCK]
            cast_here = ZERO
            for j in range(BLOCK):
                cast_here += popcount(live[j] & voted[j])
                wrong += popcount((vote[j] ^ decision[j]) & live[j] & voted[j])
        else:
            for j in range(BLOCK):
                wrong += popcount((vote[j] ^ decision[j]) & live[j])
        differ[m] += np.int64(wrong)
        cast[m] += np.int64(cast_here)


def _signed_digits(weights: Tensor) -> Array:
    """The weights as rows (k, worker, flip): each stands for +2^k, or -2^k where flip is all ones.

    The non-adjacent form: of neighbouring binary digits at most one is not zero, a third in all.
    """
    w = weights.numpy().astype(np.int64)
    half, whole = np.abs(w) >> 1, np.abs(w) + (np.abs(w) >> 1)
    plus, minus = whole & ~half, half & ~whole
    k = np.arange(32)[:, None]
    column, worker = np.nonzero((plus | minus) >> k & 1)
    negative = (minus[worker] >> column & 1) != (w[worker] < 0)
    return np.stack([column, worker, -negative.astype(np.int64)], axis=1)


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Whole blocks in place; the last block, where words are missing, on a padded copy."""
    digit = _signed_digits(weights)
    low, high = span[0] // WORD, words_for(span[1])
    whole = low + (high - low) // BLOCK * BLOCK

    def work(lo: int, hi: int, planes: Planes, ballots: Planes, shift: int) -> Counts:
        toss = coin and Coin(coin.key, coin.first + shift * WORD)
        return _vote_(  # type: ignore[no-any-return]
            *_arrays(planes, 1), *_arrays(ballots, 2), digit, *_coin(toss),
            span[0] - shift * WORD, span[1] - shift * WORD, lo, hi,
        )  # fmt: skip

    counts = _threaded(lambda lo, hi: work(low + lo, low + hi, out, votes, 0), whole - low)
    if high > whole:
        last_out, last_votes = _padded(out, whole, high), _padded(votes, whole, high)
        counts.append(work(0, BLOCK, last_out, last_votes, whole))
        for plane, last in zip(out, last_out, strict=True):
            if plane is not None and last is not None:
                plane[whole:high] = last[: high - whole]
    return _summed(counts, len(weights))


def _padded(planes: Planes, low: int, high: int) -> Planes:
    """A copy of words low to high, filled up to a block."""
    pad = (0, BLOCK - (high - low))
    return Planes(*(None if p is None else torch.nn.functional.pad(p[..., low:high], pad) for p in planes))


# ---- one weight per worker and coordinate ----------------------------------------------------


@compiled
def _vote_by_coordinate_(  # type: ignore[no-untyped-def]
    out, decided, votes, support, counters, slots, tables, table_of, sizes,
    key, first, has_coin, end, zero_is_symbol, lo, hi,
):  # fmt: skip
    workers, stride = votes.shape[0], counters.shape[1] * 64
    count = counters.reshape(-1)
    differ, cast = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    tally, index = np.empty(64, np.int32), np.zeros(64 * GROUP, np.uint16)
    weight, row = tables.reshape(-1), np.zeros(GROUP, np.uint64)
    for w in range(lo, hi):
        tally[:] = 0
        for m in range(0, workers, GROUP):
            group = min(GROUP, workers - m)
            for g in range(group):
                at, size = w * stride + slots[m + g] * 64, sizes[m + g]
                prefetch(count, at + stride)
                prefetch(count, at + stride + 32)
                add_where(count, at, votes[m + g, w], size, index, 64 * g)
                if support.shape[0]:
                    put_where(~support[m + g, w], np.uint16(2 * size), index, 64 * g)
                row[g] = np.uint64(table_of[m + g] * tables.shape[1])
            if group == GROUP:
                a, b, c, d, e = row[0], row[1], row[2], row[3], row[4]
                for i in range(64):
                    tally[i] += (
                        weight[a + index[i]]
                        + weight[b + index[i + 64]]
                        + weight[c + index[i + 128]]
                        + weight[d + index[i + 192]]
                        + weight[e + index[i + 256]]
                    )
            else:
                for g in range(group):
                    a = row[g]
                    for i in range(64):
                        tally[i] += weight[a + index[i + 64 * g]]
        more, same, _ = classify(tally, 0, np.int32(-1))
        live = _inside(w, 0, end)
        if has_coin:
            more |= same & _coin_word(key, first, w)
            sure = live
        else:
            sure = live & ~same
            decided[w] = sure
        out[w] = more & live
        for m in range(workers):
            at = w * stride + slots[m] * 64
            voted = support[m, w] if support.shape[0] else ONES
            both = voted & sure
            wrong = (votes[m, w] ^ more) & both
            differ[m] += np.int64(popcount(wrong))
            cast[m] += np.int64(popcount(both))
            if zero_is_symbol:
                wrong |= (voted ^ sure) & live
            elif both != live:
                add_where(count, at, live & ~both, np.uint16(1), count, at)
            add_where(count, at, wrong, np.uint16(2), count, at)
    return differ, cast


def vote_by_coordinate_(
    out: Planes,
    votes: Planes,
    counters: Tensor,
    slots: Tensor,
    tables: Tensor,
    table_of: Tensor,
    sizes: Tensor,
    coin: Coin | None,
    n: int,
    zero_is_symbol: bool,
) -> tuple[Tensor, Tensor]:
    planes, ballots = _arrays(out, 1), _arrays(votes, 2)
    trust = counters.numpy(), slots.numpy(), tables.numpy(), table_of.numpy()

    def work(lo: int, hi: int) -> Counts:
        return _vote_by_coordinate_(  # type: ignore[no-any-return]
            *planes, *ballots, *trust, sizes.numpy().astype(np.uint16),
            *_coin(coin), n, zero_is_symbol, lo, hi,
        )  # fmt: skip

    return _summed(_threaded(work, words_for(n)), len(slots))


# ---- pairs, steps ----------------------------------------------------------------------------


@compiled
def _disagreements(votes, support, end, lo, hi):  # type: ignore[no-untyped-def]
    workers = votes.shape[0]
    differ = np.zeros((workers, workers), np.int64)
    both = np.zeros((workers, workers), np.int64)
    for at in range(lo, hi, BLOCK):
        n = min(BLOCK, hi - at)
        for a in range(workers):
            for b in range(a, workers):
                row_a, row_b = votes[a, at : at + n], votes[b, at : at + n]
                wrong, common = ZERO, ZERO
                if support.shape[0]:
                    voted_a, voted_b = support[a, at : at + n], support[b, at : at + n]
                    for j in range(n):
                        wrong += popcount((row_a[j] ^ row_b[j]) & voted_a[j] & voted_b[j])
                        common += popcount(voted_a[j] & voted_b[j])
                else:
                    for j in range(n):
                        wrong += popcount(row_a[j] ^ row_b[j])
                    common = np.uint64(min(end, (at + n) * 64) - at * 64)
                differ[a, b] += np.int64(wrong)
                both[a, b] += np.int64(common)
    return differ, both


def disagreements(votes: Planes, n: int) -> tuple[Tensor, Tensor]:
    ballots = _arrays(votes, 2)

    def work(lo: int, hi: int) -> Counts:
        return _disagreements(*ballots, n, lo, hi)  # type: ignore[no-any-return]

    workers = votes.signs.shape[0]
    differ, both = _summed(_threaded(work, words_for(n)), (workers, workers))
    return differ + differ.triu(1).T, both + both.triu(1).T


@inlined
def _word_at(plane, bit):  # type: ignore[no-untyped-def]
    """The 64 bits of a plane that start anywhere; zeros beyond its end."""
    w, by = bit // 64, np.uint64(bit % 64)
    word = plane[w] >> by
    if by != ZERO and w + 1 < plane.size:
        word |= plane[w + 1] << (np.uint64(64) - by)
    return word


@compiled
def _step_(x, signs, support, begin, step, lo, hi):  # type: ignore[no-untyped-def]
    for w in range(lo, hi):
        positive = _word_at(signs, begin + w * 64)
        voted = _word_at(support, begin + w * 64) if support.size else ONES
        for q in range(8):
            by = np.uint64(8 * q)
            step_where(x, w * 64 + 8 * q, np.uint8(positive >> by), np.uint8(voted >> by), step)


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    whole = x.numel() // WORD if x.dtype in (torch.float32, torch.float64) else 0
    if whole:
        values, planes = x.detach().numpy(), _arrays(decision, 1)
        size = values.dtype.type(step)
        _threaded(lambda lo, hi: _step_(values, *planes, begin, size, lo, hi), whole)
    tail, at = x[whole * WORD :], begin + whole * WORD
    if tail.numel():
        rest = Planes(*(None if p is None else p[at // WORD :] for p in decision))
        reference.step_(tail, rest, at % WORD, step)


# ---- between torch and numba -----------------------------------------------------------------


def _arrays(planes: Planes, dimensions: int) -> tuple[Array, Array]:
    """Both planes as numpy words; a missing one has no elements."""
    missing = np.empty((0,) * dimensions, np.uint64)
    signs, support = (missing if p is None else p.numpy().view(np.uint64) for p in planes)
    return signs, support


def _coin(coin: Coin | None) -> tuple[np.uint64, np.uint64, bool]:
    return (np.uint64(coin.key), np.uint64(coin.first), True) if coin else (ZERO, ZERO, False)


def _threaded(work: Callable[[int, int], T], words: int) -> list[T]:
    """work(lo, hi) over the words, on as many threads as torch may use and the work is worth."""
    threads = max(1, min(torch.get_num_threads(), words // WORDS_PER_THREAD))
    step = max(1, -(-words // (threads * BLOCK))) * BLOCK
    spans = [(lo, min(lo + step, words)) for lo in range(0, words, step)]
    if len(spans) <= 1:
        return [work(lo, hi) for lo, hi in spans]
    with ThreadPoolExecutor(len(spans)) as pool:
        return list(pool.map(lambda span: work(*span), spans))


def _summed(counts: list[Counts], shape: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    first: Array = sum((c[0] for c in counts), np.zeros(shape, np.int64))
    second: Array = sum((c[1] for c in counts), np.zeros(shape, np.int64))
    return torch.from_numpy(first), torch.from_numpy(second)
