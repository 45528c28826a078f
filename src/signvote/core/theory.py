"""What a vote's error probability should be: exact, and the bounds.

Model: the true sign is +1; worker m sends it flipped with probability p[m], independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from signvote.core.vote import fixed_point, llr_weights
from signvote.errors import ConfigError

Floats = Sequence[float]


def llr_integers(crossover: Floats) -> list[int]:
    """The integer weights of workers whose crossover probabilities are known (paper, eq. 3).

    >>> llr_integers([0.25, 0.5])
    [1125, 0]
    """
    weights: list[int] = fixed_point(llr_weights(torch.tensor(crossover, dtype=torch.float64))).tolist()
    return weights


def tally_distribution(
    crossover: Floats, weights: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """P(sum_m w[m] Y[m] = s) for s = -W .. W with W = sum |w|: one convolution per worker."""
    if len(crossover) != len(weights):
        raise ConfigError(f"{len(crossover)} crossover probabilities, but {len(weights)} weights")
    total = sum(abs(w) for w in weights)
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for p, w in zip(crossover, weights, strict=True):
        chances = (1 - p) * np.roll(chances, w) + p * np.roll(chances, -w)
    return chances


def error_probability(crossover: Floats, weights: Sequence[int]) -> float:
    """Exact probability that a weighted vote decides the wrong sign, ties by a fair coin.

        P(sum_m w[m] Y[m] < 0) + 1/2 P(sum_m w[m] Y[m] = 0)

    >>> error_probability([0.1, 0.1, 0.1], [1, 1, 1])      # 3 * 0.1^2 * 0.9 + 0.1^3
    0.028...
    """
    chances = tally_distribution(crossover, weights)
    middle = len(chances) // 2
    return float(chances[:middle].sum() + chances[middle] / 2)


def observed_crossover(crossover: Floats, weights: Sequence[int], worker: int) -> float:
    """How often a worker differs from a decision that contains its own vote: optimistic.

        P(Y[m] = +1, decision = -1) + P(Y[m] = -1, decision = +1)

    What counting against the decision converges to, instead of p. For a coin-flipper among M - 1
    others of the same kind, M odd and weights equal, it is 1/2 - C(M-1, (M-1)/2) / 2^M.

    >>> observed_crossover([0.5] * 15, [1] * 15, worker=0)
    0.395...
    """
    others = [i for i in range(len(weights)) if i != worker]
    chances = tally_distribution([crossover[i] for i in others], [weights[i] for i in others])
    sums = np.arange(len(chances)) - len(chances) // 2
    p, w = crossover[worker], weights[worker]

    def decided_against(tally: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
        return float(chances[tally < 0].sum() + chances[tally == 0].sum() / 2)

    return (1 - p) * decided_against(sums + w) + p * decided_against(-(sums - w))


def majority_bound(crossover: Floats) -> float:
    """Chernoff bound of a plain majority vote's error; 1 where the mean p is not below 1/2.

    (4 q (1 - q))^(M / 2)      q = mean of p
    """
    q = sum(crossover) / len(crossover)
    return (4 * q * (1 - q)) ** (len(crossover) / 2) if q < 0.5 else 1.0


def weighted_bound(crossover: Floats) -> float:
    """Chernoff bound of the log-likelihood-ratio vote's error, p known: prod_m 2 sqrt(p (1 - p)).

    Every worker with p other than 1/2 lowers it; in a plain majority a bad worker raises it.
    """
    return math.prod(2 * math.sqrt(p * (1 - p)) for p in crossover)


def batch_crossover(signal_to_noise: float, batch_size: float) -> float:
    """The p of a worker that averages B samples: Phi(-sqrt(B) mu / sigma) for Gaussian gradient noise.

    Args:
        signal_to_noise: |mu| / sigma of one sample's gradient at this coordinate.
        batch_size: B.

    """
    return math.erfc(math.sqrt(batch_size / 2) * signal_to_noise) / 2


def low_signal_weight(signal_to_noise: float, batch_size: float) -> float:
    """What log((1 - p) / p) tends to when the signal is weak: sqrt(8 B / pi) mu / sigma.

    So the best weights are proportional to sqrt(B), the same for every coordinate: its own signal to
    noise ratio is a common factor and cancels in the vote.
    """
    return math.sqrt(8 * batch_size / math.pi) * signal_to_noise


def settled_weights(crossover: Floats, rounds: int = 50) -> list[int]:
    """The weights at which a vote that judges workers by its own decisions comes to rest.

    Starts from a plain majority; each step weighs workers by eq. (3) of what would be observed.
    """
    weights = [1] * len(crossover)
    for _ in range(rounds):
        observed = [observed_crossover(crossover, weights, m) for m in range(len(crossover))]
        settled = llr_integers(observed)
        if settled == weights:
            break
        weights = settled
    return weights
