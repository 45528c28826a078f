"""What is trained, and on whose data: replace this file by your own."""

from functools import cache

import torch
from torch import Tensor, nn

from signvote.tasks import Task, load_task

BATCH_SIZES = (4, 16, 64, 256)  # nodes are unequal: node i takes the i-th of these, in turn


@cache
def make_task() -> Task:
    """10,000 images of MNIST, which come with signvote, and a small network."""
    return load_task("mnist-10k", model="mlp")


def batch_size(partition: int) -> int:
    """How many samples a node takes per step."""
    return BATCH_SIZES[partition % len(BATCH_SIZES)]


def batch(task: Task, partition: int, partitions: int) -> tuple[Tensor, Tensor]:
    """Random samples of the node's own part of the training data; `vote` has seeded torch for the round."""
    own = torch.arange(partition, len(task.train), partitions)
    chosen = own[torch.randint(len(own), (batch_size(partition),))]
    return task.prepare(task.train.inputs[chosen]), task.train.labels[chosen]


@torch.no_grad()
def accuracy(task: Task, model: nn.Module) -> float:
    """Share of the test images that the model gets right."""
    guesses = model(task.prepare(task.test.inputs)).argmax(1)
    return float((guesses == task.test.labels).float().mean())
