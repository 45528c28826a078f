"""The kernels of `Backend` in Triton: what torch hands over, cut into tiles. Nothing waits for the device.

Weights on the device are never looked at, so a captured CUDA graph may replay these calls; weights on
the CPU are copied there.
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

PACKED, STEPPED = 256, 32  # 32-bit words a program packs or steps over
# Tiles: words, warps, programs at a time on a processor. A weighted vote's are 32 words a warp.
VOTE = {"num_warps": 16, "per_processor": 1, "maxnreg": 128}
MAJORITY = {"TILE": 1024, "num_warps": 8, "per_processor": 2}
EQUAL = 32  # planes, at most, of which a majority is counted by adders
COUNTED, COUNTED_WORDS = 16, 512  # workers that one program counts by themselves, and words in a tile of it
SCALED = 512  # workers whose tallies fit 32 bits with seven to spare
TRUST = {"num_warps": 4, "per_processor": 4, "UNROLL": 5}  # more warps would need more than 48 KB
PREPARED = 1024  # entries of tables that a program makes smaller
TRUSTED = 16  # up to this number of workers have their counters in shared memory
PAIRS = {"STEPS": 8, "num_warps": 8, "per_processor": 2}


def sign_planes(x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, Tensor]:
    """One launch for all rows; whether they are finite is known on the device."""
    rows, n = (1, x.numel()) if x.ndim == 1 else x.shape
    shape = *x.shape[:-1], words_for(n)
    signs = torch.empty(shape, dtype=torch.int64, device=x.device)
    support = None if coin else torch.empty_like(signs)
    finite = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    integers = reference.INTEGERS[x.element_size()]
    keys = coin.keys if isinstance(coin, Coins) else None
    key, first = _coin(coin)
    blocks = triton.cdiv(2 * shape[-1], PACKED)
    cuda_bits.sign_planes_[(rows * blocks,)](
        x.view(integers), _words(signs), _words(support), finite, key, keys, first, n,
        x.stride(0) if x.ndim == 2 else 0, 2 * shape[-1], blocks, MAGNITUDE=torch.iinfo(integers).max,
        EXPONENT=reference.EXPONENT[x.dtype], ALIGNED=first % 32 == 0, WORDS=PACKED,
    )  # fmt: skip
    return Planes(signs, support), finite


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    """One launch; float16 and bfloat16 are computed in float32, as torch does."""
    cuda_bits.step_[(triton.cdiv(x.numel(), 32 * STEPPED),)](
        x, _words(decision.signs), _words(decision.support), begin, 2 * decision.signs.numel(), x.numel(),
        -step, ALIGNED=begin % 32 == 0, WIDE=x.dtype == torch.float64, WORDS=STEPPED,
    )  # fmt: skip


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Equal weights that are known here are a plain count of votes. Others lie within +-16,383."""
    device, workers = votes.signs.device, votes.signs.shape[0]
    counts = torch.zeros(2, workers, dtype=torch.int64, device=device)
    planes = workers if votes.support is None else 2 * workers  # two of each worker who may abstain
    if planes <= EQUAL and _all_alike(weights):
        _majority_(out, votes, counts, planes.bit_length(), coin, span)
        return counts[0], counts[1]
    warps, once = VOTE["num_warps"], workers <= cuda_votes.ROWS.value
    ties = coin is None or votes.support is not None or not once
    tiles = _tiles(span, 32 * warps)
    key, first = _coin(coin)
    cuda_votes.vote_[(min(tiles[1] - tiles[0], VOTE["per_processor"] * _processors(device)),)](
        *_planes(out), *_planes(votes), counts, _there(weights, device), workers, 2 * votes.signs.stride(0),
        2 * votes.signs.shape[1], key, first, *span, *tiles, COIN=coin is not None, ALIGNED=first % 32 == 0,
        ONCE=once, TIES=ties, GROUPS=2 * triton.cdiv(workers + (not ties), 8) if once else 4, SCALED=workers <= SCALED,
        WIDE=_width(votes) == 4, BLOCK=max(32, triton.next_power_of_2(workers)), WARPS=warps,
        num_warps=warps, maxnreg=VOTE["maxnreg"],
    )  # fmt: skip
    if not once:
        _count_(counts, out, votes, None, coin, span)
    return counts[0], counts[1]


