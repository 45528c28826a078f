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
        size = self.shares.chunks * self.shares.words * WORD
        return Layout([("decided here", (size,))])

    def _travel(self, numbers: range) -> None:
        """See Exchange."""
        mine = []
        for rank in range(self.group.world):
            votes = self._sent[:, rank]
            mine.append(self._written(votes, self.group.rank))
        for rank, letter in enumerate(self._swapped(mine)):
            place = self._received[:, rank]
            place.copy_(self._read(letter, rank, place))

    def share(self, message: Tensor) -> tuple[Planes, Tensor]:
        """See Exchange. A decision without gaps, because coins decide them, travels as it is."""
        if self._decided.shape[1] == 1:
            return super().share(message)
        decision = self._written(self._decided, SERVER)
        mine = decision + message.numpy().tobytes()
        end = -message.nbytes
        pieces = []
        messages = []
        for letter in self._swapped([mine] * self.group.world):
            piece = self._read(letter[:end], SERVER, self._decided)
            pieces.append(piece.reshape(-1))
            numbers = bytearray(letter[end:])
            messages.append(torch.frombuffer(numbers, dtype=torch.int64))
        return self._joined(torch.stack(pieces)), torch.stack(messages)

    def _swapped(self, letters: list[bytes]) -> list[bytes]:
        """Send letter r to rank r; the letters of all ranks to this one."""
        others = self.group.world - 1
        kept = len(letters[self.group.rank])
        sent = sum(map(len, letters)) - kept
        self._bytes += sent + LENGTH * others
        with self._timed():
            return self.group.swap(letters)

    def _written(self, planes: Tensor, sender: int) -> bytes:
        """The ballot of votes (chunks, planes, words) on what a rank decides."""
        rows = planes.transpose(0, 1).reshape(2, -1)
        signs, support = rows.cpu()
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
