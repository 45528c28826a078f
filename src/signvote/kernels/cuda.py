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

PACKED, STEPPED = 256, 32  # 32-bit words a program packs or steps over
EXPONENT = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# Tiles of votes: words, warps, programs at a time on a processor, all planes asked for EARLY, and whether
# the adders of up to 16 workers are DENSE.
VOTE = {"TILE": 512, "num_warps": 4, "per_processor": 3, "EARLY": True, "DENSE": True}
MAJORITY = {"TILE": 1024, "num_warps": 8, "per_processor": 2, "EARLY": True, "DENSE": False}
FUSED = 32  # up to this number of workers a vote counts in the same pass
COUNTED = 16  # workers that one program counts, if not
TRUST = {"WORDS": 32, "num_warps": 4, "maxnreg": 128}
TRUSTED = 16  # up to this number of workers have their counters in registers
PAIRS = {"STEPS": 4, "num_warps": 8, "per_processor": 4}


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
        x.stride(0) if x.ndim == 2 else 0, 2 * shape[-1], blocks,
        MAGNITUDE=torch.iinfo(integers).max, EXPONENT=EXPONENT[x.dtype], ALIGNED=first % 32 == 0, WORDS=PACKED,
    )  # fmt: skip
    return Planes(signs, support), finite


def step_(x: Tensor, decision: Planes, begin: int, step: float) -> None:
    cuda_bits.step_[(triton.cdiv(x.numel(), 32 * STEPPED),)](
        x, _words(decision.signs), _words(decision.support), begin, 2 * decision.signs.numel(), x.numel(),
        -step, ALIGNED=begin % 32 == 0, WIDE=x.dtype == torch.float64, WORDS=STEPPED,
    )  # fmt: skip


def vote_(
    out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Equal weights are a plain count of votes. Others make the plan of an adder network first."""
    device, workers = votes.signs.device, votes.signs.shape[0]
    doubled = votes.support is not None
    inputs = workers << doubled  # planes: two of each worker who may abstain
    if inputs <= FUSED and _all_alike(weights):
        counts = torch.zeros(2, workers, dtype=torch.int64, device=device)
        _launch_vote(out, votes, counts, None, inputs.bit_length(), coin, span, MAJORITY)
        return counts[0], counts[1]
    dense = bool(VOTE["DENSE"]) and bool(VOTE["EARLY"]) and not doubled and 4 <= workers <= 16
    most = _most_inputs(weights) if weights.device.type == "cpu" else workers
    most = max(most << doubled, cuda_votes.GROUP.value)  # planes in a column, at most
    width = cuda_votes.HEAD.value + 2 * triton.cdiv(workers, 8) * 8
    plan = torch.empty(2 * cuda_votes.COLUMNS.value, width, dtype=torch.int64, device=device)
    counts = torch.empty(2, workers, dtype=torch.int64, device=device)
    cuda_votes.plan_[(1,)](
        plan, counts, _there(weights, device), workers, width, 2 * votes.signs.stride(0), DOUBLE=doubled, DENSE=dense,
        BLOCK=max(8, triton.next_power_of_2(workers)), num_warps=1,
    )  # fmt: skip
    carries = workers.bit_length() if dense else (most - 1).bit_length()
    _launch_vote(
        out,
        votes,
        counts,
        plan,
        carries,
        coin,
        span,
        VOTE | {"EARLY": VOTE["EARLY"] and inputs <= 16, "DENSE": dense},
    )
    if workers > FUSED:
        _count_(counts, out, votes, None, coin, span)
    return counts[0], counts[1]


def _launch_vote(
    out: Planes, votes: Planes, counts: Tensor, plan: Tensor | None, carries: int, coin: Coin | None,
    span: tuple[int, int], shape: dict[str, int],
) -> None:  # fmt: skip
    """The vote itself, by a plan or by the majority, in tiles of this shape."""
    workers, words = votes.signs.shape
    tiles, wide = _tiles(span, shape["TILE"]), _width(out, votes)
    rows, tile_rows = 2 * words // wide, shape["TILE"] // wide
    key, first = _coin(coin)
    cuda_votes.vote_[(min(tiles[1] - tiles[0], shape["per_processor"] * _processors(counts.device)),)](
        *_planes(out), *_planes(votes), counts, plan, 0 if plan is None else plan.shape[1],
        2 * votes.signs.stride(0) // wide, rows, key, first, *span, *tiles, COIN=coin is not None,
        ALIGNED=first % 32 == 0, WORKERS=workers if workers <= FUSED else 0, CARRIES=carries,
        MANY=2**carries > cuda_votes.GROUP.value, WIDE=wide, ROWS=tile_rows, SMALL=rows < tile_rows,
        EARLY=bool(shape["EARLY"]), DENSE=bool(shape["DENSE"]), num_warps=shape["num_warps"],
    )  # fmt: skip


def vote_by_coordinate_(
    out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
) -> tuple[Tensor, Tensor]:
    """One launch decides and updates the counters, a second counts."""
    device, workers = votes.signs.device, votes.signs.shape[0]
    slots, table_of, sizes = (_there(t, device) for t in (weights.slots, weights.table_of, weights.sizes))
    tables = _there(weights.tables.to(torch.int16), device)  # half the cache; the largest weight is 10,240
    counters = weights.counters.view(torch.uint32)
    counts = torch.zeros(2, workers, dtype=torch.int64, device=device)
    once = workers <= TRUSTED
    key, first = _coin(coin)
    cuda_trust.vote_by_coordinate_[(triton.cdiv(n, 32 * TRUST["WORDS"]),)](
        *_planes(out), *_planes(votes), counters, slots, tables, table_of, sizes, workers,
        2 * votes.signs.stride(0), counters.stride(0), tables.stride(0), key, first, n,
        COIN=coin is not None, ALIGNED=first % 32 == 0, SYMBOL=weights.zero_is_symbol,
        WORKERS=workers if once else TRUSTED // 2, ONCE=once, WORDS=TRUST["WORDS"],
        num_warps=TRUST["num_warps"], maxnreg=TRUST["maxnreg"],
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
    tiles = _tiles(span, VOTE["TILE"])
    decided = None if coin else out.support
    cuda_votes.count_[(min(tiles[1] - tiles[0], triton.cdiv(8 * _processors(counts.device), block)), block)](
        _words(out.signs), _words(decided), *_planes(votes), counts, slots, 2 * votes.signs.stride(0) // wide,
        2 * words // wide, workers, *span, *tiles, WORKERS=min(workers, COUNTED), WIDE=wide,
        ROWS=VOTE["TILE"] // wide,
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
    return (reference.signed(coin.key) if isinstance(coin, Coin) else 0), coin.first


def _there(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor if tensor.device == device else upload(tensor, device)).contiguous()


def _width(out: Planes, votes: Planes) -> int:
    """How many 32-bit words lie aligned in every plane: 4, or at least the 2 of a 64-bit word."""
    planes = [p for p in (*out, *votes) if p is not None]
    even = all(p.data_ptr() % 16 == 0 and p.shape[-1] % 2 == 0 for p in planes)
    return 4 if even and votes.signs.stride(0) % 2 == 0 else 2


def _tiles(span: tuple[int, int], words: int) -> tuple[int, int]:
    """The tiles of so many 32-bit words that a span touches."""
    return span[0] // (32 * words), triton.cdiv(span[1], 32 * words)


def _all_alike(weights: Tensor) -> bool:
    """Whether these are known to be the same weight, and it is not zero or less."""
    if weights.device.type != "cpu":
        return False
    first, *others = weights.tolist()
    return first > 0 and all(w == first for w in others)


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
