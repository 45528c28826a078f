"""What the hosts of `network.py` train, and how: the methods, and one host with its models."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from signvote.engines.ddp import Vote, VoteState, noop_hook, vote_hook
from signvote.sim.gradients import evaluate
from signvote.sim.population import Sampler, split
from signvote.tasks import load_task

HOSTS = 4
WIDTHS = {
    "small": (784, 2048, 1536, 512, 10),  # 5,547,018 parameters
    "large": (784, 4096, 4096, 1280, 10),  # 25,253,642
}
BATCH = 32  # of each host
SGD_RATES: tuple[float, ...] = (0.05, 0.1, 0.02)  # to try, with momentum
VOTE_RATES: tuple[float, ...] = (3e-4, 1e-4, 1e-3)
RATES: dict[str, tuple[float, ...]] = {  # of each method; without any its accuracy by step is not measured
    "float32": SGD_RATES,
    "fp16": SGD_RATES,
    "powersgd-1": SGD_RATES,
    "powersgd-4": SGD_RATES,
    "weighted": VOTE_RATES,
    "majority": VOTE_RATES,
    "vote": (),
    "vote-overlap": (),
    "noop": (),  # sends nothing: how fast a step could be; every host trains by itself
}
CURVES = dict.fromkeys(("vote", "vote-overlap"), "weighted")  # whose accuracy by step these have
MOMENTUM = 0.9

# ---- methods -----------------------------------------------------------------------------------------

Made = tuple[DistributedDataParallel, Optimizer]


def float32(model: nn.Module, rate: float, seed: int) -> Made:
    ddp = DistributedDataParallel(model)
    return ddp, SGD(ddp.parameters(), lr=rate, momentum=MOMENTUM)


def fp16(model: nn.Module, rate: float, seed: int) -> Made:
    ddp, optimizer = float32(model, rate, seed)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp, optimizer


def powersgd(model: nn.Module, rate: float, seed: int, *, rank: int) -> Made:
    """In one bucket: with several, callbacks start collectives in different orders on different ranks, and gloo ends
    the process.
    """
    ddp = DistributedDataParallel(model, bucket_cap_mb=200)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, SGD(ddp.parameters(), lr=rate, momentum=MOMENTUM)


def hook(model: nn.Module, rate: float, seed: int, *, rule: str) -> Made:
    """Votes have the momentum, so SGD has none."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(VoteState(ddp, rule=rule, momentum=MOMENTUM, run=seed), vote_hook)
    return ddp, SGD(ddp.parameters(), lr=rate)


def vote(model: nn.Module, rate: float, seed: int, *, overlap: bool) -> Made:
    ddp = DistributedDataParallel(model)
    return ddp, Vote(ddp.parameters(), rate, MOMENTUM, run=seed, overlap=overlap)


def noop(model: nn.Module, rate: float, seed: int) -> Made:
    ddp, optimizer = float32(model, rate, seed)
    ddp.register_comm_hook(None, noop_hook)
    return ddp, optimizer


METHODS: dict[str, Callable[[nn.Module, float, int], Made]] = {
    "float32": float32,
    "fp16": fp16,
    "powersgd-1": partial(powersgd, rank=1),
    "powersgd-4": partial(powersgd, rank=4),
    "weighted": partial(hook, rule="weighted"),
    "majority": partial(hook, rule="majority"),
    "vote": partial(vote, overlap=False),
    "vote-overlap": partial(vote, overlap=True),
    "noop": noop,
}

# ---- a host ------------------------------------------------------------------------------------------


class Host:
    """One rank. It may hold several models, one for each method."""

    def __init__(self, rank: int, task: str, data_dir: Path | None, widths: tuple[int, ...]) -> None:
        self.rank, self.task = rank, load_task(task, data_dir)
        self.widths = widths
        self.models: dict[str, tuple[DistributedDataParallel, Optimizer, Sampler]] = {}
        self.steps: dict[str, int] = {}

    def make(self, method: str, rate: float, seed: int) -> None:
        """A fresh model and what a training script adds for the method."""
        self.models.pop(method, None)
        gc.collect()
        torch.manual_seed(seed)
        layers = [layer for sizes in pairwise(self.widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        ddp, optimizer = METHODS[method](nn.Sequential(nn.Flatten(), *layers[:-1]), rate, seed)
        parts = split(self.task.train, HOSTS, "iid", seed)
        self.models[method] = ddp, optimizer, Sampler(parts, [BATCH] * HOSTS, seed)
        self.steps[method] = 0

    def train(self, method: str, count: int) -> dict[str, Any]:
        """Some steps: seconds of each, and what went through the interface meanwhile."""
        ddp, optimizer, sampler = self.models[method]
        train, seconds, before = self.task.train, [], traffic()
        for _ in range(count):
            start = time.perf_counter()
            indices = sampler.batch(self.rank, self.steps[method])
            optimizer.zero_grad()
            self.task.loss(ddp, self.task.batch(train, indices)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            self.steps[method] += 1
            seconds.append(time.perf_counter() - start)
        down, up = (after - was for after, was in zip(traffic(), before, strict=True))
        return {"seconds": seconds, "up": up, "down": down}

    def accuracy(self, method: str) -> float:
        """On the test data; the first rank's alone."""
        if self.rank:
            return 0.0
        model = self.models[method][0]
        right = evaluate(self.task, model.module, 500)["accuracy"]
        model.train()  # type: ignore[no-untyped-call]
        return right


def traffic() -> tuple[int, int]:
    """Bytes that came in and went out through eth0, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()
    return int(counts[0]), int(counts[8])
