"""The kernels of `Backend` in Triton: tensors are cut into tiles. Nothing waits for the device.

The host never reads weights that are on the device, so a captured CUDA graph may replay these calls.
Weights on the CPU are copied to the device.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from signvote.kernels import (
    Coin,
    Coins,
    CoordinateWeights,
    Planes,
    cuda_bits,
    cuda_majority,
    cuda_pairs,
    cuda_trust,
    cuda_votes,
    reference,
    signed,
    upload,
    words_for,
)
from signvote.kernels.cuda_steps import as_words
from signvote.kernels.cuda_steps import step_ as step_
from signvote.kernels.cuda_steps import step_all_ as step_all_
from signvote.kernels.reference import unpack as unpack

PACKED = 256  # 32-bit words that a program packs
# Tiles: words, warps, programs at a time on a processor. A weighted vote's are 32 words a warp.
VOTE = {"num_warps": 16, "per_processor": 1, "maxnreg": 128}
MAJORITY = {"TILE": 1024, "num_warps": 8, "per_processor": 2}
EQUAL = 32  # planes, at most, of which a majority is counted by adders
COUNTED = 16  # workers that one program counts
COUNTED_WORDS = 512  # in a tile of such a program
SCALED = 512  # workers whose tallies fit 32 bits with seven to spare
TRUST = {"num_warps": 4, "per_processor": 4, "UNROLL": 5}  # more warps would need more than 48 KB
PREPARED = 1024  # entries of tables that a program makes smaller
TRUSTED = 16  # up to this number of workers have their counters in shared memory
PAIRS = {"STEPS": 8, "num_warps": 8, "per_processor": 2}


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, Tensor]:
    """One launch for all rows. Whether they are finite is known on the device."""
    *leading, n = x.shape
    rows = leading[0] if leading else 1
    stride = x.stride(0) if leading else 0
    words = words_for(n)
    signs = torch.empty(*leading, words, dtype=torch.int64, device=x.device)
    support = None if coin else torch.empty_like(signs)
    finite = torch.ones(leading, dtype=torch.bool, device=x.device)
    integers = reference.INTEGERS[x.element_size()]
    magnitude = torch.iinfo(integers).max
    keys = coin.keys if isinstance(coin, Coins) else None
    key, first = _coin(coin)
    blocks = triton.cdiv(2 * words, PACKED)
    cuda_bits.sign_planes_[(rows * blocks,)](
        x.view(integers),
        as_words(signs),
        as_words(support),
        finite,
        key,
        keys,
        first,
        n,
        stride,
        2 * words,
        blocks,
        MAGNITUDE=magnitude,
        EXPONENT=reference.EXPONENT[x.dtype],
        ALIGNED=first % 32 == 0,
        WORDS=PACKED,
    )
    return Planes(signs, support), finite


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Equal weights that are known here are a plain count of votes. Others lie within +-16,383."""
    device = votes.signs.device
    workers, words = votes.signs.shape
    counts = torch.zeros(2, workers, dtype=torch.int64, device=device)
    planes = workers if votes.support is None else 2 * workers  # two of each worker that may abstain
    if planes <= EQUAL and _all_alike(weights):
        _majority_(out, votes, counts, planes.bit_length(), coin, span)
        return counts[0], counts[1]
    warps = VOTE["num_warps"]
    once = workers <= cuda_votes.ROWS.value
    groups = 2 * triton.cdiv(workers, 8) if once else 4
    decided = out.support
    if decided is None and not once:
        decided = torch.empty_like(out.signs)  # to count without ties
    block = max(32, triton.next_power_of_2(workers))
    tiles = _tiles(span, 32 * warps)
    programs = _programs(tiles, VOTE["per_processor"] * _processors(device))
    key, first = _coin(coin)
    cuda_votes.vote_[(programs,)](
        as_words(out.signs),
        as_words(decided),
        *_planes(votes),
        counts,
        _there(weights, device),
        workers,
        2 * votes.signs.stride(0),
        2 * words,
        key,
        first,
        *span,
        *tiles,
        COIN=coin is not None,
        ALIGNED=first % 32 == 0,
        ONCE=once,
        GROUPS=groups,
        SCALED=workers <= SCALED,
        WIDE=_width(votes) == 4,
        BLOCK=block,
        WARPS=warps,
        num_warps=warps,
        maxnreg=VOTE["maxnreg"],
    )
    if not once:
        _count_(counts, Planes(out.signs, decided), votes, None, span)
    return counts[0], counts[1]


