"""Ranks whose parameters are no longer the same: they are noticed, and can be brought back together.

A digest of the parameters travels with the votes, every so many rounds. Buffers, such as the statistics of a batch
norm, are not part of it: they follow each rank's own data.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from signvote.engines.ddp.torch_names import local_of
from signvote.errors import EngineError
from signvote.kernels import signed

if TYPE_CHECKING:
    from signvote.engines.ddp.state import Voting

INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes of the float they overlay
ODD = signed(0x9E3779B97F4A7C15)
SLICE = {"cpu": 2**15}  # coordinates summed at once: as many as a cache holds
LARGE_SLICE = 2**20  # on other devices


def digest(parameters: Iterable[Tensor]) -> int:
    """64 bits that depend on every bit of the parameters and on its place. One changed coordinate changes them."""
    sums = [_sum_of_bits(parameter.detach()) for parameter in parameters]
    together = torch.stack(sums).cpu()
    hashed = hashlib.blake2b(together.numpy().tobytes(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The coordinates as integers, each times an odd number of its own, summed modulo 2^64; stays on the device."""
    flat = tensor.contiguous().view(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    length = SLICE.get(flat.device.type, LARGE_SLICE)
    factors = _factors(length, flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), length):
        part = bits[start : start + length]
        products = part.long() * factors[: len(part)]
        total = total * ODD + products.sum()
    return total


@cache
def _factors(length: int, device: torch.device) -> Tensor:
    """Odd numbers: a product with one of them is 0 only if the other factor is 0, modulo 2^64."""
    return torch.arange(1, 2 * length, 2, device=device) * ODD


def majority(digests: Sequence[int]) -> int | None:
    """The digest that more than half of the ranks have; None if there is none."""
    most, count = Counter(digests).most_common(1)[0]
    return most if 2 * count > len(digests) else None


def check(digests: Sequence[int], ranks: Sequence[int], stage: str) -> None:
    """Raise an error, the same on every rank, that names the ranks whose parameters differ.

    Args:
        digests: of the parameters, by rank.
        ranks: their names.
        stage: the round, for the error.

    """
    if len(set(digests)) == 1:
        return
    usual = majority(digests)
    call = "copy_from_majority(state, model)"
    if usual is None:
        kinds = [_named(digests, ranks, each) for each in dict.fromkeys(digests)]
        found = f"ranks have different parameters, and no majority has the same: {' | '.join(kinds)}"
        call = "copy_from_majority(state, model, source=RANK)"
    else:
        pairs = zip(ranks, digests, strict=True)
        odd = [rank for rank, each in pairs if each != usual]
        verb = "has" if len(odd) == 1 else "have"
        names = ", ".join(map(str, odd))
        found = (
            f"rank {names} {verb} other parameters than the majority, rank {_named(digests, ranks, usual)}"
        )
    raise EngineError(
        f"{stage}: {found}. Call {call} on every rank and repeat the step, or resume from a checkpoint;"
        " check_every=0 turns this check off"
    )


def _named(digests: Sequence[int], ranks: Sequence[int], digest: int) -> str:
    """The ranks with this digest."""
    pairs = zip(ranks, digests, strict=True)
    named = [str(rank) for rank, its in pairs if its == digest]
    return ", ".join(named)


@torch.no_grad()
def copy_from_majority(state: Voting, model: nn.Module, source: int | None = None) -> tuple[int, ...]:
    """Copy the parameters and buffers of a rank of the majority to the others. Every rank calls this.

    Votes, momentum and trust stay as they are. The state of an optimizer is not copied; SGD has none without momentum.
    After an error inside `backward()`, DistributedDataParallel has to be made anew from the module, and its hook
    registered again.

    Args:
        state: of the ranks that vote.
        model: its parameters and buffers are overwritten, except on the rank that they come from.
        source: the rank to copy from; None: the first of the majority.

    Returns:
        The ranks whose parameters were different.

    """
    group = state.poll.team.voters
    digests = state.poll.comparison.of_voters(state.poll.team)
    if source is None:
        usual = majority(digests)
        if usual is None:
            check(digests, group.ranks, "copy_from_majority")
        first = digests.index(usual)  # type: ignore[arg-type]
    elif source in group.ranks:
        first = group.ranks.index(source)
    else:
        raise EngineError(f"source is rank {source}; it must be one of {group.ranks}")
    for tensor in (*model.parameters(), *model.buffers()):
        mine = local_of(tensor).detach()
        travelling = mine.to(group.device).contiguous()
        group.broadcast(travelling, first)
        mine.copy_(travelling)
    odd = [rank for rank, each in zip(group.ranks, digests, strict=True) if each != digests[first]]
    return tuple(odd)
