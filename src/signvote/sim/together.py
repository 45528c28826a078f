"""All workers at once on a GPU: gradients in one captured pass, signs in one launch, nobody waits.

What changes from round to round goes into fixed places: which samples, how they are shifted. So a round's
gradients are one CUDA graph, and so is a test. Nothing here waits for the device but `evaluate`, which is
asked for a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from signvote.core.ballot import HEADER
from signvote.core.bits import Zeros, bytes_for, coin_for
from signvote.core.vote import Votes, everywhere
from signvote.kernels import Coins, Planes, backend, download, has_triton, upload
from signvote.sim.gradients import Gradients
from signvote.sim.layers import Crew, Parts, side_by_side
from signvote.sim.machine import Machine
from signvote.sim.population import generator

TEST_SAMPLES = 2048  # at a time, about
WARM_UP = 3  # passes before a capture, as PyTorch asks for


class Together:
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
        self.average = torch.zeros_like(self.matrix)  # of the gradients: momentum
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
        self.average.zero_()

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

    # ---- votes -------------------------------------------------------------------------------------

    def votes(self, t: int, voters: Sequence[int], *, momentum: float, zeros: Zeros, run: int) -> Votes:
        """The signs of the last gradients, or of their average, of those who vote, sorted by worker."""
        rows = [self.order.index(m) for m in voters]
        everybody = rows == list(range(len(self.order)))
        at = None if everybody else upload(torch.tensor(rows, dtype=torch.int64), self.device)
        mine = self.matrix if at is None else self.matrix[at]
        if momentum:
            average = self.average if at is None else self.average[at]
            mine = torch.lerp(average, mine, 1 - momentum)
        coins = Coins.of([coin_for(zeros, run, t, m) for m in voters], self.device)
        planes, finite = backend(self.device).sign_planes(mine, coins)
        assert isinstance(finite, Tensor)
        if momentum:
            kept = torch.where(finite[:, None], mine, average)
            self.average = kept if at is None else self.average.index_copy_(0, at, kept)
        sizes = tuple(self.batch_sizes[m] for m in voters)
        return Votes(
            workers=tuple(voters), planes=planes, n=self.layout.size, batch_sizes=sizes, present=finite
        )

    def signals(self, voters: Sequence[int], averaged: bool) -> Tensor:
        """What the last votes are the signs of, (voters, N): the average if there is momentum."""
        return (self.average if averaged else self.matrix)[[self.order.index(m) for m in voters]]

    def mean(self, voters: Sequence[int]) -> Tensor:
        """The mean of the last gradients over all samples of the voters."""
        total = sum(self.batch_sizes[m] for m in voters)
        shares = torch.tensor([self.batch_sizes[m] / total if m in voters else 0.0 for m in self.order])
        return (self.matrix * upload(shares, self.device)[:, None]).sum(0)

    @property
    def averages(self) -> list[Tensor]:
        """Each worker's average."""
        return [self.average[self.order.index(m)] for m in range(len(self.order))]

    def load_averages(self, averages: Sequence[Tensor | None]) -> None:
        """Go on from these; None: from zero."""
        for row, m in enumerate(self.order):
            average = averages[m]
            self.average[row] = 0 if average is None else average.to(self.device)

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


def bytes_sent(votes: Votes, decision: Planes) -> Callable[[], tuple[int, int]]:
    """Bytes of all ballots and of all copies of the decision: those that `Ballot.cast` would write.

    A plane of who voted is sent only where somebody did not; an abstention is a header alone.
    """
    full = everywhere(votes.n, votes.planes.signs.device)

    def planes_of(planes: Planes) -> Tensor:
        one = torch.ones(len(planes.signs), dtype=torch.int64, device=full.device)
        return one if planes.support is None else one + (planes.support != full).any(1)

    up = planes_of(votes.planes)
    if votes.present is not None:
        up = up * votes.present
    arrive = download(up.sum(), planes_of(decision.map(lambda p: p[None])))

    def arrived() -> tuple[int, int]:
        sent, decided = (int(count) for count in arrive())
        plane, n = bytes_for(votes.n), len(votes.workers)
        return n * HEADER.size + sent * plane, n * (HEADER.size + decided * plane)

    return arrived
