"""Batch norm over Flower: how good is the model that the server ends with?

    python -m benchmarks.flower_buffers                       # a minute on one core

10,000 bundled MNIST images, an MLP of one hidden layer of 64 with batch norm, 8 nodes with batches of 32 from parts of
their own: random ones, or of two labels each. 100 rounds of the default rule, momentum 0.9, step 0.003 along half a
cosine. The accuracy is that of the result, with the median of the nodes' statistics and with those it started with,
which is the result at `buffers_every=0`; and the mean over the nodes' own models, which lack the last step. Writes
benchmarks/flower/buffers.json.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from tests.flower_grid import LocalGrid
from torch import nn

from signvote import Layout
from signvote.engines.flower import SignVote, vote
from signvote.engines.flower.records import MODEL
from signvote.sim.gradients import evaluate
from signvote.sim.population import generator, split
from signvote.tasks import Task, load_task

NODES, BATCH, ROUNDS, SEEDS = 8, 32, 100, (0, 1)
SPLITS = ("iid", "labels:2")
OUT = Path(__file__).parent / "flower" / "buffers.json"


def model() -> nn.Module:
    """An MLP with batch norm."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def grid_of(task: Task, how: str, seed: int) -> LocalGrid:
    """Nodes with their parts of the data."""
    parts = split(task.train, NODES, how, seed)

    def client(message: Message, context: Context) -> Message:
        node, own = model(), parts[context.node_id]

        def loss(step: int) -> torch.Tensor:
            draw = generator(seed, 7, context.node_id, step)
            chosen = own[torch.randint(len(own), (BATCH,), generator=draw)]
            return task.loss(node, task.batch(task.train, chosen))

        return vote(message, context, node, loss, batch_size=BATCH)

    return LocalGrid(dict.fromkeys(range(NODES), client))


def accuracy(task: Task, arrays: dict[str, torch.Tensor]) -> float:
    """Test accuracy of a model."""
    net = model()
    net.load_state_dict(arrays)
    found = evaluate(task, net, 1000)["accuracy"]
    return found


def train(task: Task, how: str, seed: int) -> dict[str, Any]:
    """One run."""
    torch.manual_seed(seed)
    start, grid = model(), grid_of(task, how, seed)
    strategy = SignVote(
        Layout.of(start),
        step=lambda t: 3e-3 * (1 + math.cos(math.pi * (t - 1) / ROUNDS)) / 2,
        momentum=0.9,
    )
    result = strategy.start(grid, ArrayRecord(start.state_dict()), num_rounds=ROUNDS)
    arrays = dict(result.arrays.to_torch_state_dict())
    contexts = [grid.contexts[node].state for node in range(NODES)]
    own = [dict(state.array_records[MODEL].to_torch_state_dict()) for state in contexts]
    return {
        "split": how,
        "seed": seed,
        "median": accuracy(task, arrays),
        "initial": accuracy(task, arrays | dict(start.named_buffers())),
        "nodes": mean(accuracy(task, each) for each in own),
    }


def main() -> None:
    """Run all, print the table."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    task = load_task("mnist-10k", model="mlp")
    runs = [train(task, how, seed) for how in SPLITS for seed in SEEDS]
    OUT.write_text(json.dumps(runs, indent=1) + "\n")
    print("| parts | median of the nodes | initial | the nodes' own |\n|---|---|---|---|")
    for how in SPLITS:
        found = [run for run in runs if run["split"] == how]
        each = [100 * mean(run[what] for run in found) for what in ("median", "initial", "nodes")]
        print(f"| {how} | " + " | ".join(f"{value:.1f} %" for value in each) + " |")


if __name__ == "__main__":
    main()
