"""A rule of one's own: `trimmed` leaves out the workers that decisions overruled most often. Is it any good?

    python examples/custom_rule.py                # under a minute
    python examples/custom_rule.py --rounds 10    # the small form

A rule gives each voter an integer weight; tallies, ties, chunks, checkpoints and ballots are the library's. Entered
in `signvote.RULES`, it has a name that the simulator, `signvote.Server` and every engine know. It is compared with
`majority` and `weighted` where its idea should help, six workers of fifteen that invert their signs, and where it has
nothing to offer: one worker with a large batch and fourteen with small ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

import signvote
from signvote import ONE, CountTrust, Layout, Voters, WeightedRule
from signvote.sim import Config, train
from signvote.tasks import load_task


class Trimmed(WeightedRule):
    """Every vote counts one, but those of the `trim` workers overruled most often count nothing.
    For a known number of bad workers; blind to how good the others are.
    """

    name = "trimmed"
    trust: CountTrust

    def __init__(self, layout: Layout, *, trim: int = 6) -> None:
        super().__init__(layout)
        self.trim = trim
        self.trust = CountTrust(groups=1)  # counts who was overruled; a server saves and loads it

    def weights(self, voters: Voters) -> Tensor:
        p = self.trust.crossover(voters.workers)  # (workers, 1)
        stay = max(1, len(voters.workers) - self.trim)
        worst = p.sort(0).values[stay - 1]  # of those who stay: all of them while p is equal
        chosen: Tensor = (p <= worst).int() * ONE  # (workers, 1) int32; 1024 is a weight of 1
        return chosen


signvote.RULES[Trimmed.name] = Trimmed
SCENES = {"6 of 15 invert": {"mode": 1, "attack": "invert:6"}, "14 x 4 + 1 x 904": {"mode": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/custom-rule"))
    options = parser.parse_args()
    task = load_task("mnist-10k", model="mlp")

    print(f"{'test accuracy':<14}", *(f"{scene:>18}" for scene in SCENES))
    for rule in ("majority", "weighted", "trimmed"):
        cells = []
        for number, settings in enumerate(SCENES.values()):
            config = Config(task="mnist-10k", model="mlp", rule=rule, rounds=options.rounds, **settings)  # type: ignore[arg-type]
            result = train(config, task, options.out / f"{rule}-{number}")
            cells.append(f"{result['evaluations']['accuracy'][-1]:>18.1%}")
        print(f"{rule:<14}", *cells)


if __name__ == "__main__":
    main()
