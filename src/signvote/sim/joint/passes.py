"""The gradients of all workers in one captured pass over the model, and a test in another.

The inputs of a round, such as the indices of its samples, are copied into fixed places on the device. So
the gradients of a round are one CUDA graph, and so is a test. Only `evaluate` waits for the device, because
it returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from signvote.kernels import has_triton, upload
from signvote.sim.gradients import Gradients
from signvote.sim.joint.crew import Crew, NotTogetherError
from signvote.sim.joint.layers import SideBySide
from signvote.sim.joint.parts import Parts
from signvote.sim.machine import Machine
from signvote.sim.population import generator, seeded
from signvote.tasks import Batch, OutputLoss, Task
from signvote.tasks.data import mapped
from signvote.tasks.metrics import finished, sums_of

TEST_SAMPLES = 2048  # at a time, about
WARM_UP = 3  # passes before a capture, as PyTorch asks for
TOLERANCE = 0.1  # relative; rounding is far below, and a mistake far above


def is_joint(task: Task) -> bool:
    """Whether a task has what the joint pass needs: batches made on the device, and a loss of each sample."""
    in_memory = task.train.is_in_memory and task.test.is_in_memory
    return in_memory and isinstance(task.loss, OutputLoss)


def losses_of(task: Task, outputs: object, labels: object) -> Tensor:
    """The loss of each sample, in float32."""
    assert isinstance(task.loss, OutputLoss)  # see is_joint
    return task.loss.of_samples(mapped(_single, outputs), labels)


def _single(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() else output


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
        self.crew = Crew(
            parts=parts,
            gradients=self.matrix,
            layout=gradients.layout,
            parameters=gradients.parameters,
            dtype=machine.dtype,
            triton=has_triton() and self.device.type == "cuda",
        )
        self.model = gradients.model
        self.samples = Training(gradients.task, parts.samples, self.device)
        self.owner = parts.owner.long()  # row of each sample
        shares = 1 / torch.tensor(sizes, device=self.device)
        self.share = shares[self.owner]
        self._evaluation = Evaluation(gradients, self.crew, test_batch)
        self._replay: Callable[[], None] | None = None

    def restart(self, state: dict[str, Tensor]) -> None:
        """Start again with the parameters of a fresh model."""
        self.model.load_state_dict(state)

    def gradients(
        self,
        batches: Sequence[Tensor],
        seeds: Sequence[tuple[int, ...]],
        relabeled: Sequence[bool] = (),
    ) -> Tensor:
        """Start to compute all gradients, (workers, N) in rows of `order`.

        Args:
            batches: each worker's samples, indices into the training data.
            seeds: of each worker's augmentation; the first is that of dropout, too.
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
        seed = (*seeds[0], 2)
        if self._replay is None:
            with seeded(self.device, *seed):
                self._replay = captured(self._forward_and_back, self.device)
        with seeded(self.device, *seed):
            self._replay()
        return self.matrix

    def _forward_and_back(self) -> None:
        self.model.train()
        self._differentiate()

    def _differentiate(self) -> None:
        """Compute the gradients of all workers."""
        task = self.gradients_by_one.task
        inputs, labels = self.samples.load()
        self.crew.begin()
        with SideBySide(self.crew):
            outputs = self.model(inputs)
        losses = losses_of(task, outputs, labels)
        total = (losses * self.share).sum()  # over workers, of each one's mean loss
        total.backward()  # type: ignore[no-untyped-call]
        self.crew.finish()

    def evaluate(self) -> dict[str, float]:
        """The metrics on the test data, by name, in batches of `test_batch`."""
        return self._evaluation.score()

    # ---- can this pass train the model? ----------------------------------------------------------

    def trouble(self) -> str:
        """Why this pass cannot train the task; empty if it can.

        Compares one worker's gradient with what it computes alone, in float32 and without dropout.
        """
        dtype = self.crew.dtype
        self.crew.dtype = torch.float32
        self.model.eval()
        try:
            why = self._difference()
            if why and self.crew.is_ambiguous:
                self.crew.shares_indices = True
                why = self._difference()
            return why
        except NotTogetherError as why:
            return str(why)
        except Exception as error:  # of a model that is broken, or whose parts do not expect so many samples
            return f"its model fails on the samples of all workers: {error}".partition("\n")[0]
        finally:
            self.crew.dtype = dtype
            self.matrix.zero_()
            self.gradients_by_one.flat.zero_()

    def _difference(self) -> str:
        one = self.gradients_by_one
        count = len(self.samples.indices)
        first = torch.arange(count) % len(one.task.train)
        self.samples.indices.copy_(first)
        one.flat.zero_()
        self._differentiate()
        if one.flat.any():
            return "a parameter of its model is used in a way that this pass does not see"
        size = self.batch_sizes[self.order[0]]
        draws = self.samples.draws
        one.add(self.samples.indices[:size], None if draws is None else draws[..., :size])
        error = (self.matrix[0] - one.flat).norm()
        if error > TOLERANCE * one.flat.norm():  # not if one is not a number
            return "its model mixes samples of different workers"
        return ""


class Training:
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
        together = torch.cat(drawn, -1)
        self.draws.copy_(upload(together, self.device))

    def load(self) -> Batch:
        """Inputs, augmented, and labels."""
        train = self.task.train
        batch = self.task.batch(train, self.indices, self.draws)
        if not self.has_classes:  # then no attacker relabels
            return batch
        wrong = train.wrong(batch.labels)
        return batch._replace(labels=torch.where(self.relabeled, wrong, batch.labels))


class Evaluation:
    """The metrics of a model on the test data.

    Args:
        gradients: have the task and the model.
        crew: of the model. Its parts are replaced during a test.
        batch: number of samples that batch norm sees together.

    """

    def __init__(self, gradients: Gradients, crew: Crew, batch: int) -> None:
        self.task = gradients.task
        self.model = gradients.model
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
        self.model.eval()
        try:
            for start in range(0, len(test), samples):
                end = min(start + samples, len(test))
                self._add(torch.arange(start, end, device=self.device))
        finally:
            self.crew.parts = training_parts

    def _add(self, indices: Tensor) -> None:
        """Add the score of some samples, which are several batches."""
        count = len(indices)
        starts = range(0, count, self.batch)
        sizes = [min(self.batch, count - at) for at in starts]
        self.crew.parts = self._parts_of(tuple(sizes))
        inputs, labels = self.task.batch(self.task.test, indices)
        with SideBySide(self.crew):
            outputs = self.model(inputs)
        self.loss += losses_of(self.task, outputs, labels).sum()
        for name, summed in sums_of(self.task.metrics, count, outputs, labels).items():
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
