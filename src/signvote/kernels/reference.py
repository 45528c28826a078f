"""The kernels of `Backend` in plain torch: what the others must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from signvote.kernels import WORD, Coin, Coins, CoordinateWeights, Planes, signed, words_for

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of the float they overlay
EXPONENT = {  # the bits that are all set in infinities and NaN
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
WEYL = 0x9E3779B97F4A7C15
MIX = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int64 words."""
    kept = (1 << (WORD - by)) - 1
    return (x >> by) & kept


def _hash(key: int | Tensor, index: Tensor) -> Tensor:
    """splitmix64: the index-th output of the stream that starts at key."""
    start = signed(key) if isinstance(key, int) else key
    z = (index + 1) * signed(WEYL) + start
    for by, factor in MIX:
        z = (z ^ _shift_right(z, by)) * signed(factor)
    return z ^ _shift_right(z, 31)


def coin_words(coin: Coin | Coins, words: int, device: torch.device | str = "cpu") -> Tensor:
    """The coin's bits of coordinates first, first + 1, ... as a plane; one row for each of several."""
    start, by = divmod(coin.first, WORD)
    key = coin.key if isinstance(coin, Coin) else coin.keys[:, None]
    index = torch.arange(start, start + words + 1, device=device)
    stream = _hash(key, index)
    these = stream[..., :-1]
    if by == 0:
        return these
    following = stream[..., 1:]
    return _shift_right(these, by) | (following << (WORD - by))


