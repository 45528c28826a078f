"""What votes are measured against: whole gradients, 32 bits each, that no rule of one bit gets to see.

    oracle    the sign of the mean gradient of all samples; nobody attacks it
    sgd       that mean itself, which one attacker can turn
    median    the middle of the workers' gradients in each coordinate, which fewer than half cannot

An attacker of sgd or median sends its own magnitudes with the signs of its attack, so all are up against
the same one. It could do worse: a float can be scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from signvote.core.bits import unpack_signs
from signvote.core.vote import Votes


def messages(signals: Tensor, votes: Votes) -> tuple[Tensor, tuple[int, ...]]:
    """What workers send, (workers, N), those left out that are not finite; and their batch sizes.

    Args:
        signals: what each worker would send, a row for each voter.
        votes: the signs that are sent.

    """
    sent = signals.abs() * unpack_signs(votes.planes, votes.n)
    if votes.present is None:
        return sent, votes.batch_sizes
    rows = votes.present.nonzero()[:, 0].tolist()
    return sent[rows], tuple(votes.batch_sizes[i] for i in rows)


def mean(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """Of all samples: weighted with the batch sizes declared."""
    shares = torch.tensor(batch_sizes, dtype=sent.dtype, device=sent.device)
    return (sent * (shares / shares.sum())[:, None]).sum(0)


def median(sent: Tensor, batch_sizes: tuple[int, ...]) -> Tensor:
    """Of the workers, in each coordinate; the mean of the middle two if their number is even."""
    ordered, m = sent.sort(0).values, len(sent)
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2


AGGREGATES = {"sgd": mean, "median": median}
