"""Votes on every step, votes on K local steps, and Flower's FedAvg: accuracy at equal rounds and at equal bytes.

    python -m benchmarks.flower_modes --data-dir DIR          # half an hour on one core; what is done is not done again

MNIST, an MLP of one hidden layer of 64, 15 nodes that own equal random parts of the data: 12 with a batch of 4, 3 with
304. Strategies, messages and ClientApps are Flower's; the grid that carries them is in this process. Bytes are those
of all objects of all messages. The step and rate of each way were chosen on another seed, by test accuracy; steps and
rates fall to 0 along half a cosine. Writes benchmarks/flower/modes.json and prints the tables of docs/flower.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from tests.flower_grid import LocalGrid
from torch import Tensor, nn

from signvote import Layout
from signvote.engines.flower import SignVote, vote
from signvote.sim.gradients import evaluate
from signvote.sim.population import generator, mode_batch_sizes, split
from signvote.tasks import Task, load_task

SIZES = mode_batch_sizes(3)
SEEDS, TUNING_SEED = (0, 1, 2), 100
K = 10
WAYS: dict[str, list[dict[str, float]]] = {  # way -> settings tried
    "votes, each step": [{"step": 1e-3}, {"step": 3e-3}, {"step": 1e-2}],
    f"votes, {K} local steps": [
        {"step": 3e-3, "rate": 0.02},
        {"step": 3e-3, "rate": 0.05},
        {"step": 3e-3, "rate": 0.2},
        {"step": 1e-2, "rate": 0.05},
    ],
    "FedAvg, each step": [{"rate": 0.1}, {"rate": 0.3}, {"rate": 1.0}],
    f"FedAvg, {K} local steps": [{"rate": 0.1}, {"rate": 0.3}, {"rate": 0.6}],
}
ROUNDS = {
    "equal rounds": (100, 100),
    "equal bytes": (320, 13),
}  # of votes, of FedAvg; 5.03 MB and 5.35 MB per node


def cosine(first: float, rounds: int) -> Callable[[int], float]:
    """From `first` at round 1 to almost 0 at the last."""
    return lambda t: first * (1 + math.cos(math.pi * (t - 1) / rounds)) / 2


class Nodes:
    """The nodes' data and what they do with a message."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.parts = split(task.train, len(SIZES), "iid", seed)

    def loss(self, model: nn.Module, node: int, step: int) -> Tensor:
        """The mean loss over a node's batch of a step."""
        own, draw = self.parts[node], generator(self.seed, 7, node, step)
        chosen = own[torch.randint(len(own), (SIZES[node],), generator=draw)]
        return self.task.loss(model, self.task.batch(self.task.train, chosen))

    def votes(self, message: Message, context: Context) -> Message:
        """The whole ClientApp."""
        model, node = self.task.model(), context.node_id
        return vote(message, context, model, lambda s: self.loss(model, node, s), batch_size=SIZES[node])

    def averages(self, message: Message, context: Context) -> Message:
        """What Flower's own examples do: train the model that came, send it back."""
        config: dict[str, Any] = dict(message.content.config_records["config"])
        model, node, steps = self.task.model(), context.node_id, config["steps"]
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        round = config["server-round"]
        rate = cosine(config["rate"], config["rounds"])(round)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        model.train()
        for step in range((round - 1) * steps, round * steps):
            optimizer.zero_grad()
            self.loss(model, node, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        metrics = MetricRecord({"num-examples": SIZES[node] * steps})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)


def train(task: Task, way: str, settings: dict[str, float], rounds: int, seed: int) -> dict[str, Any]:
    """One run: final accuracy and bytes."""
    nodes, steps = Nodes(task, seed), 1 if "each" in way else K
    torch.manual_seed(generator(seed, 0).initial_seed())
    model = task.model()
    grid = LocalGrid(dict.fromkeys(range(len(SIZES)), nodes.votes if "votes" in way else nodes.averages))
    arrays = ArrayRecord(model.state_dict())
    if "votes" in way:
        step, rate = cosine(settings["step"], rounds), settings.get("rate", 0.1)
        strategy = SignVote(Layout.of(model), step=step, momentum=0.9, local_steps=steps, local_rate=rate)
        result = strategy.start(grid, arrays, num_rounds=rounds)
    else:
        config = ConfigRecord({"steps": steps, "rounds": rounds, "rate": settings["rate"]})
        result = FedAvg(fraction_evaluate=0.0, min_train_nodes=len(SIZES)).start(
            grid, arrays, num_rounds=rounds, train_config=config
        )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    measured = evaluate(task, model, 1000)
    up, down = sum(grid.bytes_up), sum(grid.bytes_down)
    run = {"way": way, "settings": settings, "rounds": rounds, "seed": seed}
    return run | measured | {"bytes_up": up, "bytes_down": down}


def table(runs: list[dict[str, Any]]) -> str:
    """Accuracy and megabytes, mean over seeds."""
    lines = ["| | rounds | MB per node | accuracy |", "|---|---|---|---|"]
    for what, (of_votes, of_averages) in ROUNDS.items():
        lines.append(f"| **{what}** | | | |")
        for way in WAYS:
            rounds = of_votes if "votes" in way else of_averages
            found = [r for r in runs if (r["way"], r["rounds"]) == (way, rounds) and r["seed"] in SEEDS]
            if found:
                values = [100 * r["accuracy"] for r in found]
                megabytes = mean(r["bytes_up"] + r["bytes_down"] for r in found) / len(SIZES) / 1e6
                spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
                lines.append(f"| {way} | {rounds} | {megabytes:.2f} | {mean(values):.1f} %{spread} |")
    return "\n".join(lines)


class Results:
    """Runs on disk; one that is there is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def get(self, task: Task, *key: Any) -> dict[str, Any]:
        """The run of (way, settings, rounds, seed)."""
        for run in self.runs:
            if (run["way"], run["settings"], run["rounds"], run["seed"]) == key:
                return run
        run = train(task, *key)
        self.runs.append(run)
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.runs, indent=1))
        print(
            f"{run['way']}, {run['settings']}, {run['rounds']} rounds, seed {run['seed']}: {run['accuracy']:.1%}"
        )
        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "flower" / "modes.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    task, results = load_task(options.task, options.data_dir, "mlp"), Results(options.out)
    best = {}
    for way, tried in WAYS.items():
        for index, what in enumerate(ROUNDS):
            rounds = 100 if "votes" in way or not index else ROUNDS[what][1]
            tuned = [results.get(task, way, settings, rounds, TUNING_SEED) for settings in tried]
            best[way, what] = max(tuned, key=lambda run: run["accuracy"])["settings"]
    for seed in SEEDS:
        for (way, what), settings in best.items():
            results.get(task, way, settings, ROUNDS[what]["votes" not in way], seed)
    print(table(results.runs))


if __name__ == "__main__":
    main()
