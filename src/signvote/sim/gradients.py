"""Each worker's gradient for its own batch, straight into one flat vector.

The parameters are views of one vector and their `.grad` views of another, so nothing is copied, nothing
is allocated again, and a decision is applied in one go. A large batch goes through in chunks where that
changes nothing (`Task.chunk`): small pieces stay in the cache, which on a CPU makes them faster than one
large pass. Batch norm couples the samples of a batch, so models with it see each worker's batch whole,
and its statistics stay per worker.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from signvote.core.layout import Layout, trainable
from signvote.sim.population import generator
from signvote.tasks import Task

TRUTH = 1000  # samples that batch norm sees together in the gradient of all data


class Gradients:
    """Computes gradients of one model, which all workers share, one after the other."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.parameters = trainable(model)
        self.layout = Layout.of(self.parameters)
        one = next(iter(self.parameters.values()))
        self.x = torch.empty(self.layout.size, dtype=one.dtype, device=one.device)
        self.flat = torch.zeros_like(self.x)
        for segment in self.layout.segments:
            parameter, span = self.parameters[segment.name], slice(segment.start, segment.stop)
            view = self.x[span].view(segment.shape)
            view.copy_(parameter.detach())
            parameter.data, parameter.grad = view, self.flat[span].view(segment.shape)

    def of(self, indices: Tensor, seed: tuple[int, ...], relabelled: bool = False) -> Tensor:
        """The gradient of the mean loss over these training samples: a view, valid until the next call.

        Args:
            indices: into the training data.
            seed: of the augmentation and of dropout, so that they depend on worker and round alone.
            relabelled: the labels are wrong, see `Data.wrong`.

        """
        self.flat.zero_()
        self.model.train()
        device, size = self.x.device, len(indices)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(generator(*seed, 0).initial_seed())
            draws = self.task.draw(size, generator(*seed, 1))
            self._add(indices.to(device), None if draws is None else draws.to(device), relabelled)
        return self.flat

    def _add(self, indices: Tensor, draws: Tensor | None, relabelled: bool = False) -> None:
        train, size = self.task.train, len(indices)
        inputs, labels = self.task.prepare(train.inputs[indices], draws), train.labels[indices]
        labels = train.wrong(labels) if relabelled else labels
        chunk = size if train.inputs.is_cuda else self.task.chunk or size  # chunks are for CPU caches
        for start in range(0, size, chunk):
            piece = slice(start, start + chunk)
            outputs = self.model(inputs[piece])
            share = len(outputs) / size
            (self.task.loss(outputs, labels[piece]) * share).backward()  # type: ignore[no-untyped-call]

    def true(self) -> Tensor:
        """The gradient of all training data, unchanged: a view, valid until the next call.

        Batch norm has no one answer to that: it sees TRUTH samples at a time.
        """
        self.flat.zero_()
        self.model.train()
        everything = torch.arange(len(self.task.train), device=self.x.device)
        total = torch.zeros_like(self.flat)
        for indices in torch.split(everything, TRUTH):
            self.flat.zero_()
            self._add(indices, None)
            total.add_(self.flat, alpha=len(indices) / len(self.task.train))
        return self.flat.copy_(total)


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


@torch.no_grad()
def by_class(task: Task, model: nn.Module, batch: int) -> list[float]:
    """Accuracy on the test data of each class."""
    model.eval()
    test = task.test
    pieces = [slice(start, start + batch) for start in range(0, len(test), batch)]
    right = torch.cat([model(task.prepare(test.inputs[p])).argmax(1) == test.labels[p] for p in pieces])
    count, hits = test.labels.bincount(), test.labels[right].bincount(minlength=int(test.labels.max()) + 1)
    accuracies: list[float] = (hits / count.clamp_min(1)).tolist()
    return accuracies


def sign_error(decision: Tensor, truth: Tensor) -> float:
    """Share of the decided signs that differ from the true gradient's, where both have one."""
    both = (decision != 0) & (truth != 0)
    return float(((decision != torch.sign(truth)) & both).sum() / both.sum().clamp_min(1))
