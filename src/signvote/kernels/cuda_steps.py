"""Steps in Triton: of one tensor, and of many in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from signvote.kernels import Planes, cuda_bits, reference, upload

STEPPED = 32  # 32-bit words that a program steps over
STEP_BLOCK = 1024  # coordinates of one tensor that a program steps over, where it steps over many


def step_(x: Tensor, decision: Planes, begin: int, step: float, keep: float = 1.0) -> None:
    """One launch, two with `keep`; float16 and bfloat16 are computed in float32, as torch does."""
    if keep != 1:
        x.mul_(keep)
    programs = triton.cdiv(x.numel(), 32 * STEPPED)
    cuda_bits.step_[(programs,)](
        x,
        as_words(decision.signs),
        as_words(decision.support),
        begin,
        2 * decision.signs.numel(),
        x.numel(),
        -step,
        ALIGNED=begin % 32 == 0,
        WIDE=x.dtype == torch.float64,
        WORDS=STEPPED,
    )


def step_all_(
    targets: Sequence[Tensor],
    begins: Sequence[int],
    decision: Planes,
    step: float,
    keep: float = 1.0,
    decided: Tensor | None = None,
) -> None:
    """One launch for all tensors of float32 without gaps; others as plain torch does it."""
    is_plain = [x.dtype == torch.float32 and x.is_contiguous() for x in targets]
    if not all(is_plain):
        others = [place for place, plain in enumerate(is_plain) if not plain]
        their_begins = [begins[place] for place in others]
        reference.step_all_([targets[place] for place in others], their_begins, decision, step, keep, decided)
    spans = [
        (x.data_ptr(), x.numel(), begin)
        for x, begin, plain in zip(targets, begins, is_plain, strict=True)
        if plain
    ]
    if not spans:
        return
    table = _blocks(tuple(spans), decision.signs.device)
    blocks = table.shape[1]
    cuda_bits.step_all_[(blocks,)](
        table,
        as_words(decision.signs),
        as_words(decision.support),
        blocks,
        step,
        keep,
        decided,
        BLOCK=STEP_BLOCK,
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=16)
def _blocks(spans: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """The blocks of tensors with these addresses, sizes and coordinates, as `cuda_bits.step_all_` reads them."""
    columns = []
    for address, size, begin in spans:
        done = torch.arange(0, size, STEP_BLOCK)
        left = (size - done).clamp_max(STEP_BLOCK)
        columns.append(torch.stack([address + 4 * done, begin + done, left]))
    return upload(torch.cat(columns, 1), device)


def as_words(plane: Tensor | None) -> Tensor | None:
    """A plane as 32-bit words."""
    return None if plane is None else plane.view(torch.uint32)
