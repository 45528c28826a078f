"""From a flat gradient to signs.

    g <- g min(1, clip / |g|)            clipping to a norm
    m <- beta m + (1 - beta) g           momentum
    s = m                                or alpha m + (1 - alpha) g, with the m of before: the interpolation of Lion
    s <- polar factors of s              of its matrices: see polar.py
    v = s + e                            the signal: its signs are sent, or those of its largest part
    e <- v - scale * signs sent          error feedback; scale is the mean of |v| where a sign was sent
    v = s - a h                          instead, where votes are corrections: see corrections.py
    e <- v - scale * signs sent          with a scale for each tensor, which the ballot carries: see scales.py

Zeros follow the zero rule. If the signal is not finite, the worker abstains for the round, and m and e stay the same.

`encode` is the step itself, a pure function. Every engine calls it: for one worker, for a slice of one, or for many
workers as rows of a matrix. `Encoder` in encoder.py keeps what one worker must remember between rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from signvote.core.bits import (
    Zeros,
    check_zeros,
    sign_planes,
    unpack_signs,
)
from signvote.core.corrections import believed
from signvote.core.parts import clipped, largest, left_out
from signvote.core.polar import with_polar_factors
from signvote.errors import ConfigError
from signvote.kernels import Coin, Coins, Planes

if TYPE_CHECKING:
    from signvote.core.layout import Layout
    from signvote.core.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How gradients become signs: one object, the same for every worker and engine of a run."""

    momentum: float = 0.0  # beta; 0 is the paper
    interpolation: float | None = None  # alpha; None: the signal is m
    clip: float | None = None  # the largest norm of a gradient; None: any
    polar: bool = False  # the signal of a matrix is its polar factor
    zeros: Zeros = "coin"
    top: float | None = None  # the share of the coordinates that is voted on; None: all
    feedback: bool = False
    corrects: bool = False  # votes are corrections of what the server believes: with the rule "mean"
    scales: bool = False  # ballots carry a scale for each tensor: with `ScaledVotes`, for local steps

    def __post_init__(self) -> None:
        check_zeros(self.zeros)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}; it must lie in [0, 1)")
        if self.interpolation is not None and not 0 <= self.interpolation < 1:
            raise ConfigError(f"interpolation is {self.interpolation}; it must lie in [0, 1)")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip is {self.clip}; it must be above 0")
        if self.top is not None:
            check_top(self.top)
        if self.corrects and (self.zeros != "coin" or self.top is not None or self.feedback):
            raise ConfigError(
                "corrections, which the rule 'mean' needs, are dense: use zeros='coin', top=None and feedback=False"
            )
        if self.corrects and (self.interpolation is not None or self.polar):
            raise ConfigError(
                "corrections, which the rule 'mean' needs, are of m itself: use interpolation=None and polar=False"
            )
        if self.scales and replace(self, scales=False) != Encoding():
            raise ConfigError(
                "scaled votes have their own feedback and no other setting: use Encoding(scales=True)"
            )

    def suiting(self, rule: Rule) -> Encoding:
        """The same, with votes as this rule needs them."""
        return replace(self, corrects=rule.corrects, scales=rule.scales)

    @property
    def needs_whole_vector(self) -> bool:
        """Whether a sign depends on other coordinates, so that slices cannot be encoded by themselves."""
        return self.feedback or self.top is not None or self.clip is not None or self.polar

    @property
    def sends_average(self) -> bool:
        """Whether the signal is the average of the gradients as they are, which can be computed as they come in."""
        return self.interpolation is None and self.clip is None and not self.polar

    @property
    def remembers(self) -> bool:
        """Whether a worker keeps an average of its gradients."""
        return self.momentum != 0 or bool(self.interpolation)

    @property
    def has_claims(self) -> bool:
        """Whether ballots carry a byte for each tensor, and a worker must follow what becomes of them."""
        return self.corrects or self.scales

    @property
    def planes(self) -> int:
        """Planes of a vote: signs, and a support plane where coordinates may be left out."""
        return 1 if self.zeros == "coin" and self.top is None else 2


