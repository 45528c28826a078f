"""Other ways to send a gradient as one bit a coordinate, as yardsticks: `python -m studies.ways STUDY.toml [flags]`.

    stochastic    b = sign(m + S u)           u: uniform in [-1, 1], new in every round; S: common to all workers
    late          the same of the gradient g; the server averages: G <- momentum G + (1 - momentum) mean b
    feedback      b = sign(m + e)             e <- m + e - s b; s: the mean of |m + e| over a tensor or a row

m is the worker's momentum. The server decides the sign of the mean of b, or of s b. All workers count the same, so
batches must be equal. The scales are floats, and no bytes are written: what is counted is what they would be.

The command is `signvote study` with these ways in it. A way is named like a rule, with its options:

    rules = ["stochastic"]
    options = { k = 4 }      # S is k times the mean over workers of mean |m|, for each tensor
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import signvote.sim.config
import signvote.sim.loop
import signvote.sim.setup
from signvote.core.bits import bytes_for
from signvote.core.header import HEADER
from signvote.core.layout import Layout
from signvote.core.scales import mean_magnitudes, spread
from signvote.names import check_name
from signvote.sim.history import note_bytes
from signvote.sim.population import generator
from signvote.sim.run import Run
from signvote.sim.yardsticks import AGGREGATES, mean

NOISE = 8  # purpose of the random numbers: see `Assignment.seed`
FLOAT_BYTES = 4


class Way:
    """What the workers of a run send, and what the server makes of it.

    Args:
        layout: of the model.
        momentum: of the run.

    """

    options: ClassVar[Sequence[str]] = ()

    def __init__(self, layout: Layout, momentum: float) -> None:
        self.layout = layout
        self.momentum = momentum

    def sent(self, signals: Tensor, noise: torch.Generator) -> Tensor:
        """What the votes stand for, (workers, N), from signals of the same shape."""
        raise NotImplementedError

    def received(self, mean: Tensor) -> Tensor:
        """The numbers whose signs are decided, from the mean of what was sent."""
        return mean

    @property
    def floats(self) -> int:
        """Scales that a ballot carries; a decision of `stochastic` carries as many."""
        return len(self.layout.segments)


class Stochastic(Way):
    """b = sign(m + S u): the mean of b is m / S, as long as m lies within S."""

    options: ClassVar[Sequence[str]] = ("k",)

    def __init__(self, layout: Layout, momentum: float, k: float = 4.0) -> None:
        super().__init__(layout, momentum)
        self.k = k

    def sent(self, signals: Tensor, noise: torch.Generator) -> Tensor:
        """See Way."""
        claims = mean_magnitudes(signals, self.layout)
        scale = self.k * spread(claims.mean(0).float(), self.layout, 0, self.layout.size)
        u = 2 * torch.rand(signals.shape, generator=noise) - 1
        return (signals + scale * u).sign()


class Late(Stochastic):
    """The same of gradients; the server averages over rounds. The run's workers have no momentum."""

    options: ClassVar[Sequence[str]] = ("k", "memory")

    def __init__(self, layout: Layout, momentum: float, k: float = 4.0, memory: float = 0.9) -> None:
        super().__init__(layout, momentum, k)
        self.memory = memory
        self.average = torch.zeros(layout.size)

    def received(self, mean: Tensor) -> Tensor:
        """See Way."""
        self.average = torch.lerp(mean, self.average, self.memory)
        return self.average


class Feedback(Way):
    """s b, where b = sign(m + e); e is what all votes so far left out."""

    options: ClassVar[Sequence[str]] = ("per",)

    def __init__(self, layout: Layout, momentum: float, per: str = "tensor") -> None:
        super().__init__(layout, momentum)
        check_name("per", per, ("tensor", "row"))
        self.scaled = layout if per == "tensor" else rows_of(layout)
        self.residual: Tensor | None = None

    def sent(self, signals: Tensor, noise: torch.Generator) -> Tensor:
        """See Way. Every worker is present in every round."""
        v = signals if self.residual is None else signals + self.residual
        scale = mean_magnitudes(v, self.scaled).float()
        sent = spread(scale, self.scaled, 0, self.scaled.size) * v.sign()
        self.residual = v - sent
        return sent

    @property
    def floats(self) -> int:
        """See Way."""
        return len(self.scaled.segments)


WAYS: dict[str, type[Way]] = {"stochastic": Stochastic, "late": Late, "feedback": Feedback}


def rows_of(layout: Layout) -> Layout:
    """The same vector with every row of a matrix as a tensor.

    >>> [segment.stop for segment in rows_of(Layout([("w", (2, 3)), ("b", (2,))])).segments]
    [3, 6, 8]
    """
    rows: list[tuple[str, tuple[int, ...]]] = []
    for segment in layout.segments:
        if len(segment.shape) < 2:
            rows.append((segment.name, segment.shape))
            continue
        rows += [(f"{segment.name}.{i}", tuple(segment.shape[1:])) for i in range(segment.shape[0])]
    return Layout(rows)


class Compared(Run):
    """A run whose rule may be one of WAYS."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        config = self.config
        self.way: Way | None = None
        if config.rule in WAYS:
            way = WAYS[config.rule]
            for name in config.options:
                check_name(f"option of {config.rule}", name, way.options)
            self.way = way(self.layout, config.momentum, **config.options)

    def _average(self, t: int, voters: list[int]) -> None:
        """Step by the sign of the mean of what was sent."""
        if self.way is None:
            super()._average(t, voters)
            return
        self.workers.votes(t, voters)
        noise = generator(self.config.seed, NOISE, t)
        sent = self.way.sent(self.workers.signals(), noise)
        decision = self.way.received(sent.mean(0)).sign()
        self._note_bits(len(voters), self.way)
        step = self.config.step_at(t)
        self.descent.decay_(step, self.config.decay)
        self.descent.move_(decision, step)

    def _note_bits(self, workers: int, way: Way) -> None:
        each = HEADER.size + bytes_for(self.layout.size)
        up = each + FLOAT_BYTES * way.floats
        note_bytes(self.history, workers * up, workers * (up if isinstance(way, Stochastic) else each))


if __name__ in ("__main__", "__mp_main__"):  # in the processes that it starts, too
    for module in (signvote.sim.config, signvote.sim.setup):
        module.YARDSTICKS += tuple(WAYS)  # type: ignore[attr-defined]
    AGGREGATES |= dict.fromkeys(WAYS, mean)
    vars(signvote.sim.loop)["Run"] = Compared

if __name__ == "__main__":
    from signvote.cli import main

    sys.argv[1:1] = ["study"]
    main()
