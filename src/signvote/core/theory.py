"""The error probability of a vote: exact, and its bounds.

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
Distribution = np.ndarray[tuple[int], np.dtype[np.float64]]
Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


def llr_integers(crossover: Floats) -> list[int]:
    """The integer weights of workers whose crossover probabilities are known (paper, eq. 3).

    >>> llr_integers([0.25, 0.5])
    [1125, 0]
    """
    p = torch.tensor(crossover, dtype=torch.float64)
    weights = fixed_point(llr_weights(p))
    integers: list[int] = weights.tolist()
    return integers


def tally_distribution(crossover: Floats, weights: Sequence[int]) -> Distribution:
    """P(sum_m w[m] Y[m] = s) for s = -W .. W with W = sum |w|: one convolution per worker."""
    workers = len(crossover)
    if workers != len(weights):
        raise ConfigError(f"{workers} crossover probabilities, but {len(weights)} weights")
    total = sum(abs(w) for w in weights)
    size = 2 * total + 1
    chances: Distribution = np.zeros(size)
    chances[total] = 1.0
    for p, w in zip(crossover, weights, strict=True):
        right = np.roll(chances, w)
        wrong = np.roll(chances, -w)
        chances = (1 - p) * right + p * wrong
    return chances


def error_probability(crossover: Floats, weights: Sequence[int]) -> float:
    """Exact probability that a weighted vote decides the wrong sign, ties by a fair coin.

        P(sum_m w[m] Y[m] < 0) + 1/2 P(sum_m w[m] Y[m] = 0)

    >>> error_probability([0.1, 0.1, 0.1], [1, 1, 1])      # 3 * 0.1^2 * 0.9 + 0.1^3
    0.028...
    """
    chances = tally_distribution(crossover, weights)
    return _chance_below_zero(chances, _tallies(chances))


def observed_crossover(crossover: Floats, weights: Sequence[int], worker: int) -> float:
    """How often a worker differs from a decision that contains its own vote.

        P(Y[m] = +1, decision = -1) + P(Y[m] = -1, decision = +1)

    Counts of mismatches converge to this value instead of p. It is optimistic: for one of M workers that
    all flip fair coins, with M odd and equal weights, it is 1/2 - C(M-1, (M-1)/2) / 2^M.

    >>> observed_crossover([0.5] * 15, [1] * 15, worker=0)
    0.395...
    """
    workers = range(len(weights))
    others = [m for m in workers if m != worker]
    chances = tally_distribution(
        [crossover[m] for m in others],
        [weights[m] for m in others],
    )
    tallies = _tallies(chances)  # of the others
    p = crossover[worker]
    w = weights[worker]
    right_overruled = _chance_below_zero(chances, tallies + w)
    wrong_overruled = _chance_below_zero(chances, w - tallies)
    return (1 - p) * right_overruled + p * wrong_overruled


def _tallies(chances: Distribution) -> Integers:
    """The tallies of a distribution: -W .. W."""
    middle = len(chances) // 2
    return np.arange(-middle, middle + 1)


def _chance_below_zero(chances: Distribution, tallies: Integers) -> float:
    """The probability that a tally is negative; zero counts half."""
    negative = chances[tallies < 0].sum()
    zero = chances[tallies == 0].sum()
    return float(negative + zero / 2)


def majority_bound(crossover: Floats) -> float:
    """Chernoff bound of the error of a plain majority vote; 1 if the mean p is 1/2 or more.

    (4 q (1 - q))^(M / 2)      q = mean of p
    """
    workers = len(crossover)
    q = sum(crossover) / workers
    if q >= 0.5:
        return 1.0
    bound: float = (4 * q * (1 - q)) ** (workers / 2)
    return bound


def weighted_bound(crossover: Floats) -> float:
    """Chernoff bound of the error of the log-likelihood-ratio vote for known p.

        prod_m 2 sqrt(p[m] (1 - p[m]))

    Every worker with p other than 1/2 lowers it. A bad worker raises the bound of a plain majority.
    """
    factors = [2 * math.sqrt(p * (1 - p)) for p in crossover]
    return math.prod(factors)


def batch_crossover(signal_to_noise: float, batch_size: float) -> float:
    """The p of a worker that averages B samples, for Gaussian gradient noise: Phi(-sqrt(B) mu / sigma).

    Args:
        signal_to_noise: |mu| / sigma of one sample's gradient at this coordinate.
        batch_size: B.

    """
    return math.erfc(math.sqrt(batch_size / 2) * signal_to_noise) / 2


def low_signal_weight(signal_to_noise: float, batch_size: float) -> float:
    """The limit of log((1 - p) / p) for a weak signal: sqrt(8 B / pi) mu / sigma.

    So the best weights are proportional to sqrt(B) at every coordinate: the signal-to-noise ratio is a
    factor common to all workers, and cancels in the vote.
    """
    return math.sqrt(8 * batch_size / math.pi) * signal_to_noise


def settled_weights(crossover: Floats, rounds: int = 50) -> list[int]:
    """The weights to which a vote converges that counts mismatches with its own decisions.

    Starts from a plain majority. Each step computes the weights (paper, eq. 3) of the observed crossover.
    """
    workers = range(len(crossover))
    weights = [1] * len(crossover)
    for _ in range(rounds):
        observed = [observed_crossover(crossover, weights, m) for m in workers]
        settled = llr_integers(observed)
        if settled == weights:
            break
        weights = settled
    return weights
