"""Milliseconds of a simulated round on a GPU, beside one ordinary training step on as many samples.

    python -m benchmarks.gpu_rounds                              # MNIST CNN, ResNet-20, ResNet-56; modes 1 to 4
    python -m benchmarks.gpu_rounds --models resnet56 --precisions bf16

`step` is what everybody writes: forward, backward and SGD on all samples of a round as one batch, channels
last, in the same precision (bf16: autocast). A round is everything from drawing samples to applied decision,
measured over many rounds between two looks at the clock. All numbers of a model come from one run; images
are random, which costs the same as real ones. Writes benchmarks/gpu_rounds.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from signvote.sim import Config, Run
from signvote.sim.machine import Machine
from signvote.sim.setup import Workshop
from signvote.tasks import MODELS, Data, Task
from signvote.tasks.load import SPECS

CASES = (("majority", "paper"), ("it-signsgd", "paper"), ("weighted", "paper"), ("weighted", "tuned"))
TASK_OF = {"mnist-cnn": "mnist", "resnet20": "cifar10", "resnet56": "cifar10"}


def made_up(model: str) -> Task:
    """The task of a model with random images."""
    name = TASK_OF[model]
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)

    def data(n: int) -> Data:
        images = torch.randint(256, (n, *spec.shape), generator=generator, dtype=torch.uint8)
        return Data(inputs=images, labels=torch.randint(10, (n,), generator=generator))

    settings: dict[str, Any] = {"mean": spec.mean, "deviation": spec.deviation, "augment": spec.augment}
    return Task(name=name, train=data(50_000), test=data(10_000), model=MODELS[model], **settings)


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Of one, when so many follow each other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3


def ordinary(task: Task, samples: int, machine: Machine, times: int) -> float:
    """Milliseconds of one training step with the samples as one batch."""
    device = machine.torch_device
    model = task.model().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = task.prepare(task.train.inputs[:samples].to(device))
    labels = task.train.labels[:samples].to(device)
    bf16 = machine.precision == "bf16"

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with machine.ready():
        milliseconds(step, 5)
        return min(milliseconds(step, times) for _ in range(3))


def measure(model: str, machine: Machine, modes: list[int], seconds: float) -> list[dict[str, Any]]:
    """A row for each mode and rule; about so many seconds each."""
    task, rows = made_up(model), []
    step = ordinary(task, 960, machine, 20)
    for mode in modes:
        workshop: Workshop = {}
        for rule, recipe in CASES:
            options = {"warmup": 0} if rule == "it-signsgd" else {}
            settings: dict[str, Any] = {"mode": mode, "recipe": recipe, "options": options}
            config = Config(task=task.name, rule=rule, rounds=10**6, evaluate_every=10**6, **settings)
            run = Run(config, task, machine, workshop)
            with machine.ready():
                milliseconds(run.step, 5)  # captures, compiles
                each = max(5, math.ceil(seconds / 3 * 1e3 / milliseconds(run.step, 20)))
                took = min(milliseconds(run.step, each) for _ in range(3))
            what = {"model": model, "mode": mode, "rule": rule, "recipe": recipe, **machine.named()}
            rows.append({**what, "round_ms": took, "step_ms": step})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(TASK_OF), choices=list(TASK_OF))
    parser.add_argument("--modes", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    console, rows = Console(width=110), []
    for model in options.models:
        for precision in options.precisions:
            machine = Machine(device=options.device, precision=precision)
            rows += measure(model, machine, options.modes, options.seconds)
    table = Table(title=f"Milliseconds a round, 15 workers, 960 samples, {rows[0]['device']}")
    for heading in ("model", "precision", "mode", "rule", "recipe", "round", "ordinary step", "ratio"):
        table.add_column(heading, justify="left" if heading in ("model", "rule", "recipe") else "right")
    for row in rows:
        words = (row["model"], row["precision"], str(row["mode"]), row["rule"], row["recipe"])
        numbers = row["round_ms"], row["step_ms"], row["round_ms"] / row["step_ms"]
        table.add_row(*words, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
