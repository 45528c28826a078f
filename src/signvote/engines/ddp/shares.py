"""How the coordinates are shared out: the vector is cut into chunks, and each chunk among the ranks.

    chunk 0                  chunk 1                  chunk 2
    rank 0 | rank 1 | ...    rank 0 | rank 1 | ...    rank 0 | (rank 1: nothing) ...

A chunk travels as soon as its gradients are there; that every rank has a piece of each keeps all links
equally busy. All pieces are `words` long on the wire; the last coordinates may end inside or before one.
"""

from __future__ import annotations

from dataclasses import dataclass

from signvote.errors import ConfigError
from signvote.kernels import WORD, words_for


@dataclass(frozen=True)
class Shares:
    """Which coordinates are decided where.

    >>> shares = Shares.of(size=300, world=2, chunk=128)
    >>> [shares.piece(chunk, rank) for chunk in range(shares.chunks) for rank in range(2)]
    [(0, 64), (64, 64), (128, 64), (192, 64), (256, 44), (320, 0)]
    """

    size: int  # coordinates
    world: int  # ranks
    words: int  # of a piece

    @classmethod
    def of(cls, size: int, world: int, chunk: int) -> Shares:
        """Equal chunks of about so many coordinates at most, so that little is padded."""
        if chunk < WORD:
            raise ConfigError(f"chunk is {chunk}; it must be {WORD} coordinates or more")
        chunks = -(-size // chunk)
        return cls(size, world, -(-words_for(size) // (chunks * world)))

    @property
    def length(self) -> int:
        """Coordinates of a chunk."""
        return self.world * self.words * WORD

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.size // self.length)

    def chunk(self, number: int) -> slice:
        """The coordinates of a chunk."""
        return slice(number * self.length, min((number + 1) * self.length, self.size))

    def piece(self, number: int, rank: int) -> tuple[int, int]:
        """(first, n): the coordinates of a chunk that one rank decides."""
        first = number * self.length + rank * self.words * WORD
        return first, max(0, min(self.words * WORD, self.size - first))

    def owned(self, rank: int) -> list[tuple[int, int]]:
        """Ranges of coordinates that one rank decides, one for each chunk; one may be empty."""
        pieces = (self.piece(number, rank) for number in range(self.chunks))
        return [(first, first + n) for first, n in pieces]

    def touched(self, start: int, stop: int) -> range:
        """The chunks that coordinates start to stop lie in."""
        return range(start // self.length, -(-stop // self.length))
