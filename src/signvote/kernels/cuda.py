"""The kernels in Triton: what torch hands over, cut into tiles. Nothing here waits for the device.

Weights on the device are never looked at, so a captured CUDA graph may replay these calls; weights on
the CPU are copied there.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
from torch import Tensor

from signvote.kernels import (
    Coin,
    Coins,
    CoordinateWeights,
    Planes,
    cuda_bits,
    cuda_pairs,
    cuda_trust,
    cuda_votes,
    reference,
    upload,
    words_for,
)

WORDS = 128  # 32-bit words a program packs or steps over
EXPONENT = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
VOTE = {"TILE": 1024, "num_warps": 4, "per_processor": 3}  # programs at a time: registers allow no more
FUSED = 32  # up to this number of workers a vote counts in the same pass
COUNTED = 8  # workers that one program counts, if not
TRUST = {"WORDS": 32, "num_warps": 4}
PAIRS = {"STEP": 128, "num_warps": 4, "per_processor": 2}
PAIR_ROWS, PAIR_BLOCK = 16, 8  # all pairs of so many workers at once; of more, in blocks. With support half
PAIR_TILES = 280  # a program's at most: its sums are 16 bits wide, and a tile adds 224
EXACT = 2**24 // 10_240  # workers whose weights add up exactly in float32


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
    blocks = triton.cdiv(2 * shape[-1], WORDS)
    cuda_bits.sign_planes_[(rows * blocks,)](
        x.view(integers), _words(signs), _words(support), finite, key, keys, first, n,
        x.stride(0) if x.ndim == 2 else 0, 2 * shape[-1], blocks,
        MAGNITUDE=torch.iinfo(integers).max, EXPONENT=EXPONENT[x.dtype], ALIGNED=first % 32 == 0, WORDS=WORDS,
    )  # fmt: skip
    return Planes(signs, support), finite


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    cuda_bits.step_[(triton.cdiv(x.numel(), 32 * WORDS),)](
        x, _words(decision.signs), _words(decision.support), begin, 2 * decision.signs.numel(), x.numel(),
        -step, ALIGNED=begin % 32 == 0, WIDE=x.dtype == torch.float64, WORDS=WORDS,
    )  # fmt: skip


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Two launches: the plan of the adders, then the vote; many workers are counted in a third."""
    device, (workers, words) = votes.signs.device, votes.signs.shape
    doubled = votes.support is not None
    wide = _width(out, votes)
    most = _most_inputs(weights) if weights.device.type == "cpu" else workers
    most = max(most << doubled, cuda_votes.GROUP.value)  # planes in a column, at most
    width = cuda_votes.HEAD.value + 2 * triton.cdiv(workers, 8) * 8
    plan = torch.empty(2 * cuda_votes.COLUMNS.value, width, dtype=torch.int64, device=device)
    counts = torch.empty(2, workers, dtype=torch.int64, device=device)
    stride, rows, tile_rows = 2 * votes.signs.stride(0), 2 * words // wide, VOTE["TILE"] // wide
    cuda_votes.plan_[(1,)](
        plan, counts, _there(weights, device), workers, width, stride, DOUBLE=doubled,
        BLOCK=max(8, triton.next_power_of_2(workers)), num_warps=1,
    )  # fmt: skip
    tiles = _tiles(span)
    key, first = _coin(coin)
    many = most > cuda_votes.GROUP.value
    programs = (VOTE["per_processor"] - many) * _processors(device)
    cuda_votes.vote_[(min(tiles[1] - tiles[0], programs),)](
        *_planes(out), *_planes(votes), counts, plan, width, stride // wide, rows, key, first, *span, *tiles,
        COIN=coin is not None, ALIGNED=first % 32 == 0, WORKERS=workers if workers <= FUSED else 0,
        CARRIES=(most - 1).bit_length(), MANY=many, WIDE=wide, ROWS=tile_rows,
        SMALL=rows < tile_rows, num_warps=VOTE["num_warps"],
    )  # fmt: skip
    if workers > FUSED:
        _count_(counts, out, votes, None, coin, span)
    return counts[0], counts[1]


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """One launch decides and updates the counters, a second counts."""
    device, workers = votes.signs.device, votes.signs.shape[0]
    slots, table_of, sizes = (_there(t, device) for t in (weights.slots, weights.table_of, weights.sizes))
    tables = _there(weights.tables.float(), device).view(torch.uint32)
    bounds = getattr(weights, "bounds", None)
    key, first = _coin(coin)
    cuda_trust.vote_by_coordinate_[(triton.cdiv(n, 32 * TRUST["WORDS"]),)](
        *_planes(out), *_planes(votes), weights.counters, slots, tables, table_of, sizes,
        None if bounds is None else _there(bounds, device), workers, 2 * votes.signs.stride(0),
        weights.counters.stride(0), tables.stride(0), key, first, n, COIN=coin is not None,
        ALIGNED=first % 32 == 0, SYMBOL=weights.zero_is_symbol,
        SUM=triton.language.float32 if workers <= EXACT else triton.language.int32, **TRUST,
    )  # fmt: skip
    counts = torch.zeros(2, workers, dtype=torch.int64, device=device)
    _count_(counts, out, votes, slots, coin, (0, n))
    return counts[0], counts[1]


