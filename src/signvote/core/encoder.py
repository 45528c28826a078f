"""From a flat gradient to a ballot: momentum, the zero rule, abstention, the choice of coordinates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import Ballot, Kind
from signvote.core.bits import Zeros, bytes_for, check_number, check_zeros, coin_for, pack_signs
from signvote.core.layout import Layout
from signvote.errors import ConfigError
from signvote.kernels import Planes

NON_FINITE = 1  # key of ballot.REASONS


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
    ) -> None:
        check_zeros(zeros)
        check_number("run", run)
        if not 0 <= worker_id < 2**64 - 1:
            raise ConfigError(f"worker_id is {worker_id}; it must lie in 0..2^64-2")
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum is {momentum}; it must lie in [0, 1)")
        if not 0 <= batch_size < 2**32:
            raise ConfigError(f"batch_size is {batch_size}; it must lie in 0..2^32-1")
        if top is not None and not 0 < top <= 1:
            raise ConfigError(f"top is {top}; it must lie in (0, 1]")
        self.layout, self.worker_id, self.zeros, self.run = layout, worker_id, zeros, run
        self.momentum, self.batch_size, self.top = momentum, batch_size, top
        self.abstained = ""  # why the last round's signs are none, if they are
        self.average: Tensor | None = None  # m, once there is momentum

    def encode(self, round: int, gradient: Tensor) -> Planes | None:
        """Signs of the gradient g, or of m <- beta m + (1 - beta) g; None if that is not finite.

        With momentum, `gradient` is written over. After a gradient that is not finite m keeps its past.
        """
        check_number("round", round)
        if self.momentum:
            average = torch.zeros_like(gradient) if self.average is None else self.average
            torch.lerp(average, gradient, 1 - self.momentum, out=gradient)
        planes, finite = pack_signs(gradient, coin_for(self.zeros, self.run, round, self.worker_id))
        self.abstained = "" if finite else "non-finite gradient"
        if not finite:
            return None
        if self.momentum:
            self.average = average.copy_(gradient)
        return planes if self.top is None else pack_signs(_largest(gradient, self.top), None)[0]

    def ballot(self, round: int, planes: Planes | None) -> bytes:
        """The message with these signs; None: an abstention with its reason."""
        who = {"worker": self.worker_id, "round": round, "run": self.run, "batch_size": self.batch_size}
        if planes is None:
            none = np.zeros(bytes_for(self.layout.size), np.uint8)
            reason = {"kind": Kind.SPARSE, "signs": none, "support": none, "reason": NON_FINITE}
            return Ballot(layout=self.layout, **who, **reason).to_bytes()  # type: ignore[arg-type]
        ballot = Ballot.cast(self.layout, planes.map(Tensor.cpu), **who)
        return (ballot if self.top is None else ballot.thinned()).to_bytes()


def _largest(signal: Tensor, share: float) -> Tensor:
    """The signal where its magnitude is among the largest `share`, at least one; 0 elsewhere."""
    k = max(1, round(share * signal.numel()))
    kept = signal.abs().topk(k).indices
    return torch.zeros_like(signal).index_copy_(0, kept, signal[kept])
