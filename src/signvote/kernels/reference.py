"""The kernels of `Backend` in plain torch: what the others must equal, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.kernels import WORD, Coin, Coins, CoordinateWeights, Planes, signed, words_for

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of the float they overlay
EXPONENT = {  # the bits that are all set in what is not finite
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
WEYL = 0x9E3779B97F4A7C15
MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int64 words."""
    return (x >> by) & ((1 << (WORD - by)) - 1)


def _hash(key: int | Tensor, index: Tensor) -> Tensor:
    """splitmix64: the index-th output of the stream that starts at key."""
    z = (index + 1) * signed(WEYL) + (signed(key) if isinstance(key, int) else key)
    for by, factor in MIX:
        z = (z ^ _shift_right(z, by)) * signed(factor)
    return z ^ _shift_right(z, 31)


def coin_words(coin: Coin | Coins, words: int, device: torch.device | str = "cpu") -> Tensor:
    """The coin's bits of coordinates first, first + 1, ... as a plane; one row for each of several."""
    start, by = divmod(coin.first, WORD)
    key = coin.key if isinstance(coin, Coin) else coin.keys[:, None]
    stream = _hash(key, torch.arange(start, start + words + 1, device=device))
    if by == 0:
        return stream[..., :-1]
    return _shift_right(stream[..., :-1], by) | (stream[..., 1:] << (WORD - by))


def chances(coin: Coin, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers spread evenly over [0, 1), one for each of n coordinates, pure functions of key and coordinate."""
    stream = _hash(coin.key, torch.arange(coin.first, coin.first + n, device=device))
    return _shift_right(stream, 11).double() / 2**53


def pack(bits: Tensor) -> Tensor:
    """Booleans (..., n) to a plane (..., words), padded with zeros."""
    n = bits.shape[-1]
    padded = torch.nn.functional.pad(bits.to(torch.int64), (0, words_for(n) * WORD - n))
    lanes = torch.arange(WORD, device=bits.device)
    plane: Tensor = (padded.view(*bits.shape[:-1], words_for(n), WORD) << lanes).sum(-1)
    return plane


def unpack(plane: Tensor, n: int) -> Tensor:
    """The first n bits of a plane (..., words) as booleans (..., n)."""
    lanes = torch.arange(WORD, device=plane.device)
    return ((plane.unsqueeze(-1) >> lanes) & 1).flatten(-2)[..., :n].bool()


def _bits(plane: Tensor | None, like: Tensor, n: int) -> Tensor:
    """Booleans of a plane; all true if there is none."""
    return unpack(like, n) | True if plane is None else unpack(plane, n)


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
    """Booleans, one a coordinate, then packed."""
    finite = torch.isfinite(x).all(-1)
    n = x.shape[-1]
    integers = x.view(INTEGERS[x.element_size()])  # a denormal is no zero, whatever the flush mode
    positive, zero = integers > 0, integers << 1 == 0
    if coin is None:
        return Planes(pack(positive), pack(~zero)), finite
    heads = unpack(coin_words(coin, words_for(n), x.device), n)
    return Planes(pack(torch.where(zero, heads, positive)), None), finite


def _sign_of(tally: Tensor, coin: Coin | None) -> tuple[Tensor, Tensor]:
    """(positive, decided) booleans: the sign of an integer tally (paper, eq. 3); zero gets the coin, if any."""
    if coin is None:
        return tally > 0, tally != 0
    heads = unpack(coin_words(coin, words_for(tally.numel()), tally.device), tally.numel())
    return torch.where(tally == 0, heads, tally > 0), torch.ones_like(heads)


def _write_(plane: Tensor | None, bits: Tensor, span: tuple[int, int]) -> None:
    """Replace the bits of span in a plane."""
    if plane is not None:
        old = unpack(plane, plane.numel() * WORD)
        old[span[0] : span[1]] = bits
        plane.copy_(pack(old))


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The tally is written out: Y as int64, times the weights, summed over workers."""
    begin, end = span
    positive = unpack(votes.signs, end)[:, begin:]
    voted = _bits(votes.support, votes.signs, end)[:, begin:]
    y = (2 * positive.to(torch.int64) - 1) * voted
    tally = (weights.to(y.device, torch.int64)[:, None] * y).sum(0)  # (paper, eq. 3)
    decision, decided = _sign_of(tally, coin and coin.after(begin))
    _write_(out.signs, decision, span)
    _write_(out.support, decided, span)
    cast = voted & decided
    return ((positive != decision) & cast).sum(1), cast.sum(1)


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """All weights are looked up, (workers, n), and summed; then all counters get what the round adds."""
    counters, zero_is_symbol = weights.counters, weights.zero_is_symbol
    slots, tables, table_of, sizes = (t.to(counters.device) for t in weights[1:5])
    present = slots >= 0
    slots = torch.where(present, slots, 0)
    positive = unpack(votes.signs, n)
    voted = _bits(votes.support, votes.signs, n) & present[:, None]
    count = counters.view(torch.int16)[:, slots].transpose(0, 1).flatten(1)[:, :n].int() & 0xFFFF
    index = torch.where(voted, count + sizes[:, None] * positive, 2 * sizes[:, None])
    tally = tables[table_of[:, None], index.long()].sum(0)  # (paper, eq. 3)
    decision, decided = _sign_of(tally, coin)
    _write_(out.signs, decision, (0, n))
    _write_(out.support, decided, (0, n))

    cast = voted & decided
    differs = (positive != decision) & cast
    added = (2 * differs + (1 + zero_is_symbol) * (voted != decided)).to(torch.int16)  # (paper, eq. 4)
    padded = torch.nn.functional.pad(added, (0, counters.shape[0] * WORD - n))[present]
    counters.view(torch.int16)[:, slots[present]] += padded.unflatten(1, (-1, WORD)).transpose(0, 1)
    return differs.sum(1), cast.sum(1)


def disagreements(votes: Planes, n: int) -> tuple[Tensor, Tensor]:
    """All pairs at once, (workers, workers, n) booleans: for small n."""
    positive = unpack(votes.signs, n)
    voted = _bits(votes.support, votes.signs, n)
    both = voted[:, None] & voted[None]
    return ((positive[:, None] != positive[None]) & both).sum(-1), both.sum(-1)


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    """The signs in the type of x, 0 where nothing was decided, and torch's own `sub_`."""
    end = begin + x.numel()
    signs = 2 * unpack(decision.signs, end)[begin:].to(torch.int8) - 1
    signs *= _bits(decision.support, decision.signs, end)[begin:]
    x.sub_(signs.to(x.dtype), alpha=step)  # (paper, eq. 5)
