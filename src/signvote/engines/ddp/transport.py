"""How votes travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from signvote.errors import ConfigError

CHUNK = 2**21  # coordinates that travel together
CHECK_EVERY = 100  # rounds


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Settings that change no decision."""

    overlap: bool = True  # chunks travel in a thread while the rest of the gradients is computed
    chunk: int = CHUNK  # coordinates that travel together
    check_every: int = CHECK_EVERY  # rounds between two comparisons of the ranks' parameters; 0: never

    def __post_init__(self) -> None:
        if self.check_every < 0:
            raise ConfigError(f"check_every is {self.check_every}; it must be 0 or more rounds")
