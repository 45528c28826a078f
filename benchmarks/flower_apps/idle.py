"""Nothing is computed and nothing is sent: what a round of Flower itself takes."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    times: list[float] = []
    FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3).start(
        grid,
        ArrayRecord([np.zeros(1, np.float32)]),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=lambda t, arrays: times.append(time.time()),
    )
    Path(str(context.run_config["out"])).write_text(json.dumps(times))
