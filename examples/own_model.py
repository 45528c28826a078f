"""Your own model and data: three workers with batches of 4, 16 and 128 learn to tell two spirals apart.

    python examples/own_model.py                 # some seconds
    python examples/own_model.py --rounds 20     # the small form

First in the simulator, `signvote.sim.train`. Then the same rounds by hand, `signvote.Worker` and `signvote.Server`
in a plain loop: this is what you carry over to real machines. Both end in the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import math
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

import signvote
from signvote.sim import Config, train
from signvote.sim.population import Sampler, split
from signvote.tasks import Data, Task

BATCH_SIZES = (4, 16, 128)


def spirals(n: int, seed: int) -> Data:
    """Points on two spirals with a little noise, and which spiral each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (n,), generator=generator)  # (n,)
    turn = torch.rand(n, generator=generator).sqrt()  # (n,), 0 at the centre, 1 at the end
    angle = 3 * math.pi * turn + math.pi * label
    points = turn[:, None] * torch.stack([angle.cos(), angle.sin()], 1)  # (n, 2)
    return Data(inputs=points + 0.02 * torch.randn(n, 2, generator=generator), labels=label)


def by_hand(task: Task, config: Config) -> dict[str, Tensor]:
    """The same run without the simulator."""
    model, sampler = task.model(), Sampler(split(task.train, 3, "shared", 0), BATCH_SIZES, 0)
    workers = [
        signvote.Worker(
            model,
            worker_id=m,
            momentum=0.9,
            decay=config.decay,
            factors=signvote.factors(model),  # biases do not decay
            batch_size=size,
        )
        for m, size in enumerate(BATCH_SIZES)
    ]  # here they share one model; on machines of their own each has a copy, and applies every decision
    server = signvote.Server(workers[0].layout, rule="weighted")
    for round in range(1, config.rounds + 1):
        ballots = {}
        for m, worker in enumerate(workers):
            batch = sampler.batch(m, round - 1)  # (B_m,) indices
            model.zero_grad()
            task.loss(model, task.batch(task.train, batch)).backward()  # type: ignore[no-untyped-call]
            ballots[m] = worker.ballot(round)  # 64 bytes of header and N / 8 of signs
        decision = server.decide(round, ballots)
        workers[0].apply(decision, step=config.step_at(round))
    return dict(model.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/own-model"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    start = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    data, test = spirals(4000, seed=1), spirals(1000, seed=2)
    task = Task(name="spirals", train=data, test=test, model=lambda: deepcopy(start))
    config = Config(
        task="spirals",
        rule="weighted",
        batch_sizes=BATCH_SIZES,
        rounds=options.rounds,
        step=1e-2,
        momentum=0.9,
    )
    result = train(config, task, options.out)

    first, *_, last = result["evaluations"]["accuracy"]
    print(f"test accuracy {first:.1%} before, {last:.1%} after {options.rounds} rounds")
    weights = ", ".join(f"{w:.2f}" for w in result["trust"]["weight"][-1])
    print(f"weights of the workers with batches of {BATCH_SIZES}: {weights}")
    trained = signvote.checkpoint.load(options.out / "checkpoint.safetensors")["model"]
    mine = by_hand(task, config)
    same = all(torch.equal(trained[name], mine[name]) for name in trained)
    print(f"the same by hand: {'equal' if same else 'NOT equal'}, bit for bit")


if __name__ == "__main__":
    main()
