"""From a flat gradient to signs, and from signs to a ballot.

    m <- beta m + (1 - beta) g           momentum
    v = m + e                            the signal: its signs are sent, or those of its largest part
    e <- v - scale * signs sent          error feedback; scale is the mean of |v| where a sign was sent
    v = m - a h                          instead, where votes are corrections: see corrections.py

Zeros follow the zero rule. If the signal is not finite, the worker abstains for the round, and m and e stay the same.

`encode` is the step itself, a pure function. Every engine calls it: for one worker, for a slice of one, or for many
workers as rows of a matrix. `Encoder` keeps what one worker must remember between rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import NON_FINITE, REASONS, Ballot, Kind
from signvote.core.bits import (
    Zeros,
    bytes_for,
    check_number,
    check_zeros,
    coin_for,
    sign_planes,
    unpack_signs,
)
from signvote.core.corrections import LEAK, believed, claims, corrected, scales
from signvote.core.layout import Layout
from signvote.errors import ConfigError
from signvote.kernels import Coin, Coins, Planes

if TYPE_CHECKING:
    from signvote.core.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How gradients become signs: one object, the same for every worker and engine of a run."""

    momentum: float = 0.0  # beta; 0 is the paper
    zeros: Zeros = "coin"
    top: float | None = None  # the share of the coordinates that is voted on; None: all
    feedback: bool = False
    corrects: bool = False  # votes are corrections of what the server believes: with the rule "mean"

    def __post_init__(self) -> None:
        check_zeros(self.zeros)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}; it must lie in [0, 1)")
        if self.top is not None and not 0 < self.top <= 1:
            raise ConfigError(f"top is {self.top}; it must lie in (0, 1]")
        if self.corrects and (self.zeros != "coin" or self.top is not None or self.feedback):
            raise ConfigError(
                "corrections, which the rule 'mean' needs, are dense: use zeros='coin', top=None and feedback=False"
            )

    def suiting(self, rule: Rule) -> Encoding:
        """The same, with votes as this rule needs them."""
        return replace(self, corrects=rule.corrects)

    @property
    def needs_whole_vector(self) -> bool:
        """Whether a sign depends on other coordinates, so that slices cannot be encoded by themselves."""
        return self.feedback or self.top is not None

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
    signal: Tensor  # v


def encode(
    gradient: Tensor,
    memory: Memory,
    encoding: Encoding,
    coin: Coin | Coins | None,
    *,
    momentum: float | Tensor | None = None,
    out: Tensor | None = None,
) -> Encoded:
    """Encode gradients (..., n). The caller keeps the new memory if the signal was finite.

    Args:
        gradient: of one worker, or of several as rows.
        memory: before this round.
        encoding: the settings.
        coin: of the worker, round and first coordinate; one for each row; None: zeros abstain.
        momentum: beta of this round, or one for each coordinate; None: the encoding's.
        out: where to write the new average, such as the gradient's own memory; None: into new memory.

    """
    beta = encoding.momentum if momentum is None else momentum
    average = None
    signal = gradient
    if memory.average is not None or isinstance(beta, Tensor) or beta != 0:
        average = averaged(gradient, memory.average, beta, out)
        signal = average
    if memory.residual is not None:
        signal = signal + memory.residual
    if memory.belief is not None:
        signal = signal - believed(memory.belief)
    planes, finite = sign_planes(signal, coin)
    if encoding.top is not None:
        planes, _ = sign_planes(_largest(signal, encoding.top), None)
    residual = None
    if encoding.feedback:
        sent = unpack_signs(planes, signal.shape[-1])
        residual = _unsent(signal, sent)
    return Encoded(
        planes=planes,
        finite=finite,
        memory=Memory(average, residual, memory.belief),
        signal=signal,
    )


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


def _largest(signal: Tensor, share: float) -> Tensor:
    """The signal where its magnitude is among the largest `share` of a row, at least one; 0 elsewhere."""
    n = signal.shape[-1]
    k = max(1, round(share * n))
    kept = signal.abs().topk(k).indices
    values = signal.gather(-1, kept)
    return torch.zeros_like(signal).scatter_(-1, kept, values)


def _unsent(signal: Tensor, sent: Tensor) -> Tensor:
    """The residual: the signal less the signs sent, each times the mean magnitude where a sign was sent.

    The mean is summed in float64: neither threads nor rows may change a bit of it.
    """
    cast = sent != 0
    magnitude = (signal.abs() * cast).sum(-1, keepdim=True, dtype=torch.float64)
    count = cast.sum(-1, keepdim=True)
    scale = magnitude / count.clamp_min(1)
    return signal - scale.to(signal.dtype) * sent


