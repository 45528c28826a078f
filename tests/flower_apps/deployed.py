"""An app for real processes. A node whose config has `faults` misbehaves: '2:garbage 3:stale 4:other 5:empty'."""

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from signvote import Layout, Worker
from signvote.engines.flower import SignVote, vote
from signvote.engines.flower.records import BALLOT, to_array
from signvote.tasks import load_task

client = ClientApp()
server = ServerApp()
SIZES = (16, 64, 64)


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    task = load_task("mnist-10k", model="mlp")
    model, size = task.model(), SIZES[int(context.node_config["partition-id"])]

    def loss(step: int) -> Tensor:
        chosen = torch.randint(len(task.train), (size,))
        return task.loss(model, task.batch(task.train, chosen))

    reply = vote(message, context, model, loss)
    order = message.content.config_records["signvote"]
    faults = dict(pair.split(":") for pair in str(context.node_config.get("faults", "")).split())
    misbehave(faults.get(str(order["round"]), ""), reply, model, int(order["worker"]), int(order["round"]))  # type: ignore[arg-type]
    return reply


def misbehave(fault: str, reply: Message, model: nn.Module, worker: int, round: int) -> None:
    sent = {
        "garbage": lambda: os.urandom(1000),
        "stale": lambda: Worker(model, worker).ballot(round - 1),
        "other": lambda: Worker(nn.Linear(3, 1), worker).ballot(round),
    }
    if fault in sent:
        reply.content[BALLOT] = ArrayRecord({BALLOT: to_array(sent[fault]())})
    elif fault == "empty":
        del reply.content[BALLOT]


@server.main()
def main(grid: Grid, context: Context) -> None:
    task, config = load_task("mnist-10k", model="mlp"), context.run_config
    torch.manual_seed(0)
    model = task.model()
    strategy = SignVote(
        Layout.of(model),
        rule="it-signsgd",
        step=2e-3,
        momentum=0.5,
        min_available_nodes=int(config["min-nodes"]),
        min_ballots=int(config["min-ballots"]),
        checkpoint=str(config["checkpoint"]),
    )

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            right = model(task.prepare(task.test.inputs)).argmax(1) == task.test.labels
        return MetricRecord({"accuracy": float(right.float().mean())})

    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["deadline"]),
        evaluate_fn=evaluate,
    )
