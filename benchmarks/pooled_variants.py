"""Which pooled trust: by whom a worker is judged, how finely, how long it is remembered, from when it counts.

    python -m benchmarks.pooled_variants --device cuda                        # MNIST CNN
    python -m benchmarks.pooled_variants --task cifar10 --model resnet20 --device cuda --precision bf16

Each variant is `pooled` with one thing changed, under the tuned recipe, in modes 1 to 4. Writes
benchmarks/pooled_variants/TASK.json, one line of the table at a time: what it holds is not run again.
docs/rules.md has the tables. Three of the variants are rules of their own, written here as a user would.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from signvote.core.rules import RULES, Pooled
from signvote.core.trust import Evidence
from signvote.core.vote import ONE, Voters, Votes, empty_decision, fixed_point, llr_weights, scaled
from signvote.kernels import Coin, Planes, backend, upload
from signvote.sim import Config, train
from signvote.sim.machine import Machine
from signvote.tasks import load_task

PRIOR_VOTES = 10_000  # that a tensor's count is mixed with, at the worker's own p
UNWEIGHTED = 100  # first rounds, as in the paper


class ByOthers(Pooled):
    """Judged by the decision that the others would have made: leave one out.
    Costs a vote for each worker.
    """

    name = "pooled-by-others"

    def vote(self, out: Planes, votes: Votes, coin: Coin | None) -> Evidence:
        """As pooled, then for each worker what the others alone decide."""
        seen = super().vote(out, votes, coin)
        device = votes.planes.signs.device
        weights = upload(self.weights(votes)[:, 0], device)
        if votes.present is not None:
            weights = weights * votes.present
        mismatches, cast = seen.mismatches.clone(), seen.cast.clone()
        for m in range(len(votes.workers)):
            without = weights.clone()
            without[m] = 0
            scratch = empty_decision(votes.n, coin, device)
            counts = backend(device).vote_(scratch, votes.planes, without, coin, (0, votes.n))
            mismatches[m, 0], cast[m, 0] = counts[0][m], counts[1][m]
        return replace(seen, mismatches=mismatches, cast=cast)


class Late(Pooled):
    """Every vote counts one in the first 100 rounds, as in the paper.
    What they show is counted all the same.
    """

    name = "pooled-late"
    rounds = 0

    def weights(self, voters: Voters) -> Tensor:
        """1, or pooled's after the first rounds."""
        learned = super().weights(voters)
        return learned if self.rounds >= UNWEIGHTED else torch.full_like(learned, ONE)

    def learn(self, evidence: Evidence) -> None:
        """As pooled, from the first round on."""
        super().learn(evidence)
        self.rounds += 1


class Shrunk(Pooled):
    """A p for each tensor, drawn towards the worker's own where the tensor is small.
    Mixed with 10,000 votes of the worker's p.
    """

    name = "pooled-shrunk"

    def __init__(self, layout: Any) -> None:
        super().__init__(layout, per="tensor")

    def weights(self, voters: Voters) -> Tensor:
        """log((1 - p) / p) of the mixed p (paper, eq. 3)."""
        known = self.trust.index
        if any(worker not in known for worker in voters.workers):
            return super().weights(voters)
        rows = [known[worker] for worker in voters.workers]
        counts = self.trust.counts[rows].transpose(0, 1)
        whole = counts.sum(2, keepdim=True)
        if not whole[1].all():
            return super().weights(voters)
        p = (counts[0] + PRIOR_VOTES * whole[0] / whole[1]) / (counts[1] + PRIOR_VOTES)
        return fixed_point(scaled(llr_weights(p, max_llr=self.max_llr)))


RULES |= {rule.name: rule for rule in (ByOthers, Late, Shrunk)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is: per worker, judged by all, from round 2": ("pooled", {}),
    "judged by the others": (ByOthers.name, {}),
    "per tensor": ("pooled", {"per": "tensor"}),
    "per tensor, shrunk": (Shrunk.name, {}),
    "forgetting 0.98": ("pooled", {"forgetting": 0.98}),
    "forgetting 0.9": ("pooled", {"forgetting": 0.9}),
    "from round 101": (Late.name, {}),
    "robust": ("robust", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--model", default="mnist-cnn")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--modes", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pooled_variants")
    options = parser.parse_args()
    task = load_task(options.task, options.data_dir, options.model)
    machine = Machine(device=options.device, precision=options.precision)
    workshop: dict[Any, Any] = {}
    options.out.mkdir(exist_ok=True)
    path = options.out / f"{options.task}.json"
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    wanted = [(m, s, v) for m in options.modes for s in options.seeds for v in options.variants]
    with Progress(transient=True) as progress, TemporaryDirectory() as folder:
        for number, (mode, seed, variant) in enumerate(progress.track(wanted)):
            name = f"{variant} | mode {mode} | seed {seed}"
            if name not in found:
                rule, settings = VARIANTS[variant]
                shared: dict[str, Any] = {"rounds": options.rounds, "evaluate_every": options.rounds}
                config = Config(task=task.name, model=options.model, rule=rule, mode=mode, seed=seed,
                                options=settings, **shared)  # fmt: skip
                result = train(config, task, Path(folder, str(number)), machine=machine, workshop=workshop)
                if result["status"] != "done":
                    break
                found[name] = result["evaluations"]["accuracy"][-1]
                path.write_text(json.dumps(found, indent=1))
    Console().print(_table(found, options.modes))


def _table(found: dict[str, float], modes: list[int]) -> Table:
    table = Table(title="Test accuracy in %, mean and spread of the seeds")
    for heading in ("variant", *(f"mode {m}" for m in modes)):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for variant in VARIANTS:
        cells = []
        for mode in modes:
            values = [100 * v for k, v in found.items() if k.startswith(f"{variant} | mode {mode} |")]
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.2f}{spread}" if values else "")
        table.add_row(variant, *cells)
    return table


if __name__ == "__main__":
    main()