def check_batch_size(batch_size: int) -> None:
    """Raise unless the batch size fits the header's 32 bits."""
    if not 0 <= batch_size < 2**32:
        raise ConfigError(f"batch_size is {batch_size}; it must lie in 0..2^32-1")


class Encoder:
    """The signs and ballots of one worker.

    >>> encoder = Encoder(Layout([("w", (3,))]), worker_id=0, encoding=Encoding(zeros="abstain"))
    >>> message = encoder.ballot(1, encoder.encode(1, torch.tensor([1.0, 0.0, -1.0])))
    """

    def __init__(
        self,
        layout: Layout,
        worker_id: int,
        encoding: Encoding | None = None,
        *,
        run: int = 0,
        batch_size: int = 0,
    ) -> None:
        check_number("run", run)
        if not 0 <= worker_id < 2**64 - 1:
            raise ConfigError(f"worker_id is {worker_id}; it must lie in 0..2^64-2")
        check_batch_size(batch_size)
        self.layout = layout
        self.worker_id = worker_id
        self.encoding = encoding or Encoding()
        self.run = run
        self.batch_size = batch_size
        self.memory = Memory()
        self.abstained = ""  # why the last round had no signs, if it had none
        self._claims: Tensor | None = None  # of the last round, if votes are corrections

    def encode(self, round: int, gradient: Tensor) -> Planes | None:
        """The signs of this round; None if the signal is not finite. With momentum, `gradient` becomes m."""
        check_number("round", round)
        coin = coin_for(self.encoding.zeros, self.run, round, self.worker_id)
        self._prepare_memory(gradient)
        found = encode(gradient, self.memory, self.encoding, coin, out=gradient)
        if not found.finite:
            self.abstained = REASONS[NON_FINITE]
            return None
        self.abstained = ""
        self._keep(found.memory)
        if self.encoding.corrects:
            self._claims = claims(gradient, self.layout)
        return found.planes

    def _prepare_memory(self, gradient: Tensor) -> None:
        """Bring the memory to the gradient's device and type: after a resume, or a move of the model."""
        average, residual, belief = self.memory.map(lambda kept: kept.to(gradient))
        if self.encoding.corrects:
            kept = torch.zeros_like(gradient) if self.memory.belief is None else self.memory.belief
            belief = kept.to(gradient.device, torch.float32)
        self.memory = Memory(average, residual, belief)

    def _keep(self, memory: Memory) -> None:
        """Copy the new average, which lies in the caller's gradient, into memory of our own."""
        average = memory.average
        if average is not None:
            own = self.memory.average
            average = average.clone() if own is None else own.copy_(average)
        self.memory = Memory(average, memory.residual, memory.belief)

    def correct(self, planes: Planes | None, exponents: Tensor) -> None:
        """Follow a decision on corrections: what the server believes of this worker now.

        Args:
            planes: that this worker sent, if they were counted.
            exponents: of the scales agreed on.

        """
        belief = self.memory.belief
        if belief is None:  # nothing was sent yet
            return
        n = self.layout.size
        signs = None if planes is None else unpack_signs(planes, n).to(belief.device)
        corrected(belief, signs, scales(exponents.to(belief.device), self.layout, 0, n))

    def miss(self, rounds: int) -> None:
        """Follow decisions that this worker did not hear of: what the server believed of it has leaked away since."""
        belief = self.memory.belief
        if belief is not None:
            belief *= LEAK**rounds

    def ballot(self, round: int, planes: Planes | None) -> bytes:
        """The message with these signs; None: an abstention with its reason."""
        if planes is None:
            return self._abstention(round).to_bytes()
        ballot = Ballot.cast(
            self.layout,
            planes.map(Tensor.cpu),
            worker=self.worker_id,
            round=round,
            run=self.run,
            batch_size=self.batch_size,
            claims=None if self._claims is None else self._claims.cpu().numpy(),
        )
        if self.encoding.top is not None:
            ballot = ballot.thinned()
        return ballot.to_bytes()

    def _abstention(self, round: int) -> Ballot:
        nothing = np.zeros(bytes_for(self.layout.size), np.uint8)
        return Ballot(
            layout=self.layout,
            worker=self.worker_id,
            round=round,
            run=self.run,
            kind=Kind.SPARSE,
            signs=nothing,
            support=nothing,
            batch_size=self.batch_size,
            reason=NON_FINITE,
        )