def _majority_(
    out: Planes, votes: Planes, counts: Tensor, digits: int, coin: Coin | None, span: tuple[int, int]
) -> None:
    """Decide by equal weights, and count."""
    workers, words = votes.signs.shape
    tile = MAJORITY["TILE"]
    tiles = _tiles(span, tile)
    wide = _width(out, votes)
    rows = 2 * words // wide
    tile_rows = tile // wide
    programs = _programs(tiles, MAJORITY["per_processor"] * _processors(counts.device))
    key, first = _coin(coin)
    cuda_majority.majority_[(programs,)](
        *_planes(out),
        *_planes(votes),
        counts,
        2 * votes.signs.stride(0) // wide,
        rows,
        key,
        first,
        *span,
        *tiles,
        COIN=coin is not None,
        ALIGNED=first % 32 == 0,
        WORKERS=workers,
        DIGITS=digits,
        WIDE=wide,
        ROWS=tile_rows,
        SMALL=rows < tile_rows,
        num_warps=MAJORITY["num_warps"],
    )


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """One launch prepares, one decides and updates the counters, one counts."""
    device = votes.signs.device
    workers, words = votes.signs.shape
    slots, tables, table_of, sizes = (_there(t, device) for t in weights[1:5])
    warps = TRUST["num_warps"]
    few = TRUSTED // 2
    counters = weights.counters.view(torch.uint32)
    counts = torch.empty(2, workers, dtype=torch.int64, device=device)
    padded = max(16, triton.next_power_of_2(workers))
    members = torch.empty(4 * padded, dtype=torch.int32, device=device)
    small = torch.empty(tables.shape, dtype=torch.int16, device=device)
    blocks = triton.cdiv(tables.numel(), PREPARED)
    cuda_trust.prepare_[(blocks,)](
        members,
        small,
        counts,
        slots,
        tables,
        table_of,
        sizes,
        workers,
        tables.numel(),
        tables.stride(0),
        MEMBERS=padded,
        BLOCK=PREPARED,
    )
    tiles = triton.cdiv(n, 8 * 32 * warps)
    programs = min(tiles, TRUST["per_processor"] * _processors(device))
    key, first = _coin(coin)
    cuda_trust.vote_by_coordinate_[(programs,)](
        *_bytes(out),
        *_bytes(votes),
        counters,
        members,
        small,
        workers,
        8 * votes.signs.stride(0),
        counters.stride(0),
        1 + weights.zero_is_symbol,
        key,
        first,
        n,
        words - 1,
        tiles,
        COIN=coin is not None,
        WORKERS=TRUSTED if workers > few else few,
        ONCE=workers <= TRUSTED,
        SCALED=workers <= SCALED,
        UNROLL=TRUST["UNROLL"],
        WARPS=warps,
        num_warps=warps,
    )
    stands = out if coin is None else Planes(out.signs, None)
    _count_(counts, stands, votes, slots, (0, n))
    return counts[0], counts[1]


def _count_(counts: Tensor, out: Planes, votes: Planes, slots: Tensor | None, span: tuple[int, int]) -> None:
    """Count how often workers differ from a decision where it has support, a few workers in each program."""
    workers, words = votes.signs.shape
    wide = _width(out, votes)
    block = triton.cdiv(workers, COUNTED)
    tiles = _tiles(span, COUNTED_WORDS)
    programs = _programs(tiles, triton.cdiv(8 * _processors(counts.device), block))
    cuda_pairs.count_[(programs, block)](
        *_planes(out),
        *_planes(votes),
        counts,
        slots,
        2 * votes.signs.stride(0) // wide,
        2 * words // wide,
        workers,
        *span,
        *tiles,
        WORKERS=min(workers, COUNTED),
        WIDE=wide,
        ROWS=COUNTED_WORDS // wide,
    )