def _count_(
    counts: Tensor, out: Planes, votes: Planes, slots: Tensor | None, coin: Coin | None, span: tuple[int, int]
) -> None:
    """Add who differs from a decision that stands, a few workers a program."""
    workers, words = votes.signs.shape
    wide = _width(out, votes)
    block = triton.cdiv(workers, COUNTED)
    tiles = _tiles(span)
    decided = None if coin else out.support
    cuda_votes.count_[(min(tiles[1] - tiles[0], triton.cdiv(8 * _processors(counts.device), block)), block)](
        _words(out.signs), _words(decided), *_planes(votes), counts, slots, 2 * votes.signs.stride(0) // wide,
        2 * words // wide, workers, *span, *tiles, WORKERS=min(workers, COUNTED), WIDE=wide,
        ROWS=VOTE["TILE"] // wide,
    )  # fmt: skip


def disagreements(votes: Planes, n: int) -> tuple[Tensor, Tensor]:
    """Every program writes matrices of its own, which are added up."""
    device, (workers, _) = votes.signs.device, votes.signs.shape
    halved = votes.support is not None
    few = workers <= PAIR_ROWS >> halved
    rows = workers if few else PAIR_BLOCK >> halved
    blocks = triton.cdiv(workers, rows)
    tiles = triton.cdiv(n, 7 * 32 * PAIRS["STEP"])
    programs = triton.cdiv(PAIRS["per_processor"] * _processors(device), blocks * blocks)
    programs = min(tiles, max(programs, triton.cdiv(tiles, PAIR_TILES)))
    counts = torch.empty(programs, 2, workers, workers, dtype=torch.int64, device=device)
    for same in (True, False)[: 1 if few else 2]:
        cuda_pairs.disagreements_[(programs, blocks, 1 if same else blocks)](
            counts, *_planes(votes), 2 * votes.signs.stride(0), n, tiles, workers, ROWS=rows, SAME=same,
            STEP=PAIRS["STEP"], num_warps=PAIRS["num_warps"],
        )  # fmt: skip
    differ, both = counts.sum(0).triu()
    if votes.support is None:
        return _mirrored(differ), torch.full_like(differ, n)
    return _mirrored(differ), _mirrored(both)


def _mirrored(upper: Tensor) -> Tensor:
    return upper + upper.triu(1).T


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
    return (reference.signed(coin.key) if isinstance(coin, Coin) else 0), coin.first


def _there(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor if tensor.device == device else upload(tensor, device)).contiguous()


def _width(out: Planes, votes: Planes) -> int:
    """How many 32-bit words lie aligned in every plane: 4, or at least the 2 of a 64-bit word."""
    planes = [p for p in (*out, *votes) if p is not None]
    even = all(p.data_ptr() % 16 == 0 and p.shape[-1] % 2 == 0 for p in planes)
    return 4 if even and votes.signs.stride(0) % 2 == 0 else 2


def _tiles(span: tuple[int, int]) -> tuple[int, int]:
    """The tiles that a span touches."""
    return span[0] // (32 * VOTE["TILE"]), triton.cdiv(span[1], 32 * VOTE["TILE"])


def _most_inputs(weights: Tensor) -> int:
    """The largest number of workers with a digit in the same column."""
    size = np.abs(weights.numpy().astype(np.int64))
    digits = (size + (size >> 1)) ^ (size >> 1)
    return int((digits >> np.arange(32)[:, None] & 1).sum(1).max())


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
