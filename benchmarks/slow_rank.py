"""One slow machine among four: equal batches against batches by speed.

    python -m benchmarks.slow_rank                    # ten minutes, more on a busy machine
    python -m benchmarks.slow_rank --seeds 0 --rounds 20

Four gloo ranks on loopback train the MNIST CNN with 256 samples a round, one thread each. The slowness is
emulated: the slow rank sleeps 7 times as long as its own forward and backward pass took, so it is 8 times slower
for its share of the samples, while what it sends and decides costs as much as anybody's. With fewer cores than
ranks the fast ones share cores and a sleeping rank leaves its own to them, so ratios differ from those of
four machines. Test accuracy is computed after a run, from copies of the parameters: it costs no time in it.
Writes benchmarks/slow_rank/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from signvote.engines.ddp import Balancer, UnequalSampler, VoteState, vote_gradients
from signvote.sim.gradients import evaluate
from signvote.tasks import Task, load_task

WORLD, TOTAL, EVERY = 4, 256, 10  # ranks; samples a round; rounds between two looks at the speeds
SLOW = 8.0  # times, the last rank
STEP, MOMENTUM = 1e-3, 0.9
KEEP = 10  # rounds between copies for the accuracy
CHANGE = 100  # round in which another rank becomes slow, too
NEAR = 1.15  # of where a round's time ends: settled
RULES = ("majority", "weighted")
Slowness = Callable[[int, int], float]  # rank and round -> times slower
OUT = Path(__file__).with_suffix("") / "results.json"


def one_slow(rank: int, round: int) -> float:
    return SLOW if rank == WORLD - 1 else 1.0


def two_slow(rank: int, round: int) -> float:
    """The first rank slows down in the middle, by half as much."""
    return SLOW / 2 if rank == 0 and round >= CHANGE else one_slow(rank, round)


class Watched(Balancer):
    """A balancer that keeps what it was shown."""

    def __init__(self, balanced: bool) -> None:
        super().__init__(TOTAL, WORLD, every=EVERY if balanced else 0)
        self.worked: list[list[float]] = []  # seconds by round and rank

    def observe(self, seconds: Sequence[float]) -> None:
        """As it is shown."""
        self.worked.append(list(seconds))
        super().observe(seconds)


def train(
    task: Task, rule: str, seed: int, balanced: bool, slowness: Slowness, *, rounds: int
) -> tuple[dict[str, Any], list[tuple[int, Tensor]]]:
    """Train on this rank; times and sizes by round, and copies of the parameters, by round."""
    torch.manual_seed(seed)
    rank, model, balancer = dist.get_rank(), task.model(), Watched(balanced)
    state = VoteState(model, rule=rule, momentum=MOMENTUM, run=seed, balancer=balancer)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    sampler = UnequalSampler(len(task.train), balancer, rank, seed=seed)
    seconds, sizes, copies = [], [], []
    for round in range(rounds):
        began = time.perf_counter()
        sizes.append(balancer.sizes(round))
        indices = torch.tensor(sampler.batch(round))
        start = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model, task.batch(task.train, indices)).backward()  # type: ignore[no-untyped-call]
        time.sleep((slowness(rank, round) - 1) * (time.perf_counter() - start))
        vote_gradients(state)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if rank == 0 and (round + 1) % KEEP == 0:
            copies.append((round + 1, torch.nn.utils.parameters_to_vector(model.parameters()).detach()))
    times = {"seconds": seconds, "worked": balancer.worked, "sizes": sizes}
    return {"rule": rule, "seed": seed, "balanced": balanced, **times}, copies


def accuracies(task: Task, copies: list[tuple[int, Tensor]]) -> list[tuple[int, float]]:
    """Test accuracy by round."""
    model, found = task.model(), []
    for round, flat in copies:
        torch.nn.utils.vector_to_parameters(flat, model.parameters())
        found.append((round, evaluate(task, model, 500)["accuracy"]))
    return found


def work(rank: int, place: str, options: argparse.Namespace) -> None:
    """What each rank does: all runs in turn; the first writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=WORLD)
    task = load_task(options.task, options.data_dir)
    train(task, "weighted", 0, True, one_slow, rounds=12)  # kernels are compiled, allocators filled
    runs = []
    wanted = [(s, r, b) for s in options.seeds for r in RULES for b in (False, True)]
    with Progress(disable=rank > 0, transient=True) as progress:
        for seed, rule, balanced in progress.track(wanted, description="training"):
            rounds = options.rounds * (options.ratio if balanced else 1)
            run, copies = train(task, rule, seed, balanced, one_slow, rounds=rounds)
            runs.append(run | {"accuracy": accuracies(task, copies)})
        change = train(task, "weighted", 0, True, two_slow, rounds=2 * CHANGE)[0]
    if rank == 0:
        results: dict[str, Any] = {"world": WORLD, "total": TOTAL, "slow": SLOW, "every": EVERY}
        results |= {"cores": os.cpu_count(), "runs": runs, "change": change}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, separators=(",", ":")))
    dist.destroy_process_group()