tally = reference.tally


def disagreements(votes: Planes, n: int, others: Planes | None = None) -> tuple[Tensor, Tensor]:
    """All pairs of a block of workers with another in one pass."""
    if others is not None:
        return _disagreements_with(votes, n, others)
    device = votes.signs.device
    workers, words = votes.signs.shape
    blocks = triton.cdiv(workers, cuda_pairs.ROWS.value)
    steps = PAIRS["STEPS"]
    warps = PAIRS["num_warps"]
    tile = 32 * warps * steps * cuda_pairs.WORDS.value
    tiles = triton.cdiv(n, tile)
    at_a_time = PAIRS["per_processor"] * _processors(device)
    programs = min(tiles, triton.cdiv(at_a_time, blocks * blocks))
    counts = torch.zeros(2, workers, workers, dtype=torch.int64, device=device)
    cuda_pairs.disagreements_[(programs, blocks, blocks)](
        counts,
        *_planes(votes),
        2 * votes.signs.stride(0),
        n,
        2 * words,
        tiles,
        workers,
        STEPS=steps,
        WARPS=warps,
        SAME=blocks == 1,
        num_warps=warps,
    )
    differ, both = counts
    if votes.support is None:
        both.fill_(n)
    return differ, both


def _disagreements_with(votes: Planes, n: int, others: Planes) -> tuple[Tensor, Tensor]:
    """Some workers at a time are compared with one another and with the others; the latter is kept."""
    count = len(others.signs)
    found = []
    for start in range(0, len(votes.signs), count):
        some = votes.map(lambda plane: plane[start : start + count])  # noqa: B023
        support = None
        if some.support is not None:
            assert others.support is not None
            support = torch.cat([some.support, others.support])
        both = Planes(torch.cat([some.signs, others.signs]), support)
        size = len(some.signs)
        found.append([counts[:size, size:] for counts in disagreements(both, n)])
    differ, common = zip(*found, strict=True)
    return torch.cat(differ), torch.cat(common)


# ---- between torch and Triton ----------------------------------------------------------------


def _planes(planes: Planes) -> tuple[Tensor | None, Tensor | None]:
    """Both planes as 32-bit words."""
    return as_words(planes.signs), as_words(planes.support)


def _bytes(planes: Planes) -> Planes:
    """Both planes as bytes."""
    return planes.map(lambda plane: plane.view(torch.uint8))


def _coin(coin: Coin | Coins | None) -> tuple[int, int]:
    """Key and first coordinate; 0 where there is none."""
    if coin is None:
        return 0, 0
    key = signed(coin.key) if isinstance(coin, Coin) else 0
    return key, coin.first


def _there(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device."""
    if tensor.device != device:
        tensor = upload(tensor, device)
    return tensor.contiguous()


def _width(*planes: Planes) -> int:
    """How many 32-bit words lie aligned in every plane: 4, or at least the 2 of a 64-bit word."""
    every = [p for pair in planes for p in pair if p is not None]
    return 4 if all(_is_wide(p) for p in every) else 2


def _is_wide(plane: Tensor) -> bool:
    """Whether every row starts and ends at a multiple of 16 bytes."""
    if plane.data_ptr() % 16 or plane.shape[-1] % 2:
        return False
    return plane.ndim == 1 or plane.stride(0) % 2 == 0


def _tiles(span: tuple[int, int], words: int) -> tuple[int, int]:
    """The first tile that a span touches and the one after the last. A tile has so many 32-bit words."""
    begin, end = span
    tile = 32 * words
    return begin // tile, triton.cdiv(end, tile)


def _programs(tiles: tuple[int, int], at_a_time: int) -> int:
    """As many programs as the device runs at a time, but not more than there are tiles."""
    first, end = tiles
    return min(end - first, at_a_time)


def _all_alike(weights: Tensor) -> bool:
    """Whether all weights are known to be the same positive number."""
    if weights.device.type != "cpu":
        return False
    first, *others = weights.tolist()
    return first > 0 and all(w == first for w in others)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
