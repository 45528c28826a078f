"""The error probability of a vote: exact, and its bounds.

Model: the true sign is +1; worker m sends it flipped with probability p[m], independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from signvote.core.vote import ONE, fixed_point, llr_weights
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
    """How often a worker differs from a decision that contains its own vote, of the votes that are no tie.

        P(Y[m] decision = -1) / P(decision is no tie)

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
    when_right = tallies + w  # the tally of all, if this worker sends +1
    when_wrong = tallies - w
    overruled_right = (1 - p) * chances[when_right < 0].sum()
    overruled_wrong = p * chances[when_wrong > 0].sum()
    overruled = overruled_right + overruled_wrong
    tied_right = (1 - p) * chances[when_right == 0].sum()
    tied_wrong = p * chances[when_wrong == 0].sum()
    tied = tied_right + tied_wrong
    if tied >= 1:
        return p  # never decided, never counted
    return float(overruled / (1 - tied))


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

        prod_m (1 - p[m]) exp(-w[m] / 2) + p[m] exp(w[m] / 2)      w: the weights, clipped and rounded

    A factor is 2 sqrt(p (1 - p)) where the weight is not clipped. Every worker with p other than 1/2
    lowers the bound. A bad worker raises the bound of a plain majority.
    """
    factors = []
    for p, integer in zip(crossover, llr_integers(crossover), strict=True):
        w = integer / ONE
        right = (1 - p) * math.exp(-w / 2)
        wrong = p * math.exp(w / 2)
        factors.append(right + wrong)
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


def settled_weights(
    crossover: Floats,
    rounds: int = 50,
    start: Sequence[int] | None = None,
) -> list[int]:
    """The weights to which a vote converges that counts mismatches with its own decisions.

    Each step computes the weights (paper, eq. 3) of the observed crossover. From a plain majority, equal
    workers keep equal weights for ever. But that is a knife's edge where they are few and noisy: start
    from weights that differ a little, as counts of real votes do, and one of them may end as a dictator.

    >>> settled_weights([0.45] * 4, start=[1024, 1024, 1024, 1024])
    [1435, 1435, 1435, 1435]
    >>> settled_weights([0.45] * 4, start=[1030, 1024, 1024, 1024])
    [10240, 20, 20, 20]

    """
    workers = range(len(crossover))
    weights = list(start or [1] * len(crossover))
    for _ in range(rounds):
        observed = [observed_crossover(crossover, weights, m) for m in workers]
        settled = llr_integers(observed)
        if settled == weights:
            break
        weights = settled
    return weights
