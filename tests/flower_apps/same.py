"""An app that trains what the simulator trains: worker m draws the batches of the simulator's worker m."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from signvote import Layout, factors
from signvote.engines.flower import SignVote, vote
from signvote.sim import Config
from signvote.sim.population import Sampler, generator, split
from signvote.tasks import load_task

COMMON = {"task": "mnist-10k", "model": "mlp", "rounds": 10, "batch_sizes": (4, 16, 64)}
CONFIGS = [
    Config(rule="weighted", recipe="tuned", seed=1, **COMMON),  # type: ignore[arg-type]  # coins, momentum, cosine
    Config(rule="it-signsgd", recipe="paper", seed=2, options={"warmup": 5}, **COMMON),  # type: ignore[arg-type]
    Config(rule="mean", recipe="tuned", seed=3, **COMMON),  # type: ignore[arg-type]
]

client = ClientApp()
server = ServerApp()
TASK = load_task("mnist-10k", model="mlp")


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    order = message.content.config_records["signvote"]
    worker, config = int(order["worker"]), CONFIGS[int(order["run"]) - 1]  # type: ignore[arg-type]
    sampler = Sampler(
        split(TASK.train, config.workers, config.split, config.seed), config.batch_sizes, config.seed
    )
    model = TASK.model()

    def loss(step: int) -> Tensor:
        batch = sampler.batch(worker, step)
        return TASK.loss(model, TASK.batch(TASK.train, batch))

    return vote(message, context, model, loss)


@server.main()
def main(grid: Grid, context: Context) -> None:
    for config in CONFIGS:
        torch.manual_seed(generator(config.seed, 0).initial_seed())
        model = TASK.model()
        strategy = SignVote(
            Layout.of(model),
            config.rule,
            step=config.step_at,
            momentum=config.momentum or 0.0,
            zeros=config.zeros or "coin",
            decay=config.decay,
            factors=factors(model, decays=config.decays),
            run=config.seed,
            min_available_nodes=config.workers,
            min_ballots=config.workers,
            checkpoint=Path(str(context.run_config["out"])) / f"{config.rule}.safetensors",
            **config.options,
        )
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=config.rounds)
