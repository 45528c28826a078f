"""Fifteen workers of unequal reliability vote on signs we know: who decides best?

    python examples/unequal_voters.py            # a few seconds
    python examples/unequal_voters.py --rounds 1000 --coordinates 20000

Nine workers are barely better than a coin, four are fair, two are good. Every round each sends its
signs as a real ballot, and four servers decide from the same ballots. The error is the share of
decided signs that are wrong, over the second half of the rounds; theory says what it should be.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import signvote
from signvote import Voters, WeightedRule, theory
from signvote.core.ballot import parse
from signvote.core.bits import unpack_signs

CROSSOVER = [0.47] * 9 + [0.35] * 4 + [0.12] * 2  # p of each worker


class KnownCrossover(WeightedRule):
    """The optimum: what nobody has in practice, everybody's true p. Also how to write a rule."""

    name = "optimum (p known)"

    def weights(self, voters: Voters) -> torch.Tensor:
        known = theory.llr_integers([CROSSOVER[w] for w in voters.workers])
        return torch.tensor(known, dtype=torch.int32)[:, None]


def run(rounds: int, coordinates: int, seed: int = 0) -> dict[str, float]:
    """Measured error of each rule."""
    generator = torch.Generator().manual_seed(seed)
    votes = [{"x": torch.zeros(coordinates)} for _ in CROSSOVER]  # what each worker votes on
    workers = [signvote.Worker(v, worker_id=m, run=seed) for m, v in enumerate(votes)]
    layout = workers[0].layout
    servers = {
        name: signvote.Server(layout, name, run=seed) for name in ("majority", "it-signsgd", "weighted")
    }
    servers[KnownCrossover.name] = signvote.Server(layout, KnownCrossover(layout), run=seed)
    wrong = dict.fromkeys(servers, 0)
    judged = range(rounds // 2 + 1, rounds + 1)

    for round in track(range(1, rounds + 1), description="voting", transient=True):
        truth = torch.randint(0, 2, (coordinates,), generator=generator) * 2 - 1
        for p, vote in zip(CROSSOVER, votes, strict=True):
            flipped = torch.rand(coordinates, generator=generator) < p
            vote["x"].grad = torch.where(flipped, -truth, truth).float()
        ballots = {w.worker_id: w.ballot(round) for w in workers}
        for name, server in servers.items():
            decision = parse(server.decide(round, ballots), layout=layout, run=seed)
            if round in judged:
                wrong[name] += int((unpack_signs(decision.planes(), coordinates) != truth).sum())
    return {name: count / (len(judged) * coordinates) for name, count in wrong.items()}


def predictions() -> dict[str, float]:
    """What theory says: exact for fixed weights; learned ones, once they have settled."""
    learned = theory.error_probability(CROSSOVER, theory.settled_weights(CROSSOVER))
    return {
        "majority": theory.error_probability(CROSSOVER, [1] * len(CROSSOVER)),
        "it-signsgd": learned,
        "weighted": learned,
        KnownCrossover.name: theory.error_probability(CROSSOVER, theory.llr_integers(CROSSOVER)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--coordinates", type=int, default=10_000)
    options = parser.parse_args()
    measured, predicted = run(options.rounds, options.coordinates), predictions()

    table = Table(
        title=f"{len(CROSSOVER)} workers, {options.rounds} rounds, {options.coordinates:,} coordinates"
    )
    for heading in ("rule", "wrong signs, measured", "in theory"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for name, error in measured.items():
        table.add_row(name, f"{error:.2%}", f"{predicted[name]:.2%}")
    Console().print(table)
    Console().print(
        "In theory: exact for given weights; for learned ones, where counting against one's own decisions\n"
        "settles after many rounds. it-signsgd counts per coordinate, so it is still on its way there."
    )


if __name__ == "__main__":
    main()
