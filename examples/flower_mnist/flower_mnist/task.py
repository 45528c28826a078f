"""What is trained, and on whose data: replace this file by your own."""

import torch
from torch import Tensor, nn

from signvote.tasks import Task, load_task

BATCH_SIZES = (4, 16, 64, 256)  # nodes are unequal: node i takes the i-th of these, in turn


def make_task() -> Task:
    """10,000 images of MNIST, which come with signvote, and a small network."""
    return load_task("mnist-10k", model="mlp")


def batch(task: Task, partition: int, partitions: int, step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: random samples of the node's own part of the training data."""
    own = torch.arange(partition, len(task.train), partitions)
    size = min(BATCH_SIZES[partition % len(BATCH_SIZES)], len(own))
    chosen = own[torch.randint(len(own), (size,))]
    return task.prepare(task.train.inputs[chosen]), task.train.labels[chosen]


@torch.no_grad()
def accuracy(task: Task, model: nn.Module) -> float:
    """Share of the test images that the model gets right."""
    guesses = model(task.prepare(task.test.inputs)).argmax(1)
    return float((guesses == task.test.labels).float().mean())
