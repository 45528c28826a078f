"""Milliseconds of a simulated round of a transformer on a GPU, beside other ways to get the same gradients.

    python -m benchmarks.gpu_transformers                        # gpt-small, bf16

    step          what everybody writes: forward, backward and AdamW on all sequences of a round as one batch
    captured      the same step as a CUDA graph
    round         signvote's: from drawing the sequences to the applied decision, all workers in one pass
    vmap          the workers' gradients by torch.func.vmap, workers with equal batches together
    one by one    the workers' gradients by one backward pass after another

`step` and `captured` have one gradient, the others one for each worker. All are measured in one run, over many rounds
between two looks at the clock, in bf16 (autocast where it is not ours). The text is random, which costs the same as
real text. Writes benchmarks/gpu_transformers.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.gpu_rounds import milliseconds
from signvote.sim import Config, Run
from signvote.sim.joint.passes import captured
from signvote.sim.machine import Machine
from signvote.tasks import Task
from signvote.tasks.gpt import GPTS
from signvote.tasks.losses import token_cross_entropy
from signvote.tasks.text import Windows

POPULATIONS = {
    "8 x 8": [8] * 8,
    "7 x 1 + 57": [1] * 7 + [57],
    "15 x 4": [4] * 15,
    "14 x 1 + 46": [1] * 14 + [46],
}
RULES = ("majority", "weighted")
WARM_UP = 5


def made_up(model: str) -> Task:
    """Random text."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (2_000_000,), generator=generator, dtype=torch.uint8)
    make = GPTS[model]
    context: int = make.keywords["context"]
    windows = Windows(text, context)
    return Task(name="random", train=windows, test=windows, model=make, loss=token_cross_entropy)


def batch_of(task: Task, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Some sequences on the device."""
    batch = task.batch(task.train, torch.arange(samples))
    return batch.inputs.to(device), batch.labels.to(device)


def loss_of(model: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss, in bf16."""
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(inputs)
    return token_cross_entropy.of(outputs.float(), labels)


def ordinary(task: Task, samples: int, device: torch.device) -> Callable[[], None]:
    """A training step with the samples as one batch."""
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    inputs, labels = batch_of(task, samples, device)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def by_vmap(task: Task, sizes: Sequence[int], device: torch.device) -> Callable[[], None]:
    """The gradients of all workers, those of equal batches at once."""
    model = task.model().to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    inputs, labels = batch_of(task, sum(sizes), device)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(lambda z: functional_call(model, weights, (z,)), x, y)

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def gradients() -> None:
        start = 0
        for size, alike in groupby(sizes):
            count = len(list(alike))
            rows = slice(start, start + count * size)
            each(parameters, inputs[rows].view(count, size, -1), labels[rows].view(count, size, -1))
            start = rows.stop

    return gradients


def one_by_one(task: Task, sizes: Sequence[int], device: torch.device) -> Callable[[], None]:
    """The gradients of all workers, one after the other."""
    model: nn.Module = task.model().to(device)
    inputs, labels = batch_of(task, sum(sizes), device)

    def gradients() -> None:
        parts = zip(torch.split(inputs, list(sizes)), torch.split(labels, list(sizes)), strict=True)
        for x, y in parts:
            model.zero_grad()
            loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]

    return gradients


def rounds(task: Task, sizes: Sequence[int], rule: str, machine: Machine) -> Callable[[], None]:
    """A round of the simulator."""
    config = Config(task=task.name, rule=rule, batch_sizes=tuple(sizes), rounds=10**6, evaluate_every=10**6)
    return Run(config, task, machine).step


def measured(work: Callable[[], Callable[[], None]], times: int) -> float | None:
    """Milliseconds, the least of three blocks; None if it does not run."""
    try:
        doing = work()
        milliseconds(doing, WARM_UP)
        return min(milliseconds(doing, times) for _ in range(3))
    except RuntimeError as error:
        print(f"does not run: {str(error).splitlines()[0]}")
        return None


def measure(task: Task, machine: Machine, times: int) -> list[dict[str, Any]]:
    """A row for each population."""
    device = machine.torch_device
    rows = []
    for name, sizes in POPULATIONS.items():
        samples = sum(sizes)
        step = partial(ordinary, task, samples, device)
        ways: dict[str, Callable[[], Callable[[], None]]] = {
            "step": step,
            "captured": lambda step=step: captured(step(), device),  # type: ignore[misc]
            **{f"round, {rule}": partial(rounds, task, sizes, rule, machine) for rule in RULES},
            "vmap": partial(by_vmap, task, sizes, device),
            "one by one": partial(one_by_one, task, sizes, device),
        }
        with machine.ready():
            took = {way: measured(work, times) for way, work in ways.items()}
        rows.append({"population": name, **machine.named(), "milliseconds": took})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=30, help="rounds between two looks at the clock")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    machine = Machine(device=options.device, precision="bf16")
    rows = measure(made_up(options.model), machine, options.times)
    ways = list(rows[0]["milliseconds"])
    table = Table(title=f"Milliseconds, {options.model}, {rows[0]['device']}; in brackets: of a step")
    table.add_column("sequences")
    for way in ways:
        table.add_column(way, justify="right")
    for row in rows:
        took = row["milliseconds"]
        words = [
            "-" if took[way] is None else f"{took[way]:.2f} ({took[way] / took['step']:.2f})" for way in ways
        ]
        table.add_row(row["population"], *words)
    Console(width=140).print(table)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
