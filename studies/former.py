"""The rules of release 0.1.0 that `weighted` replaced, as yardsticks: `python -m studies.former STUDY.toml [flags]`.

`log-odds` was called pooled, `square-roots` known-batch. The command is `signvote study` with these two rules in it.
"""

from __future__ import annotations

import sys

from torch import Tensor

import signvote
from signvote import CountTrust, Layout, Voters, WeightedRule, fixed_point, llr_weights, scaled
from signvote.core.trust import FEW
from signvote.core.vote import roots


class LogOdds(WeightedRule):
    """Weighs by log((1-p)/p), where p is the share of a worker's votes that decisions overruled.
    Release 0.1.0's default: good with many unequal workers, a dictator's friend with few.
    """

    name = "log-odds"
    learns_from = FEW
    trust: CountTrust

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.trust = CountTrust(groups=1)

    def weights(self, voters: Voters) -> Tensor:
        """log((1 - p) / p) (paper, eq. 3); equal for fewer than three voters."""
        p = self.trust.crossover(voters.workers)
        if len(voters.workers) < FEW:
            p = p.new_full(p.shape, 0.25)
        return fixed_point(scaled(llr_weights(p)))


class SquareRoots(WeightedRule):
    """Weighs by sqrt(B) of the declared batch size B, and learns nothing.
    Release 0.1.0's rule for clusters that can be trusted.
    """

    name = "square-roots"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)

    def weights(self, voters: Voters) -> Tensor:
        """sqrt(B); equal if a worker declares no size."""
        declared = roots(voters.batch_sizes)
        if declared is None:
            raise ValueError("square-roots needs the batch size of every worker")
        return fixed_point(scaled(declared[:, None]))


if __name__ in ("__main__", "__mp_main__"):  # in the processes that it starts, too
    signvote.RULES |= {rule.name: rule for rule in (LogOdds, SquareRoots)}

if __name__ == "__main__":
    from signvote.cli import main

    sys.argv[1:1] = ["study"]
    main()
