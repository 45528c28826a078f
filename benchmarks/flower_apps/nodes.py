"""A small model on many simulated nodes: each votes on synthetic data of its own."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from signvote import Layout
from signvote.engines.flower import SignVote, vote

client = ClientApp()
server = ServerApp()
FEATURES, CLASSES = 64, 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = network()
    truth = nn.init.orthogonal_(torch.empty(CLASSES, FEATURES), generator=torch.Generator().manual_seed(1))

    def loss(step: int) -> Tensor:
        inputs = torch.randn(16, FEATURES)
        found: Tensor = nn.functional.cross_entropy(model(inputs), (inputs @ truth.T).argmax(1))
        return found

    return vote(message, context, model, loss)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = network()
    strategy = SignVote(
        Layout.of(model),
        step=0.01,
        fraction_train=float(config["fraction"]),
        min_available_nodes=int(config["nodes"]),
    )
    marks: list[float] = []
    result = strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        evaluate_fn=lambda t, arrays: marks.append(time.time()),
    )
    rounds = result.train_metrics_clientapp.values()
    found = {
        "marks": marks,
        "ballots": [metrics["ballots"] for metrics in rounds],
        "losses": [metrics["loss"] for metrics in rounds],
    }
    Path(str(config["out"])).write_text(json.dumps(found))
