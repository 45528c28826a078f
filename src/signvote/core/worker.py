"""A worker's side of a round: gradients to a ballot, a decision to a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from signvote.core.ballot import Ballot, Kind, parse
from signvote.core.bits import SERVER, Zeros, bytes_for, check_zeros, coin_for, pack_signs
from signvote.core.layout import Layout, trainable
from signvote.core.server import check_number, check_state
from signvote.core.trust import State
from signvote.errors import BallotError, ConfigError
from signvote.kernels import Planes, backend

VERSION = 1
NON_FINITE = 1  # key of ballot.REASONS


class Worker:
    """Votes with the signs of a model's gradients and applies what was decided.

    Args:
        model: a module, or named tensors with `.grad`; what does not require a gradient is left alone.
        worker_id: this worker's number, below 2^64 - 1; trust is kept under it.
        momentum: beta of an exponential average of the gradients whose signs are sent; 0 is the paper.
        zeros: what a zero gradient sends; the server's setting.
        run: the run's number; the server's.
        batch_size: declared to the server, for the rule `known-batch`; 0: not declared.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[1.0, -1.0]])
    >>> worker = Worker(model, worker_id=3)
    >>> len(worker.ballot(round=1))            # 64 of header, 1 of signs
    65

    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
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
        self.parameters = trainable(model)
        self.layout = Layout.of(self.parameters)
        self.worker_id, self.zeros, self.run = worker_id, zeros, run
        self.momentum, self.batch_size, self.top = momentum, batch_size, top
        self.abstained = ""  # why the last ballot voted on nothing, if it did
        self.applied_round: int | None = None  # set it by hand after copying somebody's parameters
        self._average: Tensor | None = None
        self._spare: Tensor | None = None

    def ballot(self, round: int) -> bytes:
        """This round's message, from the gradients that `backward()` left; they are not changed.

        With a gradient that is not finite the worker abstains for the round; momentum keeps its past.
        """
        check_number("round", round)
        signal = self._signal()
        who = {"worker": self.worker_id, "round": round, "run": self.run, "batch_size": self.batch_size}
        planes, finite = pack_signs(signal, coin_for(self.zeros, self.run, round, self.worker_id))
        self.abstained = "" if finite else "non-finite gradient"
        if not finite:
            nothing = np.zeros(bytes_for(self.layout.size), np.uint8)
            return Ballot(
                layout=self.layout, kind=Kind.SPARSE, signs=nothing, support=nothing,
                reason=NON_FINITE, **who,
            ).to_bytes()  # fmt: skip
        if self.momentum:
            self._average, self._spare = signal, self._average
        if self.top is None:
            return Ballot.cast(self.layout, planes.map(Tensor.cpu), **who).to_bytes()
        planes, _ = pack_signs(self._largest(signal, self.top), None)
        return Ballot.cast(self.layout, planes.map(Tensor.cpu), **who).thinned().to_bytes()

    def _signal(self) -> Tensor:
        """What is signed: the flat gradient g, or m <- beta m + (1 - beta) g. In a buffer used again."""
        flat = self._buffer()
        self.layout.flatten({name: p.grad for name, p in self.parameters.items()}, flat)
        if not self.momentum:
            return flat
        average = torch.zeros_like(flat) if self._average is None else self._average
        return torch.lerp(average, flat, 1 - self.momentum, out=flat)

    def _buffer(self) -> Tensor:
        """Room for a flat gradient in the widest type of the parameters, where they are."""
        parameters = list(self.parameters.values())
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters))
        device = parameters[0].device
        if self._spare is None or (self._spare.dtype, self._spare.device) != (dtype, device):
            self._spare = torch.empty(self.layout.size, dtype=dtype, device=device)
        return self._spare

    def _largest(self, signal: Tensor, share: float) -> Tensor:
        """The signal where its magnitude is among the largest `share`, at least one; 0 elsewhere."""
        k = max(1, round(share * signal.numel()))
        kept = signal.abs().topk(k).indices
        return torch.zeros_like(signal).index_copy_(0, kept, signal[kept])

    @torch.no_grad()
    def apply(self, decision: bytes, step: float) -> None:
        """X <- x - step * decision (paper, eq. 5).

        A damaged decision, one already applied or one that skips a round is refused, and nothing changes.
        """
        signed = parse(decision, layout=self.layout, run=self.run, worker=SERVER)
        if self.applied_round is not None and signed.round != self.applied_round + 1:
            raise BallotError(
                "late" if signed.round <= self.applied_round else "future",
                f"decision of round {signed.round} after round {self.applied_round} was applied; copy"
                " the parameters of a worker that is up to date and set applied_round",
            )
        planes = signed.planes()
        for segment, parameter in zip(self.layout.segments, self.parameters.values(), strict=True):
            _step_(parameter, planes, segment.start, step)
        self.applied_round = signed.round

    def state_dict(self) -> State:
        """What this worker needs to go on besides the model: its momentum and the last round applied."""
        return {
            "kind": "worker",
            "version": VERSION,
            "layout": self.layout.digest.hex(),
            "worker": self.worker_id,
            "run": self.run,
            "applied_round": self.applied_round,
            "average": None if self._average is None else self._average.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of the same worker, run and layout."""
        mine = {"worker": self.worker_id, "run": self.run, "layout": self.layout.digest.hex()}
        check_state(state, kind="worker", version=VERSION, **mine)
        self.applied_round = state["applied_round"]
        self._average = None if state["average"] is None else state["average"].clone()


def _step_(parameter: Tensor, decision: Planes, begin: int, step: float) -> None:
    """X <- x - step * decision on a tensor of any stride, in row-major order."""
    flat = parameter.detach().contiguous().view(-1)
    backend(flat.device).step_(flat, decision.map(lambda p: p.to(flat.device)), begin, step)
    if not parameter.is_contiguous():
        parameter.copy_(flat.view(parameter.shape))