def _majority_(
    out: Planes, votes: Planes, counts: Tensor, digits: int, coin: Coin | None, span: tuple[int, int]
) -> None:
    workers, words = votes.signs.shape
    tile = MAJORITY["TILE"]
    tiles, wide = _tiles(span, tile), _width(out, votes)
    rows, tile_rows = 2 * words // wide, tile // wide
    key, first = _coin(coin)
    cuda_majority.majority_[(min(tiles[1] - tiles[0], MAJORITY["per_processor"] * _processors(counts.device)),)](
        *_planes(out), *_planes(votes), counts, 2 * votes.signs.stride(0) // wide, rows, key, first, *span,
        *tiles, COIN=coin is not None, ALIGNED=first % 32 == 0, WORKERS=workers, DIGITS=digits, WIDE=wide,
        ROWS=tile_rows, SMALL=rows < tile_rows, num_warps=MAJORITY["num_warps"],
    )  # fmt: skip


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """One launch prepares, one decides and updates the counters, one counts."""
    device, workers = votes.signs.device, votes.signs.shape[0]
    slots, tables, table_of, sizes = (_there(t, device) for t in weights[1:5])
    once, warps = workers <= TRUSTED, TRUST["num_warps"]
    counters, last = weights.counters.view(torch.uint32), votes.signs.shape[1] - 1
    counts = torch.empty(2, workers, dtype=torch.int64, device=device)
    padded = max(16, triton.next_power_of_2(workers))
    members = torch.empty(4 * padded, dtype=torch.int32, device=device)
    small = torch.empty(tables.shape, dtype=torch.int16, device=device)
    cuda_trust.prepare_[(triton.cdiv(tables.numel(), PREPARED),)](
        members, small, counts, slots, tables, table_of, sizes, workers, tables.numel(), tables.stride(0),
        MEMBERS=padded, BLOCK=PREPARED,
    )  # fmt: skip
    tiles = triton.cdiv(n, 8 * 32 * warps)
    key, first = _coin(coin)
    cuda_trust.vote_by_coordinate_[(min(tiles, TRUST["per_processor"] * _processors(device)),)](
        *(None if p is None else p.view(torch.uint8) for p in (*out, *votes)), counters, members, small,
        workers, 8 * votes.signs.stride(0), counters.stride(0), 1 + weights.zero_is_symbol, key, first, n, last,
        tiles, COIN=coin is not None, WORKERS=TRUSTED if workers > TRUSTED // 2 else TRUSTED // 2, ONCE=once,
        SCALED=workers <= SCALED, UNROLL=TRUST["UNROLL"], WARPS=warps, num_warps=warps,
    )  # fmt: skip
    _count_(counts, out, votes, slots, coin, (0, n))
    return counts[0], counts[1]


def _count_(
    counts: Tensor, out: Planes, votes: Planes, slots: Tensor | None, coin: Coin | None, span: tuple[int, int]
) -> None:
    """Add who differs from a decision that stands, a few workers a program."""
    workers, words = votes.signs.shape
    wide = _width(out, votes)
    block = triton.cdiv(workers, COUNTED)
    tiles = _tiles(span, COUNTED_WORDS)
    decided = None if coin else out.support
    cuda_pairs.count_[(min(tiles[1] - tiles[0], triton.cdiv(8 * _processors(counts.device), block)), block)](
        _words(out.signs), _words(decided), *_planes(votes), counts, slots, 2 * votes.signs.stride(0) // wide,
        2 * words // wide, workers, *span, *tiles, WORKERS=min(workers, COUNTED), WIDE=wide,
        ROWS=COUNTED_WORDS // wide,
    )  # fmt: skip


def disagreements(votes: Planes, n: int) -> tuple[Tensor, Tensor]:
    """All pairs of a block of workers with another in one pass."""
    device, (workers, words) = votes.signs.device, votes.signs.shape
    blocks = triton.cdiv(workers, cuda_pairs.ROWS.value)
    steps, warps = PAIRS["STEPS"], PAIRS["num_warps"]
    tiles = triton.cdiv(n, 32 * warps * steps * cuda_pairs.WORDS.value)
    programs = min(tiles, triton.cdiv(PAIRS["per_processor"] * _processors(device), blocks * blocks))
    counts = torch.zeros(2, workers, workers, dtype=torch.int64, device=device)
    cuda_pairs.disagreements_[(programs, blocks, blocks)](
        counts, *_planes(votes), 2 * votes.signs.stride(0), n, 2 * words, tiles, workers,
        STEPS=steps, WARPS=warps, SAME=blocks == 1, num_warps=warps,
    )  # fmt: skip
    return counts[0], counts[1] if votes.support is not None else counts[1].fill_(n)


# ---- between torch and Triton ----------------------------------------------------------------


def _words(plane: Tensor | None) -> Tensor | None:
    """A plane as 32-bit words."""
    return None if plane is None else plane.view(torch.uint32)


def _planes(planes: Planes) -> tuple[Tensor | None, Tensor | None]:
    return _words(planes.signs), _words(planes.support)


def _coin(coin: Coin | Coins | None) -> tuple[int, int]:
    """Key and first coordinate, as far as there are."""
    if coin is None:
        return 0, 0
    return (signed(coin.key) if isinstance(coin, Coin) else 0), coin.first


def _there(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor if tensor.device == device else upload(tensor, device)).contiguous()


def _width(*planes: Planes) -> int:
    """How many 32-bit words lie aligned in every plane: 4, or at least the 2 of a 64-bit word."""
    every = [p for pair in planes for p in pair if p is not None]
    even = all(p.data_ptr() % 16 == 0 and p.shape[-1] % 2 == 0 for p in every)
    return 4 if even and all(p.ndim == 1 or p.stride(0) % 2 == 0 for p in every) else 2


def _tiles(span: tuple[int, int], words: int) -> tuple[int, int]:
    """The tiles of so many 32-bit words that a span touches."""
    return span[0] // (32 * words), triton.cdiv(span[1], 32 * words)


def _all_alike(weights: Tensor) -> bool:
    """Whether these are known to be the same weight, and it is not zero or less."""
    if weights.device.type != "cpu":
        return False
    first, *others = weights.tolist()
    return first > 0 and all(w == first for w in others)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
