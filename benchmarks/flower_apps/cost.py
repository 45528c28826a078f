"""The paper's CNN on MNIST, one step per round: by votes, or by FedAvg."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from signvote import Layout
from signvote.engines.flower import SignVote, vote
from signvote.tasks import load_task

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    task = load_task("mnist-10k")
    model = task.model()

    draw = torch.Generator().manual_seed(
        context.node_id >> 1
    )  # equal replies would be stored, and counted, once
    chosen = torch.randint(len(task.train), (64,), generator=draw)

    def loss(step: int) -> Tensor:
        return task.loss(model, task.batch(task.train, chosen))

    if context.run_config["way"] == "votes":
        return vote(message, context, model, loss, batch_size=64)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    loss(0).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 64})}
    )
    return Message(content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    model, times = load_task("mnist-10k").model(), []
    if context.run_config["way"] == "votes":
        strategy: Any = SignVote(Layout.of(model), momentum=0.9, min_available_nodes=3)
    else:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=lambda t, arrays: times.append(time.time()),
    )
    Path(str(context.run_config["out"])).write_text(json.dumps(times))