def chances(coin: Coin, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers spread evenly over [0, 1), one for each of n coordinates, pure functions of key and coordinate."""
    index = torch.arange(coin.first, coin.first + n, device=device)
    stream = _hash(coin.key, index)
    high = _shift_right(stream, 11)  # as many bits as a float64 holds exactly
    return high.double() / 2**53


def pack(bits: Tensor) -> Tensor:
    """Booleans (..., n) to a plane (..., words), padded with zeros."""
    *rows, n = bits.shape
    words = words_for(n)
    missing = words * WORD - n
    numbers = bits.to(torch.int64)
    padded = torch.nn.functional.pad(numbers, (0, missing))
    lanes = torch.arange(WORD, device=bits.device)
    by_word = padded.view(*rows, words, WORD)
    plane: Tensor = (by_word << lanes).sum(-1)
    return plane


def unpack(plane: Tensor, n: int) -> Tensor:
    """The first n bits of a plane (..., words) as booleans (..., n)."""
    lanes = torch.arange(8, dtype=torch.uint8, device=plane.device)
    words = plane[..., : words_for(n)].clone(memory_format=torch.contiguous_format)
    octets = words.view(torch.uint8)
    bits = (octets.unsqueeze(-1) >> lanes) & 1
    flat = bits.flatten(-2)
    return flat[..., :n].bool()


def _bits(plane: Tensor | None, like: Tensor, n: int) -> Tensor:
    """Booleans of a plane; all true if there is none."""
    if plane is not None:
        return unpack(plane, n)
    return torch.ones_like(unpack(like, n))


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
    """Booleans, one a coordinate, then packed."""
    finite = torch.isfinite(x).all(-1)
    n = x.shape[-1]
    integers = x.view(INTEGERS[x.element_size()])  # a denormal is no zero, whatever the flush mode
    positive = integers > 0
    zero = integers << 1 == 0
    if coin is None:
        return Planes(pack(positive), pack(~zero)), finite
    coins = coin_words(coin, words_for(n), x.device)
    heads = unpack(coins, n)
    signs = torch.where(zero, heads, positive)
    return Planes(pack(signs), None), finite


def _sign_of(tally: Tensor, coin: Coin | None) -> tuple[Tensor, Tensor]:
    """(positive, decided) booleans: the sign of an integer tally (paper, eq. 3); zero gets the coin, if any."""
    positive = tally > 0
    if coin is None:
        return positive, tally != 0
    n = tally.numel()
    coins = coin_words(coin, words_for(n), tally.device)
    heads = unpack(coins, n)
    decision = torch.where(tally == 0, heads, positive)
    return decision, torch.ones_like(heads)


def _write_(plane: Tensor | None, bits: Tensor, span: tuple[int, int]) -> None:
    """Replace the bits of span in a plane."""
    if plane is None:
        return
    begin, end = span
    old = unpack(plane, plane.numel() * WORD)
    old[begin:end] = bits
    plane.copy_(pack(old))


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The tally is written out: Y as int64, times the weights, summed over workers."""
    begin, end = span
    positive = unpack(votes.signs, end)[:, begin:]
    voted = _bits(votes.support, votes.signs, end)[:, begin:]
    signs = 2 * positive.to(torch.int64) - 1
    y = signs * voted
    w = weights.to(y.device, torch.int64)[:, None]
    tally = (w * y).sum(0)  # (paper, eq. 3)
    toss = coin and coin.after(begin)
    decision, decided = _sign_of(tally, toss)
    _write_(out.signs, decision, span)
    _write_(out.support, decided, span)
    cast = voted & (tally != 0)  # a tie shows nothing about a worker
    differs = (positive != decision) & cast
    return differs.sum(1), cast.sum(1)


def tally(votes: Planes, weights: Tensor, n: int) -> Tensor:
    """Worker by worker, so that M vectors of numbers never exist at once."""
    total = torch.zeros(n, dtype=torch.int32, device=votes.signs.device)
    for m, weight in enumerate(weights.to(total)):
        mine = votes.map(lambda plane: plane[m])  # noqa: B023
        y = 2 * unpack(mine.signs, n).to(torch.int32) - 1
        total += weight * (y * _bits(mine.support, mine.signs, n))
    return total


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """All weights are looked up, (workers, n), and summed; then all counters get what the round adds."""
    counters = weights.counters.view(torch.int16)
    slots, tables, table_of, sizes = (t.to(counters.device) for t in weights[1:5])
    present = slots >= 0
    slots = torch.where(present, slots, 0)
    positive = unpack(votes.signs, n)
    voted = _bits(votes.support, votes.signs, n) & present[:, None]
    by_worker = counters[:, slots].transpose(0, 1)
    stored = by_worker.flatten(1)[:, :n]
    count = stored.int() & 0xFFFF
    size = sizes[:, None]
    index = torch.where(voted, count + size * positive, 2 * size)
    signed_weights = tables[table_of[:, None], index.long()]
    tally = signed_weights.sum(0)  # (paper, eq. 3)
    decision, decided = _sign_of(tally, coin)
    _write_(out.signs, decision, (0, n))
    _write_(out.support, decided, (0, n))

    cast = voted & decided
    differs = (positive != decision) & cast
    missing = voted != decided
    missing_adds = 2 if weights.zero_is_symbol else 1
    added = 2 * differs + missing_adds * missing  # (paper, eq. 4)
    spare = counters.shape[0] * WORD - n
    padded = torch.nn.functional.pad(added.to(torch.int16), (0, spare))
    by_word = padded[present].unflatten(1, (-1, WORD))
    counters[:, slots[present]] += by_word.transpose(0, 1)
    return differs.sum(1), cast.sum(1)


def disagreements(votes: Planes, n: int, others: Planes | None = None) -> tuple[Tensor, Tensor]:
    """All pairs at once, (workers, others, n) booleans: for small n."""
    theirs = votes if others is None else others
    positive = unpack(votes.signs, n)
    their_positive = unpack(theirs.signs, n)
    voted = _bits(votes.support, votes.signs, n)
    their_voted = _bits(theirs.support, theirs.signs, n)
    both = voted[:, None] & their_voted[None]
    differ = (positive[:, None] != their_positive[None]) & both
    return differ.sum(-1), both.sum(-1)


def step_(x: Tensor, decision: Planes, begin: int, step: float, keep: float = 1.0) -> None:
    """The signs in the type of x, 0 where nothing was decided, and torch's own `mul_` and `sub_`."""
    if keep != 1:
        x.mul_(keep)
    end = begin + x.numel()
    positive = unpack(decision.signs, end)[begin:]
    decided = _bits(decision.support, decision.signs, end)[begin:]
    signs = 2 * positive.to(torch.int8) - 1
    signs *= decided
    x.sub_(signs.to(x.dtype), alpha=step)  # (paper, eq. 5)


def step_all_(
    targets: Sequence[Tensor],
    begins: Sequence[int],
    decision: Planes,
    step: float,
    keep: float = 1.0,
    decided: Tensor | None = None,
) -> None:
    """The same on each tensor."""
    end = max(begin + x.numel() for x, begin in zip(targets, begins, strict=True))
    signs = 2 * unpack(decision.signs, end).to(torch.int8) - 1
    signs *= _bits(decision.support, decision.signs, end)
    for x, begin in zip(targets, begins, strict=True):
        if decided is not None:
            x.mul_(torch.where(decided, keep, torch.ones((), dtype=x.dtype, device=x.device)))
        elif keep != 1:
            x.mul_(keep)
        mine = signs[begin : begin + x.numel()].view(x.shape)
        x.sub_(mine.to(x.dtype), alpha=step)  # (paper, eq. 5)
