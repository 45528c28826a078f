"""The kernels of `Backend` in numba: what torch hands over, split among threads, padded to full blocks.

Threads share out words; counts are integers, so nothing depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from signvote.kernels import WORD, Coin, Coins, CoordinateWeights, Planes, loops, reference, words_for
from signvote.kernels.adders import vote_blocks_
from signvote.kernels.words import BLOCK, ONES, ZERO, Array

Counts = tuple[Array, Array]
T = TypeVar("T")

WORDS_PER_THREAD = 4096  # less than this is not worth a thread


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
    """Whole words in place; the last, where coordinates are missing, on a copy padded with zeros."""
    if x.ndim == 2:
        return _sign_rows(x, coin)
    assert not isinstance(coin, Coins)
    n, whole = x.numel(), x.numel() // WORD
    signs = torch.empty(words_for(n), dtype=torch.int64)
    support = None if coin else torch.empty_like(signs)
    planes = _arrays(Planes(signs, support), 1)
    integers = x.view(reference.INTEGERS[x.element_size()]).numpy()
    exponent = integers.dtype.type(reference.EXPONENT[x.dtype])

    def work(lo: int, hi: int) -> bool:
        return bool(loops.sign_planes(integers, exponent, *_coin(coin), *planes, lo, hi))

    finite = all(_threaded(work, whole))
    if n % WORD:
        tail = np.zeros(WORD, integers.dtype)
        tail[: n % WORD] = integers[whole * WORD :]
        toss = coin and coin.after(whole * WORD)
        last = tuple(p[whole:] for p in planes)
        finite &= bool(loops.sign_planes(tail, exponent, *_coin(toss), *last, 0, 1))
        last[0][0] &= ONES >> np.uint64(WORD - n % WORD)
    return Planes(signs, support), finite


def _sign_rows(x: Tensor, coins: Coin | Coins | None) -> tuple[Planes, Tensor]:
    """Row by row."""
    tosses: list[Coin | None] = [None] * len(x)
    if isinstance(coins, Coins):
        tosses = [Coin(key % 2**64, coins.first) for key in coins.keys.tolist()]
    rows, finite = zip(*(sign_planes(row, toss) for row, toss in zip(x, tosses, strict=True)), strict=True)
    support = None if coins else torch.stack([planes.support for planes in rows])
    return Planes(torch.stack([planes.signs for planes in rows]), support), torch.tensor(finite)


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
        toss = coin and coin.after(shift * WORD)
        return vote_blocks_(  # type: ignore[no-any-return]
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
    return planes.map(lambda p: torch.nn.functional.pad(p[..., low:high], pad))


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """Word by word, counters and all; who takes no part is left out first."""
    counters, slots, tables, table_of, sizes, zero_is_symbol = weights
    present = slots >= 0
    if not present.all():
        voters = votes.map(lambda p: p[present])
        theirs = weights._replace(slots=slots[present], table_of=table_of[present], sizes=sizes[present])
        counts = torch.zeros(2, len(slots), dtype=torch.int64)
        counts[:, present] = torch.stack(vote_by_coordinate_(out, voters, theirs, coin, n))
        return counts[0], counts[1]
    planes, ballots = _arrays(out, 1), _arrays(votes, 2)
    rows = tables.data_ptr() + table_of.numpy() * tables.stride(0) * tables.element_size()
    trust = counters.numpy(), slots.numpy(), rows.astype(np.uint64), sizes.numpy().astype(np.uint16)

    def work(lo: int, hi: int) -> Counts:
        return loops.vote_by_coordinate_(  # type: ignore[no-any-return]
            *planes, *ballots, *trust, *_coin(coin), n, zero_is_symbol, lo, hi
        )

    return _summed(_threaded(work, words_for(n)), len(slots))


def disagreements(votes: Planes, n: int) -> tuple[Tensor, Tensor]:
    """Half of the pairs are counted, and mirrored."""
    ballots = _arrays(votes, 2)

    def work(lo: int, hi: int) -> Counts:
        return loops.disagreements(*ballots, n, lo, hi)  # type: ignore[no-any-return]

    workers = votes.signs.shape[0]
    differ, both = _summed(_threaded(work, words_for(n)), (workers, workers))
    return differ + differ.triu(1).T, both + both.triu(1).T


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    """Whole words of float32 and float64 here; what is left, and the half floats, by `reference`."""
    whole = x.numel() // WORD if x.dtype in (torch.float32, torch.float64) else 0
    if whole:
        values, planes = x.detach().numpy(), _arrays(decision, 1)
        size = values.dtype.type(step)
        _threaded(lambda lo, hi: loops.step_(values, *planes, begin, size, lo, hi), whole)
    tail, at = x[whole * WORD :], begin + whole * WORD
    if tail.numel():
        reference.step_(tail, decision.map(lambda p: p[at // WORD :]), at % WORD, step)


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
