"""The gradient of each worker on its own batch, computed into one flat vector.

The parameters are views of one vector and their `.grad` are views of another. So nothing is copied or allocated
again, and a decision is applied in one operation. A large batch is split into chunks if the model allows it
(`Task.samples_per_pass`): few samples stay in the CPU cache and are faster than one large pass. Batch norm couples the
samples of a batch, so models with batch norm process each worker's batch whole, with statistics per worker.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from signvote.core.layout import Layout, trainable
from signvote.sim.population import generator, seeded
from signvote.tasks import Batch, Data, OutputLoss, Task
from signvote.tasks.metrics import Score, need_outputs, right

TRUTH = 1000  # samples per batch of batch norm in the gradient of all data


class Gradients:
    """Computes the gradients of all workers one by one, with one model that they share."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self.parameters = trainable(model)
        self.layout = Layout.of(self.parameters)
        first = next(iter(self.parameters.values()))
        self.x = torch.empty(
            self.layout.size,
            dtype=first.dtype,
            device=first.device,
        )
        self.flat = torch.zeros_like(self.x)
        for segment in self.layout.segments:
            span = slice(segment.start, segment.stop)
            parameter = self.parameters[segment.name]
            view = self.x[span].view(segment.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            gradient = self.flat[span]
            parameter.grad = gradient.view(segment.shape)

    def of(self, indices: Tensor, seed: tuple[int, ...], relabeled: bool = False) -> Tensor:
        """The gradient of the mean loss over some training samples: a view, valid until the next call.

        Args:
            indices: indices into the training data.
            seed: seed of augmentation and dropout, which depend on nothing but worker and round.
            relabeled: use the wrong labels of `Data.wrong`.

        """
        self.flat.zero_()
        self.model.train()
        device = self.x.device
        with seeded(device, *seed, 0):
            augmentation = generator(*seed, 1)
            draws = self.task.draw(len(indices), augmentation)
            if draws is not None:
                draws = draws.to(device)
            self.add(indices.to(device), draws, relabeled)
        return self.flat

    def add(self, indices: Tensor, draws: Tensor | None, relabeled: bool = False) -> None:
        """Add the gradient of the mean loss over some training samples to `flat`."""
        task = self.task
        batch = task.batch(task.train, indices, draws)
        if relabeled:
            batch = batch._replace(labels=task.train.wrong(batch.labels))
        size = len(indices)
        samples = task.samples_per_pass or size
        if self.x.is_cuda:  # has no cache to fit into
            samples = size
        for start in range(0, size, samples):
            piece = slice(start, start + samples)
            share = len(range(size)[piece]) / size
            loss = task.loss(self.model, batch.mapped(lambda tensor, piece=piece: tensor[piece]))  # type: ignore[misc]
            loss = loss * share
            loss.backward()  # type: ignore[no-untyped-call]

    def true(self) -> Tensor:
        """The gradient of all training data without augmentation: a view, valid until the next call.

        With batch norm it depends on the batches: they have TRUTH samples.
        """
        self.flat.zero_()
        self.model.train()
        samples = len(self.task.train)
        everything = torch.arange(samples, device=self.x.device)
        total = torch.zeros_like(self.flat)
        for indices in torch.split(everything, TRUTH):
            self.flat.zero_()
            self.add(indices, None)
            total.add_(self.flat, alpha=len(indices) / samples)
        return self.flat.copy_(total)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, batch: int) -> dict[str, float]:
    """The metrics on the test data, by name. Batch norm without running statistics uses `batch` samples."""
    model.eval()
    score = Score(task.metrics)
    of_outputs = task.loss if isinstance(task.loss, OutputLoss) else None
    for size, piece in _tested(task, batch):
        outputs = None
        if of_outputs is not None or need_outputs(task.metrics):
            outputs = model(piece.inputs)
        loss = task.loss(model, piece) if of_outputs is None else of_outputs.of(outputs, piece.labels)
        score.add(size, float(loss), outputs, piece.labels)
    return score.result()


@torch.no_grad()
def by_class(task: Task, model: nn.Module, batch: int) -> list[float]:
    """The accuracy on the test data of each class; empty if the task measures no accuracy of classes."""
    labels = task.test.classes if isinstance(task.test, Data) else None
    has_accuracy = any(metric.values is right for metric in task.metrics)
    if labels is None or not has_accuracy:
        return []
    model.eval()
    guesses = []
    for _, piece in _tested(task, batch):
        outputs = model(piece.inputs)
        guesses.append(outputs.argmax(1))
    hit = labels[torch.cat(guesses) == labels]
    count = labels.bincount()
    hits = hit.bincount(minlength=len(count))
    shares = hits / count.clamp_min(1)
    accuracies: list[float] = shares.tolist()
    return accuracies


def _tested(task: Task, batch: int) -> Iterator[tuple[int, Batch]]:
    """The test data, batch by batch, each with its number of samples."""
    samples = len(task.test)
    for start in range(0, samples, batch):
        indices = torch.arange(start, min(start + batch, samples))
        yield len(indices), task.batch(task.test, indices)


def sign_error(decision: Tensor, truth: Tensor) -> float:
    """The share of decided signs that differ from the true gradient's, among coordinates where both have one."""
    true_signs = torch.sign(truth)
    both = (decision != 0) & (truth != 0)
    wrong = (decision != true_signs) & both
    compared = both.sum().clamp_min(1)
    return float(wrong.sum() / compared)
