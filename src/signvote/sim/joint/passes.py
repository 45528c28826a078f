"""The gradients of all workers in one captured pass over the model, and a test in another.

The inputs of a round, such as the indices of its samples, are copied into fixed places on the device. So
the gradients of a round are one CUDA graph, and so is a test. Only `evaluate` waits for the device, because
it returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from signvote.kernels import has_triton, upload
from signvote.sim.gradients import Gradients
from signvote.sim.joint.layers import Crew, side_by_side
from signvote.sim.joint.parts import Parts
from signvote.sim.machine import Machine
from signvote.sim.population import generator
from signvote.tasks import Data, OutputLoss, Task
from signvote.tasks.metrics import finished, sums_of

TEST_SAMPLES = 2048  # at a time, about
WARM_UP = 3  # passes before a capture, as PyTorch asks for


def is_joint(task: Task) -> bool:
    """Whether a task has what the joint pass needs: tensors in memory, and a loss of each sample."""
    tensors = [
        tensor
        for data in (task.train, task.test)
        if isinstance(data, Data)
        for tensor in (data.inputs, data.labels)
        if isinstance(tensor, Tensor)
    ]
    return len(tensors) == 4 and isinstance(task.loss, OutputLoss)


def losses_of(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of each sample, from outputs and labels."""
    assert isinstance(task.loss, OutputLoss)  # see is_joint
    return task.loss.of_samples


class JointPass:
    """The gradients of a model by workers of given batch sizes. Rows are sorted by batch size, the smallest first.

    Args:
        gradients: of the model, on the GPU.
        batch_sizes: of each worker.
        machine: the GPU.
        test_batch: number of samples that batch norm sees together in a test.

    """

    def __init__(
        self,
        gradients: Gradients,
        batch_sizes: Sequence[int],
        machine: Machine,
        test_batch: int,
    ) -> None:
        self.gradients_by_one = gradients
        self.batch_sizes = tuple(batch_sizes)
        workers = range(len(batch_sizes))
        self.order = sorted(workers, key=lambda m: batch_sizes[m])  # worker of each row
        self.device = gradients.x.device
        sizes = [batch_sizes[m] for m in self.order]
        self.matrix = torch.zeros(len(sizes), gradients.layout.size, device=self.device)
        parts = Parts(sizes, self.device)
        crew = Crew(
            parts=parts,
            gradients=self.matrix,
            layout=gradients.layout,
            dtype=machine.dtype,
            triton=has_triton() and self.device.type == "cuda",
        )
        self.model = side_by_side(gradients.model, crew)
        self.samples = Samples(gradients.task, parts.samples, self.device)
        self.owner = parts.owner.long()  # row of each sample
        shares = 1 / torch.tensor(sizes, device=self.device)
        self.share = shares[self.owner]
        self._evaluation = Evaluation(gradients.task, self.model, crew, test_batch)
        self._replay: Callable[[], None] | None = None

    def restart(self, model: nn.Module) -> None:
        """Start again with the parameters of a fresh model."""
        self.gradients_by_one.model.load_state_dict(model.state_dict())

    def gradients(
        self,
        batches: Sequence[Tensor],
        seeds: Sequence[tuple[int, ...]],
        relabeled: Sequence[bool] = (),
    ) -> Tensor:
        """Start to compute all gradients, (workers, N) in rows of `order`.

        Args:
            batches: each worker's samples, indices into the training data.
            seeds: of each worker's augmentation.
            relabeled: which workers use the wrong labels of `Data.wrong`; default: none.

        """
        wrong = torch.tensor([bool(relabeled) and relabeled[m] for m in self.order])
        by_row = upload(wrong, self.device)
        self.samples.relabeled.copy_(by_row[self.owner])
        indices = torch.cat([batches[m] for m in self.order])
        self.samples.indices.copy_(upload(indices, self.device))
        self.samples.draw(
            seeds=[seeds[m] for m in self.order],
            sizes=[self.batch_sizes[m] for m in self.order],
        )
        if self._replay is None:
            self._replay = captured(self._forward_and_back, self.device)
        self._replay()
        return self.matrix

    def _forward_and_back(self) -> None:
        assert self.model is not None
        inputs, labels = self.samples.load()
        outputs = self.model(inputs)
        losses = losses_of(self.samples.task)(outputs, labels)
        total = (losses * self.share).sum()  # over workers, of each one's mean loss
        total.backward()  # type: ignore[no-untyped-call]

    def evaluate(self) -> dict[str, float]:
        """The metrics on the test data, by name, in batches of `test_batch`."""
        return self._evaluation.score()


