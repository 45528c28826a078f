"""Scales: one byte for each tensor, the mean magnitude of what its signs stand for.

    s = mean |p|        of a tensor, as a code of 8 bits
    code                (4 + code mod 4) 2^(floor(code / 4) - 18)          -128 is 0
    e <- p - s sign(p)  the residual: what the signs, each times s, leave out
    x - e               where the worker's next local steps start

Codes cover 3.6e-15 to 57,344 in steps of at most a quarter. Rounding a scale loses nothing: the residual keeps the
difference. The value of a code is a small integer times a power of two, so that weighted sums of them are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.layout import Layout, Segment
from signvote.kernels import upload

STEPS = 4  # codes to a factor of two
BELOW = 18  # the exponent of code 0 is -18
NOTHING = -128  # the code of 0
CODES = (-127, 127)  # of numbers above 0


def coded(magnitudes: Tensor) -> Tensor:
    """The codes of numbers of 0 or more, int8: the nearest there are.

    >>> coded(torch.tensor([0.0, 1.0, 1.3, 1e9])).tolist()
    [-128, 64, 65, 127]
    """
    fraction, exponent = torch.frexp(magnitudes.double())  # fraction is 0, or in [1/2, 1)
    eighths = (fraction * 2 * STEPS).round().long()
    codes = STEPS * (exponent.long() - 3 + BELOW) + eighths - STEPS
    return torch.where(magnitudes > 0, codes.clamp(*CODES), NOTHING).to(torch.int8)


def mantissas(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as integers times powers of two: (mantissas, exponents), int64.

    >>> [each.tolist() for each in mantissas(torch.tensor([-128, 64, 65], dtype=torch.int8))]
    [[0, 4, 5], [-50, -2, -2]]
    """
    wide = codes.long()
    exponents = wide.div(STEPS, rounding_mode="floor") - BELOW
    mantissa = STEPS + wide.remainder(STEPS)
    return torch.where(wide == NOTHING, 0, mantissa), exponents


def values(codes: Tensor) -> Tensor:
    """The scales that codes stand for, float32; exact.

    >>> values(coded(torch.tensor([0.0, 1.0, 1.3, 1e9]))).tolist()
    [0.0, 1.0, 1.25, 57344.0]
    """
    mantissa, exponents = mantissas(codes)
    return mantissa.float() * torch.exp2(exponents.float())


def mean_magnitudes(signal: Tensor, layout: Layout) -> Tensor:
    """The mean of |p| for each tensor: (..., n) -> (..., tensors) float64; 0 for a tensor without coordinates."""
    sums = [
        signal[..., segment.start : segment.stop].abs().sum(-1, dtype=torch.float64)
        for segment in layout.segments
    ]
    return torch.stack(sums, -1) / lengths(layout).to(signal.device)


def lengths(layout: Layout) -> Tensor:
    """The coordinates of each tensor, at least 1, (tensors,) float64."""
    return torch.tensor([max(1, segment.stop - segment.start) for segment in layout.segments]).double()


def spread(by_tensor: Tensor, layout: Layout, first: int, n: int) -> Tensor:
    """The number of its tensor for each of the coordinates first to first + n: (..., tensors) -> (..., n)."""
    counts = [overlap(segment, first, first + n) for segment in layout.segments]
    repeats = upload(torch.tensor(counts), by_tensor.device)
    return by_tensor.repeat_interleave(repeats, -1, output_size=sum(counts))


def overlap(segment: Segment, first: int, stop: int) -> int:
    """How many coordinates of a tensor lie in a range."""
    return max(0, min(segment.stop, stop) - max(segment.start, first))


def unsent(signal: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """What signs, each times its scale, leave out of a signal: e <- p - s sign(p)."""
    return signal - scale.to(signal) * signs


def own_start(x: Tensor, residual: Tensor | None) -> Tensor:
    """Where the local steps of a worker start: x - e, with the part of its change that no vote has carried yet.

    So a gradient is that of parameters which hold all of the worker's own steps. From x itself a worker would repeat
    steps that are only delayed.

    Args:
        x: the parameters of the last vote, the same for all workers.
        residual: e; None: nothing yet.

    """
    return x.clone() if residual is None else x - residual.to(x)


def restored(residual: Tensor, signs: Tensor, scale: Tensor, limit: Tensor | None) -> Tensor:
    """The residual, and what of the votes did not count: e <- e + (s - min(s, limit)) sign(p).

    Args:
        residual: e.
        signs: that were sent.
        scale: s of each coordinate.
        limit: of each coordinate; None: nothing was counted.

    """
    uncounted = scale if limit is None else scale - scale.minimum(limit)
    return residual + uncounted.to(residual) * signs
