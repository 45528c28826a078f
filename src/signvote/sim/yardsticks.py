"""Yardsticks: aggregates of whole gradients, 32 bits per coordinate, to compare one-bit rules with.

    oracle    the sign of the mean gradient of all samples, without attackers
    sgd       that mean itself; one attacker can turn it
    median    the median of the workers' gradients in each coordinate; it takes half of the workers to turn it
    adamw     AdamW of the mean gradient; the server keeps its two averages. Option beta2: 0.95 for language models
    diloco    after local steps: the mean of the workers' changes
    sparseloco    after local steps: the mean of the largest changes of each worker, which all workers get from all

An attacker of sgd, median or adamw sends its own magnitudes with the signs of its attack, so every yardstick and rule
faces the same attack. A real attacker could do more: it could scale its floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.vote import Votes
from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.sim.config import Config
from signvote.sim.sparseloco import message_bytes

FLOAT32_BYTES = 4
BETA2 = 0.999  # of Adam, if there is no option; its first beta is the setting `momentum`
EPSILON = 1e-8  # of Adam


def traffic(rule: str, n: int, workers: int) -> tuple[int, int]:
    """Bytes up and down of a round, of all workers together.

    A yardstick sends one gradient of n coordinates up and one down per worker. Sparse changes are gathered: every
    worker gets those of all others.

    >>> traffic("sgd", 1000, workers=3)
    (12000, 12000)
    """
    if rule == "sparseloco":
        sent = workers * message_bytes(n)
        return sent, sent * (workers - 1)
    sent = workers * FLOAT32_BYTES * n
    return sent, sent


def messages(signals: Tensor, votes: Votes) -> tuple[Tensor, tuple[int, ...]]:
    """The gradients that workers send, (workers, N), and their batch sizes. Absent workers have no row.

    Args:
        signals: the gradient that each worker would send if it were honest, one row per voter.
        votes: the signs that workers do send.

    """
    magnitudes = signals.abs()
    sent = magnitudes * unpack_signs(votes.planes, votes.n)
    if votes.present is None:
        return sent, votes.batch_sizes
    rows = votes.present.nonzero()[:, 0].tolist()
    sizes = tuple(votes.batch_sizes[row] for row in rows)
    return sent[rows], sizes


def mean(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """The mean over all samples: each worker counts by its declared batch size."""
    sizes = torch.tensor(
        batch_sizes,
        dtype=sent.dtype,
        device=sent.device,
    )
    shares = sizes / sizes.sum()
    weighted = sent * shares[:, None]
    return weighted.sum(0)


def median(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """The median of the workers in each coordinate; the mean of the middle two if their number is even."""
    ordered = sent.sort(0).values
    last = len(sent) - 1
    lower = ordered[last // 2]
    upper = ordered[(last + 1) // 2]
    return (lower + upper) / 2


AGGREGATES = {"sgd": mean, "median": median, "adamw": mean, "diloco": mean, "sparseloco": mean}


def adam_of(config: Config, like: Tensor) -> Adam | None:
    """The Adam of a run; None if its rule is another."""
    if config.rule != "adamw":
        return None
    for name in config.options:
        check_name("option of adamw", name, ("beta2",))
    return Adam(like, config.momentum, config.options.get("beta2", BETA2))


class Adam:
    """What AdamW makes of a gradient. Its weight decay is that of every rule, so the run does it.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        x <- (1 - step * decay) x - step * m' / (sqrt(v') + epsilon)       m' and v' are m and v without bias

    Args:
        like: the parameters, as one vector.
        beta1: its momentum.
        beta2: the same of the squares.

    """

    def __init__(self, like: Tensor, beta1: float, beta2: float = BETA2) -> None:
        if not 0 <= beta2 < 1:
            raise ConfigError(f"beta2 is {beta2}; it must lie in [0, 1)")
        self.beta1 = beta1
        self.beta2 = beta2
        self.m = torch.zeros_like(like)
        self.v = torch.zeros_like(like)
        self.steps = 0

    def scaled(self, gradient: Tensor) -> Tensor:
        """What the run steps by after this gradient: m' / (sqrt(v') + epsilon)."""
        self.steps += 1
        self.m.lerp_(gradient, 1 - self.beta1)
        self.v.lerp_(gradient.square(), 1 - self.beta2)
        m = self.m / (1 - self.beta1**self.steps)
        v = self.v / (1 - self.beta2**self.steps)
        return m / (v.sqrt() + EPSILON)

    def state_dict(self) -> dict[str, Any]:
        """The averages and their number of steps."""
        return {"m": self.m, "v": self.v, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])
        self.steps = int(state["steps"])
