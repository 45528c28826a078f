"""The exchange of votes on few coordinates: they travel as ballots, in nearly as few bits as their entropy.

send       to each rank a ballot with the votes on the coordinates that it decides
share      to each rank a ballot with the decisions on one's own coordinates, and the evidence

A ballot has the shortest form there is (see core/sparse.py), and a header with its round, its sender and a checksum.
Lengths are not known before, so they travel first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.ballot import Ballot, parse
from signvote.core.bits import SERVER
from signvote.core.layout import Layout
from signvote.engines.ddp.exchange import Exchange
from signvote.kernels import WORD, Planes

LENGTH = 8  # bytes of the length of a letter
RUN = 0  # a process group is of one run


class SparseExchange(Exchange):
    """See Exchange. Votes on all chunks are sent at once."""

    @property
    def _layout(self) -> Layout:
        """The coordinates that a rank decides, padded to the same number on every rank."""
        return Layout([("decided here", (self.shares.chunks * self.shares.words * WORD,))])

    def _travel(self, numbers: range) -> None:
        """See Exchange."""
        mine = [self._written(self._sent[:, rank], self.group.rank) for rank in range(self.group.world)]
        for rank, letter in enumerate(self._swapped(mine)):
            self._received[:, rank] = self._read(letter, rank, self._received[:, rank])

    def share(self, message: Tensor) -> tuple[Planes, Tensor]:
        """See Exchange. A decision without gaps, because coins decide them, travels as it is."""
        if self._decided.shape[1] == 1:
            return super().share(message)
        mine = self._written(self._decided, SERVER) + message.numpy().tobytes()
        letters = self._swapped([mine] * self.group.world)
        end = -message.nbytes
        pieces = [self._read(letter[:end], SERVER, self._decided).reshape(-1) for letter in letters]
        messages = [torch.frombuffer(bytearray(letter[end:]), dtype=torch.int64) for letter in letters]
        return self._joined(torch.stack(pieces)), torch.stack(messages)

    def _swapped(self, letters: list[bytes]) -> list[bytes]:
        """Send letter r to rank r; the letters of all ranks to this one."""
        mine = len(letters[self.group.rank])
        self._bytes += sum(map(len, letters)) - mine + LENGTH * (self.group.world - 1)
        with self._timed():
            return self.group.swap(letters)

    def _written(self, planes: Tensor, sender: int) -> bytes:
        """The ballot of votes (chunks, planes, words) on what a rank decides."""
        signs, support = planes.transpose(0, 1).reshape(2, -1).cpu()
        ballot = Ballot.cast(
            self._layout,
            Planes(signs, support),
            worker=sender,
            round=self.round,
            run=RUN,
        )
        return ballot.thinned().to_bytes()

    def _read(self, letter: bytes, sender: int, like: Tensor) -> Tensor:
        """The votes in a ballot, in the shape and on the device of others."""
        ballot = parse(
            letter,
            layout=self._layout,
            run=RUN,
            round=self.round,
            worker=sender,
        )
        signs, support = ballot.planes()
        if support is None:
            support = torch.full_like(signs, -1)
        chunks, planes, words = like.shape
        votes = torch.stack([signs, support]).view(planes, chunks, words)
        return votes.transpose(0, 1).to(like.device)