class Memory(NamedTuple):
    """The state of a worker between rounds, in the shape of its gradient. None: nothing yet, or not needed."""

    average: Tensor | None = None  # m
    residual: Tensor | None = None  # e
    belief: Tensor | None = None  # h, float32

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """Apply the same change to all tensors."""
        return Memory(*(None if tensor is None else change(tensor) for tensor in self))


class Encoded(NamedTuple):
    """The result of `encode`."""

    planes: Planes
    finite: bool | Tensor  # one for each row; on a GPU it stays there
    memory: Memory  # to keep where the signal was finite
    signal: (
        Tensor  # s; `out`, if that is where the average is. Of scaled votes v, which has the residual in it
    )


def encode(
    gradient: Tensor,
    memory: Memory,
    encoding: Encoding,
    coin: Coin | Coins | None,
    *,
    momentum: float | Tensor | None = None,
    top: float | None = None,
    layout: Layout | None = None,
    out: Tensor | None = None,
) -> Encoded:
    """Encode gradients (..., n). The caller keeps the new memory if the signal was finite.

    Args:
        gradient: of one worker, or of several as rows.
        memory: before this round.
        encoding: the settings.
        coin: of the worker, round and first coordinate; one for each row; None: zeros abstain.
        momentum: beta of this round, or one for each coordinate; None: the encoding's.
        top: the share of the coordinates voted on in this round, if the encoding has one; None: the encoding's.
        layout: of the parameters; only polar factors need it.
        out: where to write the new average, such as the gradient's own memory; None: into new memory.

    """
    beta = encoding.momentum if momentum is None else momentum
    if encoding.clip is not None:
        gradient = clipped(gradient, encoding.clip)
    average, signal = _averages(gradient, memory.average, encoding.interpolation, beta, out)
    if encoding.polar:
        assert layout is not None
        signal = with_polar_factors(signal, layout)
    v = signal
    if memory.residual is not None:
        v = signal + memory.residual
    if memory.belief is not None:
        v = signal - believed(memory.belief)
    planes, finite = sign_planes(v, coin)
    if encoding.top is not None:
        planes, _ = sign_planes(largest(v, top or encoding.top), None)
    residual = None
    if encoding.feedback:
        sent = unpack_signs(planes, v.shape[-1])
        residual = left_out(v, sent)
    return Encoded(
        planes=planes,
        finite=finite,
        memory=Memory(average, residual, memory.belief),
        signal=v if encoding.scales else signal,
    )


def _averages(
    gradient: Tensor,
    average: Tensor | None,
    alpha: float | None,
    beta: float | Tensor,
    out: Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """The new average m, if there is one, and the signal s."""
    signal = gradient
    if alpha is not None:  # first, as `out` may be the gradient
        signal = averaged(gradient, average, alpha)
    if average is None and not alpha and not isinstance(beta, Tensor) and beta == 0:
        return None, signal
    after = averaged(gradient, average, beta, out)
    return after, after if alpha is None else signal


def averaged(
    gradient: Tensor,
    average: Tensor | None,
    beta: float | Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The new average m <- beta m + (1 - beta) g, of tensors of any shape; before the first gradient m is 0."""
    before = torch.zeros_like(gradient) if average is None else average
    after: Tensor = torch.lerp(before, gradient, 1 - beta, out=out)
    return after


def check_top(top: float) -> None:
    """Raise unless this is a share of the coordinates."""
    if not 0 < top <= 1:
        raise ConfigError(f"top is {top}; it must lie in (0, 1]")


def check_batch_size(batch_size: int) -> None:
    """Raise unless the batch size fits the header's 32 bits."""
    if not 0 <= batch_size < 2**32:
        raise ConfigError(f"batch_size is {batch_size}; it must lie in 0..2^32-1")
