"""Votes with a scale of each worker's own: weights that are integers, and the weighted mean of scaled signs.

    sum_m w_m s_m b_m / sum_m w_m       b_m: a worker's signs, s_m: its scale for a tensor, w_m: its weight

A scale is a small integer times a power of two. So w s is an integer in a unit that a tensor has in common, sums of
votes are exact, and servers that own a part of the coordinates each decide as one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.layout import Layout
from signvote.core.vote import TALLY, Votes, empty_decision
from signvote.kernels import WORD, backend, upload, words_for

ROOM = 8  # binary digits below those of the largest scale
FAR = 30  # binary digits below the largest scale where nothing is left of another


class Powers(NamedTuple):
    """The weights of scaled votes, which are integers, and what they stand for."""

    weights: Tensor  # w s, (workers, tensors) int32
    unit: Tensor  # of a tally divided by the sum of all w, (tensors,) float32
    top: Tensor  # the exponent of the largest scale, (tensors,) int64


def powers_of(weights: Tensor, mantissa: Tensor, exponent: Tensor) -> Powers:
    """The weights of scaled votes, in units that a tally has room for.

    Args:
        weights: w, (workers, tensors) int64.
        mantissa: with `exponent`, the scales: s = mantissa 2^exponent, (workers, tensors) int64.
        exponent: see `mantissa`.

    >>> one = torch.ones(2, 1, dtype=torch.int64)
    >>> powers_of(3 * one, one, torch.tensor([[0], [-1]])).weights[:, 0].tolist()
    [768, 384]

    """
    top = exponent.amax(0)
    below = (top - exponent).clamp_max(FAR)
    fine = weights * mantissa * 2**ROOM
    power = fine.div(1 << below, rounding_mode="trunc")
    largest_tally = power.abs().sum(0)
    halvings = _halvings(largest_tally)
    power = power.div(1 << halvings, rounding_mode="trunc")
    total = weights.abs().sum(0).clamp_min(1)
    digits = top - ROOM + halvings
    unit = torch.exp2(digits.double()) / total.double()
    return Powers(power.int(), unit.float(), top)


def _halvings(totals: Tensor) -> Tensor:
    """How often integers must be halved until sums of these sizes fit a tally."""
    _, bits = torch.frexp(totals.double())
    too_many = bits.long() - TALLY.bit_length()
    return too_many.clamp_min(0)


def agreed(claimed: Tensor, weights: Tensor) -> Tensor:
    """The weighted lower median of the workers' claims: (workers, tensors) -> (tensors,), of the same type.

    Args:
        claimed: by worker and tensor.
        weights: integers, of the workers, or of each worker in each tensor.

    >>> agreed(torch.tensor([[1], [5], [9]], dtype=torch.int8), torch.tensor([1, 1, 1])).tolist()
    [5]
    >>> agreed(torch.tensor([[1], [5], [9]], dtype=torch.int8), torch.tensor([1, 1, 3])).tolist()
    [9]

    """
    ordered = claimed.sort(0)
    by_tensor = weights.long()
    if weights.dim() == 1:
        by_tensor = by_tensor[:, None].expand_as(claimed)
    in_order = by_tensor.gather(0, ordered.indices)
    below = in_order.cumsum(0)
    is_half = 2 * below >= by_tensor.sum(0)
    middle = is_half.int().argmax(0, keepdim=True)
    return ordered.values.gather(0, middle)[0]


def tensors_of(votes: Votes, layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Each tensor with coordinates among those of some votes: its number, begin and end."""
    for g, segment in enumerate(layout.segments):
        begin = max(0, segment.start - votes.first)
        end = min(votes.n, segment.stop - votes.first)
        if begin < end:
            yield g, begin, end


def tallied(votes: Votes, powers: Powers, layout: Layout) -> tuple[Tensor, Tensor]:
    """The weighted mean of scaled signs, and who disagrees with its sign.

    Returns:
        The mean at each coordinate, (n,) float32; mismatches and votes cast, (2, workers, tensors) int64.

    """
    device = votes.device
    kernels = backend(device)
    majority = empty_decision(votes.n, None, device)
    mean = torch.zeros(votes.n, device=device)
    shape = (2, len(votes.workers), len(layout.segments))
    counts = torch.zeros(shape, dtype=torch.int64, device=device)
    weights = upload(powers.weights, device)
    unit = upload(powers.unit, device)
    for g, begin, end in tensors_of(votes, layout):
        column = weights[:, g].contiguous()
        seen = kernels.vote_(majority, votes.planes, column, None, (begin, end))
        counts[:, :, g] = torch.stack(seen)
        tally = _tally(votes, column, begin, end)
        mean[begin:end] = tally.float() * unit[g]
    return mean, counts


def _tally(votes: Votes, column: Tensor, begin: int, end: int) -> Tensor:
    """The sum of the weighted votes on coordinates begin to end."""
    low = begin // WORD
    start = low * WORD
    words = slice(low, words_for(end))
    planes = votes.planes.map(lambda plane: plane[:, words].contiguous())
    tally = backend(votes.device).tally(planes, column, end - start)
    return tally[begin - start :]
