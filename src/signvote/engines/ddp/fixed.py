"""What a round comes to, and what the votes of ranks that never change do between two rounds: nothing.

`elastic.py` has the votes of workers that come and go, which do something there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from signvote.engines.ddp.stepping import Setting
from signvote.errors import ConfigError
from signvote.kernels import Planes

if TYPE_CHECKING:
    from signvote.engines.ddp.catching_up import Model


class Outcome(NamedTuple):
    """A round that is over."""

    decision: Planes  # of the coordinates that this rank holds
    used: list[bool]  # which parameters have a gradient on some rank
    seconds: list[float]  # that each worker worked; 0: unknown
    is_decided: bool | Tensor  # False: too few voted, so nothing moves; a tensor: the device knows


class Fixed:
    """Ranks that start together and stay."""

    comes_and_goes = False

    def moves(self, model: Model) -> None:
        """Name the parameters that the votes move."""

    def stepped(self, outcome: Outcome, settings: Sequence[Setting]) -> None:
        """Go on: the decision of a round was applied."""

    def leave(self) -> None:
        """End the training."""
        raise ConfigError("leave() is for Vote(members=...); ranks of torch.distributed end by themselves")
