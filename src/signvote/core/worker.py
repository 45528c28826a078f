"""A worker's side of a round: gradients become a ballot, a decision becomes a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from signvote.core.ballot import Ballot, Message, limits_of, parse, scales_of
from signvote.core.bits import SERVER, Zeros
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding, Memory, check_batch_size
from signvote.core.groups import USUAL, Factors, checked
from signvote.core.header import REASONS, Kind
from signvote.core.layout import Layout, trainable
from signvote.core.outer import Outer
from signvote.core.trust import State
from signvote.core.update import HALVES, apply_decision
from signvote.errors import BallotError, ConfigError, LayoutError, StateError
from signvote.formats import check_state, upgraded
from signvote.kernels import Planes

VERSION = 1
RANGE = 2**22  # coordinates that are packed at a time


class Sent(NamedTuple):
    """The last ballot, kept for a retry."""

    round: int
    message: bytes


class Worker:
    """Votes with the signs of a model's gradients, and applies the decisions.

    The parameters that are trained are those that required a gradient when the worker was made: they are the layout,
    which all workers and the server share. Freezing one of them later is refused.

    Args:
        model: a module, or named tensors with `.grad`; parameters that require no gradient are left alone.
        worker_id: this worker's number, below 2^64 - 1; the key of its trust.
        momentum: beta of an exponential average of the gradients whose signs are sent; 0 is the paper.
        interpolation: the signs are those of alpha m + (1 - alpha) g instead, m being the average so far; Lion's 0.9,
            with a momentum of 0.99.
        clip: gradients are scaled down to this norm before momentum averages them; None: never.
        polar: of each matrix, the signs of the average's polar factor are sent: for language models.
        zeros: what a zero gradient sends; the server's setting.
        run: the run's number; the server's setting.
        batch_size: declared to the server, which weighs votes by it; 0: not declared. Set `worker.batch_size` before
            `ballot` if it changes.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all.
        feedback: add the residual, the part that this round's signs left out, to the next signal.
        corrects: votes are corrections: with the rule "mean".
        scales: ballots carry a scale for each tensor: with `ScaledVotes`. The `.grad` are then the change of the
            parameters over local steps, before less after, and `apply` takes the outer step. Start these steps from
            `signvote.core.scales.own_start(parameters, worker.encoder.memory.residual)`.
        outer_momentum: of the outer step.
        decay: weight decay; every worker has the parameters, so it needs no vote.
        factors: what the step and the decay of a parameter are multiplied by, by name; see `signvote.factors`.
        encoding: all settings of the encoder as one object, instead of these.

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
        interpolation: float | None = None,
        clip: float | None = None,
        polar: bool = False,
        zeros: Zeros = "coin",
        run: int = 0,
        batch_size: int = 0,
        top: float | None = None,
        feedback: bool = False,
        corrects: bool = False,
        scales: bool = False,
        outer_momentum: float = 0.6,
        decay: float = 0.0,
        factors: Mapping[str, Factors] | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        if not 0 <= decay < math.inf:
            raise ConfigError(f"decay is {decay}; it must be 0 or more")
        if scales and decay:
            raise ConfigError(f"decay is {decay}; with scales the optimizer of the local steps decays: use 0")
        self.parameters = trainable(model)
        self.layout = Layout.of(self.parameters)
        if encoding is None:
            encoding = Encoding(
                momentum=momentum,
                interpolation=interpolation,
                clip=clip,
                polar=polar,
                zeros=zeros,
                top=top,
                feedback=feedback,
                corrects=corrects,
                scales=scales,
            )
        self.encoder = Encoder(self.layout, worker_id, encoding, run=run, batch_size=batch_size)
        self.decay = decay
        self.outer = Outer(momentum=outer_momentum)
        self.factors = checked(factors, self.parameters)
        self._applied: int | None = None
        self._learning = [name for name, p in self.parameters.items() if p.requires_grad]
        self._sent: Sent | None = None
        self._flat: Tensor | None = None
        self._has_warned = False

    @property
    def worker_id(self) -> int:
        """This worker's number."""
        return self.encoder.worker_id

    @property
    def batch_size(self) -> int:
        """The batch size that the next ballot declares; 0: not declared."""
        return self.encoder.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        check_batch_size(batch_size)
        self.encoder.batch_size = batch_size

    @property
    def applied_round(self) -> int | None:
        """The round of the last decision applied. Set it after copying the parameters of another worker."""
        return self._applied

    @applied_round.setter
    def applied_round(self, round: int | None) -> None:
        missed = (round or 0) - (self._applied or 0)
        if missed > 0:
            self.encoder.miss(missed)
        self._applied = round

    @property
    def abstained(self) -> str:
        """Why the last ballot was an abstention; empty if it was a vote."""
        return self.encoder.abstained

    def ballot(self, round: int) -> bytes:
        """This round's message, from the gradients that `backward()` left; they are not changed.

        With a gradient that is not finite the worker abstains for the round; momentum keeps its past. If the last
        ballot was for the same round, this is a retry: it returns the same bytes, and momentum does not advance.
        """
        if self._sent is not None and self._sent.round == round:
            return self._sent.message
        self._check_frozen()
        planes = self._planes(round)
        message = self.encoder.ballot(round, planes)
        self._sent = Sent(round, message)
        return message

    def _planes(self, round: int) -> Planes | None:
        """The signs of the gradients. On a CPU, without memory, range by range: no copy of them is ever whole."""
        gradients = {name: p.grad for name, p in self.parameters.items()}
        grads = [gradient for gradient in gradients.values() if gradient is not None]
        in_place = all(gradient.is_contiguous() for gradient in grads)
        size = self.layout.size
        if not self.encoder.is_local or self._device.type != "cpu" or not in_place:
            whole = self.layout.flatten(gradients, self._buffer(size))
            return self.encoder.encode(round, whole)
        buffer = self._buffer(min(RANGE, size))
        ranges = (
            (first, self.layout.flatten(gradients, buffer[: size - first], first))
            for first in range(0, size, RANGE)
        )
        return self.encoder.encode_ranges(round, ranges)

    def _check_frozen(self) -> None:
        """Raise if a trained parameter was frozen: its zeros would get coins, and it would walk at random."""
        frozen = [name for name in self._learning if not self.parameters[name].requires_grad]
        if frozen:
            raise LayoutError(
                f"frozen since this worker was made: {', '.join(frozen)}; to train without them, make all workers"
                " and the server anew, otherwise set requires_grad again"
            )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def _buffer(self, size: int) -> Tensor:
        """A buffer for a flat gradient, or a range of it: the parameters' device and widest type. It is reused."""
        dtypes = [p.dtype for p in self.parameters.values()]
        widest = reduce(torch.promote_types, dtypes)
        flat = self._flat
        wanted = (size, widest, self._device)
        if flat is None or (flat.numel(), flat.dtype, flat.device) != wanted:
            flat = torch.empty(size, dtype=widest, device=self._device)
            self._flat = flat
        return flat

    def apply(self, decision: Message, step: float) -> None:
        """Step x <- x - step * decision (paper, eq. 5), and a step of weight decay if there is one.

        A damaged decision, one already applied or one that skips a round is refused, and nothing changes.
        """
        signed = parse(
            decision,
            layout=self.layout,
            run=self.encoder.run,
            worker=SERVER,
        )
        if self.applied_round is not None and signed.round != self.applied_round + 1:
            raise BallotError(
                "late" if signed.round <= self.applied_round else "future",
                f"decision of round {signed.round} after round {self.applied_round} was applied; copy"
                " the parameters of a worker that is up to date and set applied_round",
            )
        self._check_frozen()
        self._warn_of_rounding(step)
        if signed.kind is Kind.SCALED:
            self._move(signed, step)
        else:
            apply_decision(self.parameters, signed, step, self.decay, self.factors)
        self._correct(signed)
        self._applied = signed.round

    @torch.no_grad()
    def _move(self, decision: Ballot, step: float) -> None:
        """Take the outer step of a scaled decision."""
        x = self.layout.flatten(self.parameters, self._buffer(self.layout.size))
        codes = scales_of(decision)
        planes = decision.planes().map(lambda plane: plane.to(x.device))
        self.outer.step = step
        self.outer.step_(x, planes, codes, self.layout)
        for segment in self.layout.segments:
            moved = x[segment.start : segment.stop].view(segment.shape)
            self.parameters[segment.name].copy_(moved)

    def _correct(self, decision: Ballot) -> None:
        """Follow what the server believes of this worker, or take back what it did not count."""
        sent = None
        if self._sent is not None and self._sent.round == decision.round and self.encoder.encoding.has_claims:
            sent = parse(self._sent.message, layout=self.layout, run=self.encoder.run)
        is_counted = self.worker_id in decision.counted
        if self.encoder.encoding.scales and sent is not None and not sent.reason:
            limits = limits_of(decision) if is_counted else None
            self.encoder.hear(sent.planes(), limits)
        if decision.kind is Kind.CORRECT and decision.claims is not None:
            planes = sent.planes() if sent is not None and is_counted else None
            self.encoder.correct(planes, torch.from_numpy(decision.claims.copy()))

    def _warn_of_rounding(self, step: float) -> None:
        """Warn once if a parameter of 16 bits is so large that the step is lost to rounding."""
        for name, p in self.parameters.items():
            if self._has_warned or p.dtype not in HALVES or not p.numel():
                continue
            largest = p.detach().abs().max()
            its = step * self.factors.get(name, USUAL).step
            if its > 0 and bool(largest - its == largest):
                warnings.warn(
                    f"{name} is {p.dtype}, in which a step of {its:g} does not change a value of {largest:g}: keep"
                    " the parameters in float32, and compute in 16 bits with torch.autocast",
                    stacklevel=3,
                )
                self._has_warned = True

    def state_dict(self) -> State:
        """This worker's state, besides the model: its memory, the last round applied and the last ballot.

        Save it after `ballot` and before the ballot is sent, and a retry after a crash sends the same bytes.
        """
        return {
            **self._identity(),
            "applied_round": self.applied_round,
            "average": _copy(self.encoder.memory.average),
            "residual": _copy(self.encoder.memory.residual),
            "belief": _copy(self.encoder.memory.belief),
            "outer": _copy(self.outer.average),
            "ballot": None if self._sent is None else _to_tensor(self._sent.message),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state of the same worker, run and layout, from any device and of any floating-point type."""
        check_state(upgraded(state, "a worker's state", VERSION), **self._identity())
        average = self._memory_in(state, "average")
        residual = self._memory_in(state, "residual")
        belief = self._memory_in(state, "belief")
        outer = self._memory_in(state, "outer")
        sent = self._ballot_in(state)
        self._applied = state["applied_round"]
        self.encoder.memory = Memory(average, residual, belief)
        self.outer.average = outer
        self.encoder.abstained = "" if sent is None else REASONS[sent.reason]
        self._sent = None if sent is None else Sent(sent.round, sent.to_bytes())
        self.encoder.load_claims(None if sent is None else sent.claims)

    def _memory_in(self, state: State, name: str) -> Tensor | None:
        """A copy of one tensor of memory; the encoder brings it to the gradients' device and type."""
        found: Tensor | None = state.get(name)
        if found is None:
            return None
        wanted = (self.layout.size,)
        if tuple(found.shape) != wanted or not found.is_floating_point():
            raise StateError(
                f"a worker's state: {name} is {tuple(found.shape)} of {found.dtype}; wanted {wanted} of floats"
            )
        return found.clone()

    def _ballot_in(self, state: State) -> Ballot | None:
        """The last ballot of a state; earlier versions kept none."""
        found: Tensor | None = state.get("ballot")
        if found is None:
            return None
        message = found.cpu().numpy().tobytes()
        try:
            return parse(
                message,
                layout=self.layout,
                run=self.encoder.run,
                worker=self.worker_id,
            )
        except BallotError as error:
            raise StateError(f"a worker's state: its last ballot is damaged: {error}") from error

    def _identity(self) -> State:
        return {
            "kind": "worker",
            "version": VERSION,
            "worker": self.worker_id,
            "run": self.encoder.run,
            "layout": self.layout.digest.hex(),
        }


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _to_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
