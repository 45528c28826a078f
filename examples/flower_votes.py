"""Flower in one file: five simulated nodes train MNIST by votes, with one bit per parameter each way.

    pip install 'signvote[flower]'
    python examples/flower_votes.py                # a minute or two
    python examples/flower_votes.py --rounds 3     # the small form

`SignVote` is the strategy of the ServerApp, `vote` the answer of a ClientApp: the rest is Flower's. The images come
with signvote. `run_simulation` needs no more than this file, but Flower will remove it one day in favour of `flwr run`:
`signvote flower-app DIR` writes the app for that, which is also what you deploy.
"""

from __future__ import annotations

import argparse
import logging
import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or ray warns of what it will do one day

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor

from signvote import Layout
from signvote.engines.flower import SignVote, vote
from signvote.tasks import load_task

BATCH_SIZES = (4, 4, 16, 64, 256)  # of the nodes: they are unequal
client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """A node's round: its own fifth of the images, the loss on a batch of them, a vote."""
    task, node = load_task("mnist-10k", model="mlp"), int(context.node_config["partition-id"])
    model, own = task.model(), torch.arange(node, len(task.train), len(BATCH_SIZES))  # (1600,)

    def loss(step: int) -> Tensor:
        batch = own[torch.randint(len(own), (BATCH_SIZES[node],))]  # (B,); `vote` has seeded torch
        return task.loss(model, task.batch(task.train, batch))

    return vote(message, context, model, loss)  # the batch that passes through the model tells the size


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The server's run: decide each round by the votes of whoever answered."""
    task = load_task("mnist-10k", model="mlp")
    torch.manual_seed(0)
    model = task.model()  # its values are where everybody starts

    @torch.no_grad()
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        right = model(task.prepare(task.test.inputs)).argmax(1) == task.test.labels  # (2000,)
        return MetricRecord({"accuracy": float(right.float().mean())})

    strategy = SignVote(
        Layout.of(model), rule="weighted", step=3e-3, momentum=0.9, min_available_nodes=len(BATCH_SIZES)
    )
    arrays = ArrayRecord(model.state_dict())
    result = strategy.start(grid, arrays, num_rounds=options.rounds, evaluate_fn=evaluate)
    first, *_, last = (record["accuracy"] for record in result.evaluate_metrics_serverapp.values())
    print(f"test accuracy {first:.1%} before, {last:.1%} after {strategy.round} rounds")
    voters = strategy.server.report.voters  # numbered as Flower's node ids are, not as BATCH_SIZES
    print(f"{len(voters)} of {len(BATCH_SIZES)} nodes voted in the last round")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rounds", type=int, default=30)
if __name__ == "__main__":
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    one_core_each = {"num_cpus": 1, "num_gpus": 0.0}
    quiet = {"num_cpus": 2, "log_to_driver": False}
    run_simulation(
        server,
        client,
        num_supernodes=len(BATCH_SIZES),
        backend_config={"client_resources": one_core_each, "init_args": quiet},  # type: ignore[dict-item]
    )
