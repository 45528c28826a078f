"""What a worker keeps of the last rounds, so that another one can catch up: decisions, and how they were applied.

Rounds are a chain: the link of a round is a hash of the link before and of everything that the round did to the
parameters. Workers with the same link have the same parameters, so one that has an earlier link needs the decisions
since then and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from signvote.engines.ddp.stepping import Setting
from signvote.kernels import Planes

KEPT = 32  # rounds
State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Decided:
    """One round, as it was applied."""

    round: int
    decision: Planes
    used: list[bool]  # which parameters moved
    settings: list[Setting]  # of their groups
    is_decided: bool

    def after(self, link: bytes) -> bytes:
        """The link of this round, after that of the round before."""
        content = hashlib.blake2b(link, digest_size=16)
        content.update(repr((self.round, self.used, self.settings, self.is_decided)).encode())
        for plane in self.decision:
            if plane is not None:
                content.update(plane.contiguous().numpy().data)
        return content.digest()

    def to_state(self) -> State:
        """As `of` reads it."""
        return {
            "round": self.round,
            "signs": self.decision.signs,
            "support": self.decision.support,
            "used": torch.tensor(self.used),
            "settings": [list(setting) for setting in self.settings],
            "is_decided": self.is_decided,
        }

    @classmethod
    def of(cls, state: State) -> Decided:
        """From the state of another worker."""
        return cls(
            round=state["round"],
            decision=Planes(state["signs"], state["support"]),
            used=state["used"].tolist(),
            settings=[Setting(*each) for each in state["settings"]],
            is_decided=state["is_decided"],
        )


class Past:
    """The chain of rounds, and the last of them.

    Args:
        link: of the state that training starts from.

    """

    def __init__(self, link: bytes) -> None:
        self.link = link
        self._rounds: deque[tuple[bytes, Decided]] = deque(maxlen=KEPT)  # with the link before

    def add(self, decided: Decided) -> None:
        """Add a round."""
        self._rounds.append((self.link, decided))
        self.link = decided.after(self.link)

    def since(self, link: bytes) -> list[Decided] | None:
        """The rounds after a link; None: it is not known, or too old."""
        if link == self.link:
            return []
        links = [before for before, _ in self._rounds]
        if link not in links:
            return None
        return [decided for _, decided in list(self._rounds)[links.index(link) :]]

    def jump(self, link: bytes) -> None:
        """Continue at the link of another worker whose parameters were copied."""
        self._rounds.clear()
        self.link = link
