"""The gradients of all workers in one captured pass over the model, and a test in another.

What changes from round to round goes into fixed places: which samples, how they are shifted. So a round's
gradients are one CUDA graph, and so is a test. Nothing here waits for the device but `evaluate`, which is
asked for a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from signvote.kernels import has_triton, upload
from signvote.sim.gradients import Gradients
from signvote.sim.joint.layers import Crew, Parts, side_by_side
from signvote.sim.machine import Machine
from signvote.sim.population import generator

TEST_SAMPLES = 2048  # at a time, about
WARM_UP = 3  # passes before a capture, as PyTorch asks for


class JointPass:
    """The gradients of a model by workers of given batch sizes, the small ones first inside.

    Args:
        gradients: of the model, on the GPU.
        batch_sizes: of each worker.
        machine: the GPU.
        test_batch: samples that batch norm sees together in a test.

    """

    def __init__(
        self, gradients: Gradients, batch_sizes: Sequence[int], machine: Machine, test_batch: int
    ) -> None:
        self.gradients_by_one, self.task, self.layout = gradients, gradients.task, gradients.layout
        self.batch_sizes = tuple(batch_sizes)
        self.order = sorted(range(len(batch_sizes)), key=lambda m: batch_sizes[m])  # worker of each row
        device, sizes = gradients.x.device, [batch_sizes[m] for m in self.order]
        self.device = device
        self.matrix = torch.zeros(len(sizes), self.layout.size, device=device)
        self.parts = Parts(sizes, device)
        self.crew = Crew(
            self.parts, self.matrix, self.layout, machine.dtype, has_triton() and device.type == "cuda"
        )
        self.model = side_by_side(gradients.model, self.crew)
        self.indices = torch.zeros(self.parts.samples, dtype=torch.int64, device=device)
        self.relabelled = torch.zeros(self.parts.samples, dtype=torch.bool, device=device)
        draws = self.task.draw(self.parts.samples, torch.Generator())
        self.draws = None if draws is None else draws.to(device)
        self.share = (1 / torch.tensor(sizes, device=device))[self.parts.owner.long()]
        self.test_batch = test_batch
        self._pass: Callable[[], None] | None = None
        self._test: Callable[[], None] | None = None
        self._test_parts: dict[tuple[int, ...], Parts] = {}
        self._score = torch.zeros(2, dtype=torch.float64, device=device)  # right answers, sum of losses

    # ---- gradients ---------------------------------------------------------------------------------

    def restart(self, model: nn.Module) -> None:
        """Begin anew with the parameters of a fresh model."""
        self.gradients_by_one.model.load_state_dict(model.state_dict())

    def gradients(
        self, batches: Sequence[Tensor], seeds: Sequence[tuple[int, ...]], relabelled: Sequence[bool] = ()
    ) -> Tensor:
        """Begin to compute all gradients, (workers, N) in rows of `order`.

        Args:
            batches: each worker's samples, indices into the training data.
            seeds: of each worker's augmentation.
            relabelled: whose labels are wrong, see `Data.wrong`; default: nobody's.

        """
        wrong = torch.tensor([bool(relabelled) and relabelled[m] for m in self.order])
        self.relabelled.copy_(upload(wrong, self.device)[self.parts.owner.long()])
        self.indices.copy_(upload(torch.cat([batches[m] for m in self.order]), self.device))
        if self.draws is not None:
            draws = [self.task.draw(self.batch_sizes[m], generator(*seeds[m])) for m in self.order]
            self.draws.copy_(upload(torch.cat([d for d in draws if d is not None], 1), self.device))
        self._pass = self._pass or captured(self._forward_and_back, self.device)
        self._pass()
        return self.matrix

    def _forward_and_back(self) -> None:
        assert self.model is not None
        train = self.task.train
        inputs = self.task.prepare(train.inputs[self.indices], self.draws)
        labels = train.labels[self.indices]
        labels = torch.where(self.relabelled, train.wrong(labels), labels)
        losses = self.task.losses(self.model(inputs), labels)
        (losses * self.share).sum().backward()  # type: ignore[no-untyped-call]

    # ---- tests -------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[float, float]:
        """(accuracy, mean loss) on the test data, in batches of `test_batch`."""
        self._test = self._test or captured(self._try, self.device)
        self._test()
        right, loss = (self._score / len(self.task.test)).tolist()
        return right, loss

    @torch.no_grad()
    def _try(self) -> None:
        assert self.model is not None
        test, batch = self.task.test, self.test_batch
        step = batch * max(1, TEST_SAMPLES // batch)
        self._score.zero_()
        try:
            for start in range(0, len(test), step):
                inputs, labels = test.inputs[start : start + step], test.labels[start : start + step]
                sizes = [min(batch, len(labels) - at) for at in range(0, len(labels), batch)]
                self.crew.parts = self._parts_of(tuple(sizes))
                outputs = self.model(self.task.prepare(inputs))
                self._score[0] += (outputs.argmax(1) == labels).sum()
                self._score[1] += self.task.losses(outputs, labels).sum()
        finally:
            self.crew.parts = self.parts

    def _parts_of(self, sizes: tuple[int, ...]) -> Parts:
        """Kept, because a captured graph reads them."""
        if sizes not in self._test_parts:
            self._test_parts[sizes] = Parts(sizes, self.device)
        return self._test_parts[sizes]


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work as a CUDA graph: one launch, whatever it consists of. On a CPU it stays as it is."""
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