class Samples:
    """The training samples of a round, in fixed places on the device, where a captured graph finds them."""

    def __init__(self, task: Task, count: int, device: torch.device) -> None:
        self.task = task
        self.device = device
        self.indices = torch.zeros(count, dtype=torch.int64, device=device)
        self.relabeled = torch.zeros(count, dtype=torch.bool, device=device)
        self.has_classes = task.train.classes is not None  # known before a capture, as it reads the labels
        draws = task.draw(count, torch.Generator())
        self.draws = None if draws is None else draws.to(device)

    def draw(self, seeds: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
        """Draw the augmentation of each worker's samples."""
        if self.draws is None:
            return
        drawn = []
        for seed, size in zip(seeds, sizes, strict=True):
            draws = self.task.draw(size, generator(*seed))
            assert draws is not None
            drawn.append(draws)
        together = torch.cat(drawn, 1)
        self.draws.copy_(upload(together, self.device))

    def load(self) -> tuple[Tensor, Tensor]:
        """Inputs, augmented, and labels."""
        train = self.task.train
        inputs = self.task.prepare(train.inputs[self.indices], self.draws)
        right = train.labels[self.indices]
        if not self.has_classes:  # then no attacker relabels
            return inputs, right
        wrong = train.wrong(right)
        return inputs, torch.where(self.relabeled, wrong, right)


class Evaluation:
    """The metrics of a model on the test data.

    Args:
        task: has the test data.
        model: made by `side_by_side`; None: never evaluated.
        crew: of the model. Its parts are replaced during a test.
        batch: number of samples that batch norm sees together.

    """

    def __init__(self, task: Task, model: nn.Module | None, crew: Crew, batch: int) -> None:
        self.task = task
        self.model = model
        self.crew = crew
        self.batch = batch
        self.device = crew.parts.device
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # the sum over all samples
        self.sums: dict[str, Tensor] = {}  # of the other metrics; a captured graph adds to them
        self._parts: dict[tuple[int, ...], Parts] = {}
        self._replay: Callable[[], None] | None = None

    def score(self) -> dict[str, float]:
        """The metrics on the test data, by name."""
        if self._replay is None:
            self._replay = captured(self._forward, self.device)
        self._replay()
        return finished(self.task.metrics, len(self.task.test), float(self.loss), self.sums)

    @torch.no_grad()
    def _forward(self) -> None:
        test = self.task.test
        samples = self.batch * max(1, TEST_SAMPLES // self.batch)
        training_parts = self.crew.parts
        for total in (self.loss, *self.sums.values()):
            total.zero_()
        try:
            for start in range(0, len(test), samples):
                end = start + samples
                self._add(test.inputs[start:end], test.labels[start:end])
        finally:
            self.crew.parts = training_parts

    def _add(self, inputs: Tensor, labels: Tensor) -> None:
        """Add the score of some samples, which are several batches."""
        assert self.model is not None
        starts = range(0, len(labels), self.batch)
        sizes = [min(self.batch, len(labels) - at) for at in starts]
        self.crew.parts = self._parts_of(tuple(sizes))
        outputs = self.model(self.task.prepare(inputs))
        self.loss += losses_of(self.task)(outputs, labels).sum()
        for name, summed in sums_of(self.task.metrics, len(labels), outputs, labels).items():
            if name not in self.sums:  # before a capture
                self.sums[name] = torch.zeros_like(summed)
            self.sums[name] += summed

    def _parts_of(self, sizes: tuple[int, ...]) -> Parts:
        """Kept, because a captured graph reads them."""
        if sizes not in self._parts:
            self._parts[sizes] = Parts(sizes, self.device)
        return self._parts[sizes]


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work as a CUDA graph, which is one launch. On a CPU the work is returned unchanged."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
