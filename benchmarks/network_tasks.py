"""What the hosts of `network.py` train: a model, data, a metric to reach, and an ordinary optimizer for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.network_hosts import HOSTS
from signvote.sim.gradients import evaluate
from signvote.sim.population import Sampler, generator, split
from signvote.tasks import Batch, Samples, load_task
from signvote.tasks.text import Windows

TESTED = 256  # sequences of the text's test


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A task of the benchmark.

    Args:
        task: its name in signvote.
        widths: of a perceptron's layers; none: the task's own model.
        batch: samples of a host in a step.
        metric: measured on the test data, by rank 0.
        more_is_better: whether the target is reached from below.
        ramp: steps in which the learning rate rises.
        every: steps between two measurements, unless a method's rounds are longer.
        first: step of the first one: no method is that fast.
        patience: steps after which a run is given up.
        target: of the metric.
        inner: the ordinary optimizer.

    """

    task: str
    widths: tuple[int, ...] = ()
    batch: int
    metric: str
    more_is_better: bool
    ramp: int
    every: int
    first: int
    patience: int
    target: float
    inner: Callable[[Iterable[Tensor], float], Optimizer]

    def is_reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return value >= target if self.more_is_better else value <= target


def sgd(parameters: Iterable[Tensor], rate: float) -> Optimizer:
    return SGD(parameters, lr=rate, momentum=0.9)


def adamw(parameters: Iterable[Tensor], rate: float) -> Optimizer:
    return AdamW(parameters, lr=rate)


perceptron = partial(
    Goal,
    task="mnist-10k",
    batch=32,
    metric="accuracy",
    more_is_better=True,
    ramp=0,
    every=8,
    first=40,
    patience=320,
    target=0.94,
    inner=sgd,
)
GOALS = {
    "mnist": perceptron(widths=(784, 2048, 1536, 512, 10)),  # 5,547,018 parameters
    "mnist-large": perceptron(widths=(784, 4096, 4096, 1280, 10)),  # 25,253,642
    "gpt": Goal(
        task="python-source",  # and gpt-tiny, 119,104 parameters
        batch=8,
        metric="loss",
        more_is_better=False,
        ramp=30,
        every=16,
        first=160,
        patience=800,
        target=2.145,  # what AdamW reaches in 300 steps
        inner=adamw,
    ),
}


class Training:
    """One host's task, from which it makes any number of models."""

    def __init__(self, goal: Goal, data_dir: Path | None) -> None:
        self.goal = goal
        self.task = load_task(goal.task, data_dir)
        test = self.task.test
        if isinstance(test, Windows):
            self.tested: Samples = Windows(test.text, test.length, TESTED)
        else:
            self.tested = test

    def model(self, seed: int) -> nn.Module:
        """A new model, the same on all hosts."""
        torch.manual_seed(seed)
        if not self.goal.widths:
            return self.task.model()
        layers = [layer for sizes in pairwise(self.goal.widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers[:-1])

    def sampler(self, seed: int) -> Sampler:
        """The samples of all hosts."""
        parts = split(self.task.train, HOSTS, "iid", seed)
        return Sampler(parts, [self.goal.batch] * HOSTS, seed)

    def batch(self, sampler: Sampler, rank: int, step: int, seed: int) -> Batch:
        """A host's batch in a step."""
        indices = sampler.batch(rank, step)
        draws = self.task.draw(len(indices), generator(seed, rank, step))
        return self.task.batch(self.task.train, indices, draws)

    def measure(self, model: nn.Module) -> float:
        """The metric on the test data."""
        task = replace(self.task, test=self.tested)
        value = evaluate(task, model, 500 if self.goal.widths else 64)[self.goal.metric]
        model.train()
        return value
