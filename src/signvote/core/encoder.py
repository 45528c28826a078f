"""From a flat gradient to a ballot.

    m <- beta m + (1 - beta) g           momentum
    v = m + e                            what is voted on: its signs, or those of its largest part
    e <- v - scale * signs sent          error feedback; scale is the mean of |v| where a sign was sent

Zeros follow the zero rule; where the gradient is not finite the worker abstains for the round.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import NON_FINITE, REASONS, Ballot, Kind
from signvote.core.bits import Zeros, bytes_for, check_number, check_zeros, coin_for, pack_signs, unpack_signs
from signvote.core.layout import Layout
from signvote.errors import ConfigError
from signvote.kernels import Planes


class Encoder:
    """One worker's signs. The settings are those of `Worker`, which puts a model to it.

    >>> encoder = Encoder(Layout([("w", (3,))]), worker_id=0, zeros="abstain")
    >>> message = encoder.ballot(1, encoder.encode(1, torch.tensor([1.0, 0.0, -1.0])))
    """

    def __init__(
        self,
        layout: Layout,
        worker_id: int,
        *,
        momentum: float = 0.0,
        zeros: Zeros = "coin",
        run: int = 0,
        batch_size: int = 0,
        top: float | None = None,
        feedback: bool = False,
    ) -> None:
        check_zeros(zeros)
        check_number("run", run)
        if not 0 <= worker_id < 2**64 - 1:
            raise ConfigError(f"worker_id is {worker_id}; it must lie in 0..2^64-2")
        check_momentum(momentum)
        if not 0 <= batch_size < 2**32:
            raise ConfigError(f"batch_size is {batch_size}; it must lie in 0..2^32-1")
        if top is not None and not 0 < top <= 1:
            raise ConfigError(f"top is {top}; it must lie in (0, 1]")
        self.layout, self.worker_id, self.zeros, self.run = layout, worker_id, zeros, run
        self.momentum, self.batch_size, self.top, self.feedback = momentum, batch_size, top, feedback
        self.abstained = ""  # why the last round's signs are none, if they are
        self.average: Tensor | None = None  # m, once there is momentum
        self.residual: Tensor | None = None  # e, once there is feedback

    def encode(self, round: int, gradient: Tensor) -> Planes | None:
        """Signs of the gradient, or of what momentum and feedback make of it; None if that is not finite.

        With momentum, `gradient` becomes m. After a gradient that is not finite m and e keep their past.
        """
        check_number("round", round)
        if self.momentum:
            average = torch.zeros_like(gradient) if self.average is None else self.average
            averaged_(gradient, average, self.momentum)
        signal = gradient if self.residual is None else gradient + self.residual
        planes, finite = pack_signs(signal, coin_for(self.zeros, self.run, round, self.worker_id))
        self.abstained = "" if finite else REASONS[NON_FINITE]
        if not finite:
            return None
        if self.momentum:
            self.average = average.copy_(gradient)
        if self.top is not None:
            planes = pack_signs(_largest(signal, self.top), None)[0]
        if self.feedback:
            self.residual = _unsaid(signal, unpack_signs(planes, signal.numel()))
        return planes

    def ballot(self, round: int, planes: Planes | None) -> bytes:
        """The message with these signs; None: an abstention with its reason."""
        who = {"worker": self.worker_id, "round": round, "run": self.run, "batch_size": self.batch_size}
        if planes is None:
            none = np.zeros(bytes_for(self.layout.size), np.uint8)
            reason = {"kind": Kind.SPARSE, "signs": none, "support": none, "reason": NON_FINITE}
            return Ballot(layout=self.layout, **who, **reason).to_bytes()  # type: ignore[arg-type]
        ballot = Ballot.cast(self.layout, planes.map(Tensor.cpu), **who)
        return (ballot if self.top is None else ballot.thinned()).to_bytes()


def check_momentum(momentum: float) -> None:
    """Raise unless 0 <= momentum < 1."""
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum is {momentum}; it must lie in [0, 1)")


def averaged_(gradient: Tensor, average: Tensor, momentum: float) -> None:
    """Put beta m + (1 - beta) g in place of the gradient g; any part of a vector may be averaged by itself."""
    torch.lerp(average, gradient, 1 - momentum, out=gradient)


def _largest(signal: Tensor, share: float) -> Tensor:
    """The signal where its magnitude is among the largest `share`, at least one; 0 elsewhere."""
    k = max(1, round(share * signal.numel()))
    kept = signal.abs().topk(k).indices
    return torch.zeros_like(signal).index_copy_(0, kept, signal[kept])


def _unsaid(signal: Tensor, sent: Tensor) -> Tensor:
    """What is left of a signal when its signs have been sent, each standing for the mean magnitude of those sent."""
    cast = sent != 0
    scale = (signal.abs() * cast).sum() / cast.sum().clamp_min(1)
    return signal - scale * sent
