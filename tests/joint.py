"""Small tasks, runs and crews for tests of the joint pass."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from signvote.sim import Config, Run
from signvote.sim.machine import Machine
from signvote.tasks import MODELS, Data, Task
from signvote.tasks.augment import crop_and_flip

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = [3, 1, 5, 3]
TOKENS = (5,)  # the shape of a sample that is text


def small_images() -> Task:
    """Random images that a residual network can take."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(256, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = Data(inputs=inputs, labels=torch.randint(10, (60,), generator=generator))
    numbers: dict[str, Any] = {"mean": (0.5,) * 3, "deviation": (0.25,) * 3}
    return Task(
        name="cifar10", train=data, test=data, model=lambda: MODELS["resnet20"](), augment=crop_and_flip, **numbers
    )  # fmt: skip


def small(rule: str = "weighted", **settings: Any) -> Config:
    usual: dict[str, Any] = {
        "task": "mnist-10k",
        "model": "mlp",
        "batch_sizes": (4, 32, 4, 8),
        "rounds": 12,
        "evaluate_every": 6,
    }
    return Config(rule=rule, **(usual | settings))


def finished(config: Config, task: Task, machine: Machine) -> Run:
    run = Run(config, task, machine)
    with machine.ready():
        while run.round < config.rounds:
            run.step()
    return run
