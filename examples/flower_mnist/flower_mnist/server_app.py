"""The server: decides each round by the votes of whoever answered."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_mnist.task import accuracy, make_task
from signvote import Layout
from signvote.engines.flower import SignVote

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and log the test accuracy after every round."""
    task, config = make_task(), context.run_config
    torch.manual_seed(0)
    model = task.model()
    strategy = SignVote(
        Layout.of(model),
        rule=str(config["rule"]),
        step=float(config["step"]),
        momentum=float(config["momentum"]),
        local_steps=int(config["local-steps"]),
        local_rate=float(config["local-rate"]),
        min_nodes=int(config["min-nodes"]),
        min_ballots=int(config["min-ballots"]),
        checkpoint=str(config["checkpoint"]) or None,
    )

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(task, model)})

    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["deadline"]),
        evaluate_fn=evaluate,
    )
