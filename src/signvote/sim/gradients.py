"""Each worker's gradient for its own batch, straight into one flat vector.

The parameters' `.grad` are views of that vector, so nothing is copied and nothing is allocated again.
A large batch goes through in chunks where that changes nothing (`Task.chunk`): small pieces stay in the
cache, which on a CPU makes them faster than one large pass. Batch norm couples the samples of a batch,
so models with it see each worker's batch whole, and its statistics stay per worker.

Gradients are computed on one thread: how torch splits a convolution's sums among threads changes their
last bits, and a run must not depend on how many cores there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from signvote.core.layout import Layout, trainable
from signvote.sim.population import generator
from signvote.tasks import Task


class Gradients:
    """Computes gradients of one model, which all workers share."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.parameters = trainable(model)
        self.layout = Layout.of(self.parameters)
        self.flat = torch.zeros(self.layout.size, dtype=next(iter(self.parameters.values())).dtype)
        for segment in self.layout.segments:
            view = self.flat[segment.start : segment.stop].view(segment.shape)
            self.parameters[segment.name].grad = view

    def of(self, indices: Tensor, seed: tuple[int, ...]) -> Tensor:
        """The gradient of the mean loss over these training samples: a view, valid until the next call.

        Args:
            indices: into the training data.
            seed: of the augmentation and of dropout, so that they depend on worker and round alone.

        """
        self.flat.zero_()
        self.model.train()
        train, size = self.task.train, len(indices)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(*seed, 0).initial_seed())
            inputs = self.task.prepare(train.inputs[indices], generator(*seed, 1))
            labels = train.labels[indices]
            for start in range(0, size, self.task.chunk or size):
                piece = slice(start, start + (self.task.chunk or size))
                outputs = self.model(inputs[piece])
                share = len(outputs) / size
                (self.task.loss(outputs, labels[piece]) * share).backward()  # type: ignore[no-untyped-call]
        return self.flat


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, batch: int) -> tuple[float, float]:
    """(accuracy, mean loss) on the test data; batch norm without running statistics sees `batch` samples."""
    model.eval()
    right, loss = 0, 0.0
    for start in range(0, len(task.test), batch):
        piece = slice(start, start + batch)
        labels = task.test.labels[piece]
        outputs = model(task.prepare(task.test.inputs[piece]))
        right += int((outputs.argmax(1) == labels).sum())
        loss += float(task.loss(outputs, labels)) * len(labels)
    return right / len(task.test), loss / len(task.test)
