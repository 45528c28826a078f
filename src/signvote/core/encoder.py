"""One worker between rounds: its memory, its signs and its ballots."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from signvote.core.ballot import Ballot, Claims
from signvote.core.bits import check_number, coin_for, unpack_signs
from signvote.core.corrections import LEAK, claims, corrected, own, scales
from signvote.core.encoding import Encoding, Memory, check_batch_size, encode
from signvote.core.header import NON_FINITE, REASONS
from signvote.core.layout import Layout
from signvote.core.scales import coded, mean_magnitudes, restored, spread, unsent, values
from signvote.core.vote import empty_decision
from signvote.errors import ConfigError
from signvote.kernels import WORD, Planes


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
        found = encode(
            gradient,
            self.memory,
            self.encoding,
            coin,
            top=top,
            layout=self.layout,
            out=gradient,
        )
        if not found.finite:
            self.abstained = REASONS[NON_FINITE]
            return None
        self.abstained = ""
        self._keep(found.memory)
        gradient.copy_(found.signal)  # the same tensor, unless the signal is not the average
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
                self.layout,
                worker=self.worker_id,
                round=round,
                run=self.run,
                batch_size=self.batch_size,
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
