"""What users train over DDP: whatever PyTorch allows there must vote as one worker after the other would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError, Server, Vote, Worker
from signvote.engines.ddp import VoteState, noop_hook, vote_gradients, vote_hook
from tests.ranks import together

Array = np.ndarray[Any, Any]
STEP, ROUNDS = 1e-2, 4


class Net(nn.Module):
    """Odd sizes, a frozen layer, one that only some batches use, tied weights, a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.rare, self.out = nn.Linear(7, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor, rarely: bool = False) -> Tensor:
        x = self.tied(torch.tanh(self.frozen(self.conv(x).mean((2, 3)))))
        x = self.again(torch.tanh(x))
        outputs: Tensor = self.out(self.rare(x) if rarely else x)
        return outputs


def batches(rank: int, t: int, count: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The one with a rare layer is on rank 1, in even rounds."""
    random = torch.Generator().manual_seed(100 * t + rank)
    for _ in range(count):
        yield (
            torch.randn(3, 3, 6, 6, generator=random),
            torch.randint(2, (3,), generator=random),
            (rank == 1 and t % 2 == 0),
        )


def made(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def arrays(model: nn.Module) -> list[Array]:
    """Its parameters, as they may be sent between processes."""
    return [p.detach().float().numpy() for p in model.parameters()]


def backward(net: nn.Module, rank: int, t: int, count: int, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Accumulated over `count` batches; all but the last without a vote."""
    for i, (x, y, rarely) in enumerate(batches(rank, t, count)):
        alone = i + 1 < count and isinstance(net, DistributedDataParallel)
        with net.no_sync() if alone else nullcontext():  # type: ignore[operator]
            loss = nn.functional.cross_entropy(net(x.to(dtype), rarely).float(), y)
            (loss * scale).backward()  # type: ignore[no-untyped-call]


def by_ranks(rank: int, world: int, dtype: torch.dtype, count: int, way: str) -> list[Array]:
    model = made(dtype)
    net = model if way == "function" else DistributedDataParallel(model, find_unused_parameters=True)
    groups = [
        {"params": list(model.conv.parameters())},
        {"params": [p for n, p in model.named_parameters() if "conv" not in n]},
    ]
    if way == "optimizer":
        optimizer: torch.optim.Optimizer = Vote(groups, lr=STEP, batch_size=3, chunk=64)
    else:
        optimizer = torch.optim.SGD(groups, lr=STEP)
        state = VoteState(net, "weighted", batch_size=3, chunk=64)
    if way == "hook":
        net.register_comm_hook(state, vote_hook)  # type: ignore[operator]
    for t in range(1, ROUNDS + 1):
        optimizer.zero_grad()
        backward(net, rank, t, count, dtype)
        if way == "function":
            vote_gradients(state)
        optimizer.step()
    return arrays(model)


def by_one(world: int, dtype: torch.dtype, count: int, way: str) -> list[Array]:
    """The same by `Worker` and `Server`. Only `vote_gradients` steps a layer in rounds in which nobody used it."""
    model = made(dtype)
    workers = [Worker(model, r, momentum=0.9, batch_size=3) for r in range(world)]
    server = Server(workers[0].layout, "weighted")
    for t in range(1, ROUNDS + 1):
        ballots = {}
        for rank, worker in enumerate(workers):
            model.zero_grad()
            backward(model, rank, t, count, dtype)
            ballots[rank] = worker.ballot(t)
        before = {name: p.detach().clone() for name, p in model.rare.named_parameters()}
        workers[0].apply(server.decide(t, ballots), STEP)
        if way != "function" and t % 2:
            model.rare.load_state_dict(before)
    return arrays(model)


TYPES = [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 2), (torch.float16, 1), (torch.float64, 1)]
CASES = [
    (dtype, count, way)
    for dtype, count in TYPES
    for way in ("hook", "function", "optimizer")
    if way != "optimizer" or dtype.itemsize > 2  # which steps masters in float32
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What two ranks found, each: starting them is what takes long."""
    return together(2, everything, folder=tmp_path_factory.mktemp("ranks"))


def everything(rank: int, world: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {case: by_ranks(rank, world, *case) for case in CASES}
    return found | {
        work: globals()[work](rank, world) for work in ("with_scaler", "refusals", "unsent", "in_a_group")
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models_as_they_come(case: tuple[torch.dtype, int, str], answers: list[dict[Any, Any]]) -> None:
    """Frozen and tied weights, groups of parameters, accumulated gradients, small floats, strides."""
    torch.set_num_threads(1)
    names = [n for n, _ in made(case[0]).named_parameters()]
    wanted = by_one(2, *case)
    for answer in answers:
        for name, parameter, its in zip(names, answer[case], wanted, strict=True):
            assert np.array_equal(parameter, its), name


def with_scaler(rank: int, world: int) -> tuple[list[Array], list[float], dict[int, str]]:
    """AMP on rank 0, whose scale is too large once; rank 1 trains without."""
    model = made(torch.float32)
    net = DistributedDataParallel(model, find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if rank == 0 else None
    state = VoteState(net, "weighted", batch_size=3, scaler=scaler)
    net.register_comm_hook(state, vote_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    scales: list[float] = []
    abstained: dict[int, str] = {}
    for t in range(1, ROUNDS + 1):
        optimizer.zero_grad()
        scale = float(scaler.scale(torch.ones(()))) if scaler else 1.0
        backward(net, rank, t, 1, torch.float32, torch.inf if rank == 0 and t == 2 else scale)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        scales.append(scale)
        abstained |= state.report.abstained
    return arrays(model), scales, abstained


def test_amps_scaler(answers: list[dict[Any, Any]]) -> None:
    (zero, scales, abstained), (one, _, _) = (answer["with_scaler"] for answer in answers)
    assert all(map(np.array_equal, zero, one))
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    assert abstained == {0: "non-finite gradient"}


def refusals(rank: int, world: int) -> list[str]:
    """What cannot be trained, and settings out of range."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    attempts: list[Callable[[], Any]] = [
        lambda: VoteState(sharded),
        lambda: VoteState(nn.DataParallel(nn.Linear(2, 2))),
        lambda: VoteState(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])),
        lambda: VoteState(nn.Linear(2, 2), "best"),
        lambda: VoteState(nn.Linear(2, 2), momentum=1.0),
        lambda: VoteState(nn.Linear(2, 2), timeout=0),
        lambda: VoteState(nn.Linear(2, 2), chunk=3),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_is_not_supported_is_refused_before_training(answers: list[dict[Any, Any]]) -> None:
    for said in (answer["refusals"] for answer in answers):
        wanted = ["FSDP and tensor", "DataParallel", "2 devices", "rule", "momentum", "timeout", "chunk"]
        assert len(said) == len(wanted)
        assert all(word in text for word, text in zip(wanted, said, strict=True)), said


def test_without_torch_distributed() -> None:
    with pytest.raises(ConfigError, match="call init_process_group before"):
        VoteState(nn.Linear(2, 2))


def in_a_group(rank: int, world: int) -> list[int]:
    """Each rank alone in a group of its own: nobody waits for the other."""
    groups = [dist.new_group([r]) for r in range(world)]
    model = made(torch.float32)
    state = VoteState(model, "majority", group=groups[rank])
    for t in range(1, 2 + rank):
        backward(model, rank, t, 1, torch.float32)
        vote_gradients(state)
    return [state.poll.team.voters.world, state.round]


def test_a_group_of_ones_own(answers: list[dict[Any, Any]]) -> None:
    assert [answer["in_a_group"] for answer in answers] == [[1, 1], [1, 2]]


def unsent(rank: int, world: int) -> Array:
    net = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    net.register_comm_hook(None, noop_hook)
    nn.init.ones_(net.module.weight)
    net(torch.full((1, 2), float(rank))).sum().backward()
    assert net.module.weight.grad is not None
    gradient: Array = net.module.weight.grad.numpy()
    return gradient


def test_the_noop_hook_sends_nothing(answers: list[dict[Any, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert np.array_equal(answer["unsent"], np.full((2, 2), float(rank)))
