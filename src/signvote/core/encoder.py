"""From a flat gradient to signs, and from signs to a ballot.

    g <- g min(1, clip / |g|)            clipping to a norm
    m <- beta m + (1 - beta) g           momentum
    s = m                                or alpha m + (1 - alpha) g, with the m of before: the interpolation of Lion
    v = s + e                            the signal: its signs are sent, or those of its largest part
    e <- v - scale * signs sent          error feedback; scale is the mean of |v| where a sign was sent
    v = s - a h                          instead, where votes are corrections: see corrections.py
    e <- v - scale * signs sent          with a scale for each tensor, which the ballot carries: see scales.py

Zeros follow the zero rule. If the signal is not finite, the worker abstains for the round, and m and e stay the same.

`encode` is the step itself, a pure function. Every engine calls it: for one worker, for a slice of one, or for many
workers as rows of a matrix. `Encoder` keeps what one worker must remember between rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from signvote.core.ballot import NON_FINITE, REASONS, Ballot, Claims
from signvote.core.bits import (
    Zeros,
    check_number,
    check_zeros,
    coin_for,
    sign_planes,
    unpack_signs,
)
from signvote.core.corrections import LEAK, believed, claims, corrected, own, scales
from signvote.core.layout import Layout
from signvote.core.parts import clipped, largest, left_out
from signvote.core.scales import coded, mean_magnitudes, restored, spread, unsent, values
from signvote.core.vote import empty_decision
from signvote.errors import ConfigError
from signvote.kernels import WORD, Coin, Coins, Planes

if TYPE_CHECKING:
    from signvote.core.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How gradients become signs: one object, the same for every worker and engine of a run."""

    momentum: float = 0.0  # beta; 0 is the paper
    interpolation: float | None = None  # alpha; None: the signal is m
    clip: float | None = None  # the largest norm of a gradient; None: any
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
        if self.corrects and self.interpolation is not None:
            raise ConfigError(
                "corrections, which the rule 'mean' needs, are of m itself: use interpolation=None"
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
        return self.feedback or self.top is not None or self.clip is not None

    @property
    def sends_average(self) -> bool:
        """Whether the signal is the average of the gradients as they are, which can be computed as they come in."""
        return self.interpolation is None and self.clip is None

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
        out: where to write the new average, such as the gradient's own memory; None: into new memory.

    """
    beta = encoding.momentum if momentum is None else momentum
    if encoding.clip is not None:
        gradient = clipped(gradient, encoding.clip)
    average, signal = _averages(gradient, memory.average, encoding.interpolation, beta, out)
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
        self._claims: Tensor | None = None  # of the last round, if votes are corrections or scaled

    def encode(self, round: int, gradient: Tensor, *, top: float | None = None) -> Planes | None:
        """The signs of this round; None if the signal is not finite. With momentum, `gradient` becomes the signal s.

        Args:
            round: its number.
            gradient: of this worker.
            top: the share of the coordinates voted on in this round, if the encoding has one; None: the encoding's.

        """
        check_number("round", round)
        coin = coin_for(self.encoding.zeros, self.run, round, self.worker_id)
        self._prepare_memory(gradient)
        found = encode(gradient, self.memory, self.encoding, coin, top=top, out=gradient)
        if not found.finite:
            self.abstained = REASONS[NON_FINITE]
            return None
        self.abstained = ""
        self._keep(found.memory)
        gradient.copy_(found.signal)  # the same tensor, unless there is an interpolation
        if self.encoding.corrects:
            self._claims = claims(gradient, self.layout)
        if self.encoding.scales:
            self._scale(gradient, found.planes)
        return found.planes

    def _scale(self, signal: Tensor, planes: Planes) -> None:
        """Note the scales that go with some signs, and keep what both leave out."""
        self._claims = coded(mean_magnitudes(signal, self.layout)).cpu()
        residual = unsent(signal, unpack_signs(planes, self.layout.size), self._scales())
        self.memory = self.memory._replace(residual=residual)

    def _scales(self) -> Tensor:
        """The scale of each coordinate in the last ballot."""
        assert self._claims is not None
        return spread(values(self._claims), self.layout, 0, self.layout.size)

    @property
    def is_local(self) -> bool:
        """Whether a sign depends on the gradient at its own coordinate in this round, and on nothing else."""
        settings = self.encoding
        depends = settings.remembers or settings.needs_whole_vector or settings.has_claims
        return not depends and all(kept is None for kept in self.memory)

    def encode_ranges(self, round: int, ranges: Iterable[tuple[int, Tensor]]) -> Planes | None:
        """The same for one range of the gradient at a time, if signs are local.

        Args:
            round: its number.
            ranges: in order, each with its first coordinate, a multiple of 64; a range may reuse memory of the last.

        """
        check_number("round", round)
        coin = coin_for(self.encoding.zeros, self.run, round, self.worker_id)
        planes = empty_decision(self.layout.size, coin)
        for first, gradient in ranges:
            toss = coin and coin.after(first)
            found = encode(gradient, self.memory, self.encoding, toss)
            if not found.finite:
                self.abstained = REASONS[NON_FINITE]
                return None
            start = first // WORD
            for whole, part in zip(planes, found.planes, strict=True):
                if whole is not None and part is not None:
                    whole[start : start + part.numel()] = part
        self.abstained = ""
        return planes

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

    def correct(self, planes: Planes | None, largest: Tensor) -> None:
        """Follow a decision on corrections: what the server believes of this worker now.

        Args:
            planes: that this worker sent, if they were counted.
            largest: exponents of the largest scales that count.

        """
        belief = self.memory.belief
        if belief is None:  # nothing was sent yet
            return
        if planes is None:
            corrected(belief, None, None)
            return
        assert self._claims is not None
        n = self.layout.size
        exponents = own(self._claims.to(belief.device), largest.to(belief.device))
        signs = unpack_signs(planes, n).to(belief.device)
        corrected(belief, signs, scales(exponents, self.layout, 0, n))

    def load_claims(self, claims: Claims | None) -> None:
        """Resume with the scales of the last ballot."""
        self._claims = None if claims is None else torch.from_numpy(claims.copy())

    def hear(self, planes: Planes, limits: Tensor | None) -> None:
        """Follow a decision on scaled votes: what did not count stays in the residual.

        Args:
            planes: that this worker sent.
            limits: the codes of the largest scales that counted; None: this worker's ballot did not.

        """
        residual = self.memory.residual
        assert residual is not None
        limit = None if limits is None else spread(values(limits), self.layout, 0, self.layout.size)
        signs = unpack_signs(planes, self.layout.size).to(residual.device)
        self.memory = self.memory._replace(residual=restored(residual, signs, self._scales(), limit))

    def miss(self, rounds: int) -> None:
        """Follow decisions that this worker did not hear of: what the server believed of it has leaked away since."""
        belief = self.memory.belief
        if belief is not None:
            belief *= LEAK**rounds

    def ballot(self, round: int, planes: Planes | None) -> bytes:
        """The message with these signs; None: an abstention with its reason."""
        if planes is None:
            nothing = Ballot.abstention(
                self.layout, worker=self.worker_id, round=round, run=self.run, batch_size=self.batch_size
            )
            return nothing.to_bytes()
        ballot = Ballot.cast(
            self.layout,
            planes.map(Tensor.cpu),
            worker=self.worker_id,
            round=round,
            run=self.run,
            batch_size=self.batch_size,
            claims=None if self._claims is None else self._claims.cpu().numpy(),
            scales=self.encoding.scales,
        )
        if self.encoding.top is not None:
            ballot = ballot.thinned()
        return ballot.to_bytes()