# ---- what it means -----------------------------------------------------------------------------------


def final(run: dict[str, Any]) -> float:
    """Seconds of a round at the end."""
    seconds: list[float] = run["seconds"]
    return median(seconds[-40:])


def settled(run: dict[str, Any], start: int) -> int:
    """Rounds after `start` until a round takes about as long as at the end: the median of 10, within NEAR."""
    seconds = run["seconds"]
    starts = range(start, len(seconds) - 9)
    return next(t for t in starts if median(seconds[t : t + 10]) <= NEAR * final(run)) - start


def accuracy_by_round(run: dict[str, Any]) -> dict[int, float]:
    return {round: 100 * accuracy for round, accuracy in run["accuracy"]}


def accuracy_at(run: dict[str, Any], seconds: float) -> float:
    """Of the last copy made by then."""
    elapsed, found, by_round = 0.0, 0.0, accuracy_by_round(run)
    for round, took in enumerate(run["seconds"], 1):
        elapsed += took
        if elapsed > seconds:
            break
        found = by_round.get(round, found)
    return found


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{fmean(values):.1f}"
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the table."""
    runs, found = results["runs"], {}
    for rule in RULES:
        equal = [r for r in runs if r["rule"] == rule and not r["balanced"]]
        balanced = [r for r in runs if r["rule"] == rule and r["balanced"]]
        pairs = list(zip(equal, balanced, strict=True))
        ends = [min(sum(e["seconds"]), sum(b["seconds"])) for e, b in pairs]
        by_rounds = [[accuracy_by_round(run) for run in pair] for pair in pairs]
        last = max(by_rounds[0][0])
        found[rule] = {
            "seconds": [median(median(e["seconds"]) for e in equal), median(map(final, balanced))],
            "ratio": median(median(e["seconds"]) / final(b) for e, b in pairs),
            "sizes": [b["sizes"][-1] for b in balanced],
            "settled": [settled(b, 0) for b in balanced],
            "at_seconds": fmean(ends),
            "half": [[accuracy_at(r[i], t / 2) for r, t in zip(pairs, ends, strict=True)] for i in (0, 1)],
            "end": [[accuracy_at(r[i], t) for r, t in zip(pairs, ends, strict=True)] for i in (0, 1)],
            "at_round": last,
            "rounds": [[pair[i][last] for pair in by_rounds] for i in (0, 1)],
        }
    change = results["change"]
    found["change"] = {
        "before": median(change["seconds"][CHANGE - 40 : CHANGE]),
        "at_once": median(change["seconds"][CHANGE : CHANGE + EVERY]),
        "after": final(change),
        "settled": settled(change, CHANGE),
        "sizes": [change["sizes"][CHANGE - 1], change["sizes"][-1]],
    }
    return found


def show(found: dict[str, Any]) -> Table:
    table = Table(title="Equal batches / batches by speed")
    for heading in ("", *RULES):
        table.add_column(heading)
    one = found[RULES[0]]

    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(cell(found[rule]) for rule in RULES))

    row("seconds a round", lambda f: "{:.3f} / {:.3f}".format(*f["seconds"]))
    row("ratio", lambda f: f"{f['ratio']:.2f}")
    row("batch sizes at the end, by seed", lambda f: "; ".join(", ".join(map(str, s)) for s in f["sizes"]))
    row("rounds until settled, by seed", lambda f: ", ".join(map(str, f["settled"])))
    row("seconds of the shorter run, mean: T", lambda f: f"{f['at_seconds']:.0f}")
    for name, key in (("T / 2", "half"), ("T", "end"), (f"{one['at_round']} rounds", "rounds")):
        row(f"accuracy % after {name}", lambda f, key=key: " / ".join(map(spread, f[key])))  # type: ignore[misc]
    change = found["change"]
    table.add_section()
    was, now = (", ".join(map(str, sizes)) for sizes in change["sizes"])
    table.add_row(f"rank 0 {SLOW / 2:g} times slower, too", "", f"sizes {was} -> {now}")
    times = f"{change['before']:.3f} -> {change['at_once']:.3f} -> {change['after']:.3f}"
    table.add_row("seconds a round: before, at once, after", "", times)
    table.add_row("rounds until settled again", "", str(change["settled"]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=50, help="of each run with equal batches; 40 or more")
    parser.add_argument("--ratio", type=int, default=5, help="rounds of balanced batches for each equal one")
    parser.add_argument("--task", default="mnist-10k")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        spawn(work, (place, options), nprocs=WORLD, daemon=True)  # type: ignore[no-untyped-call]
    results = json.loads(options.out.read_text())
    results = {"summary": summary(results)} | results
    options.out.write_text(json.dumps(results, separators=(",", ":")))
    Console(width=130).print(show(results["summary"]))


if __name__ == "__main__":
    main()
