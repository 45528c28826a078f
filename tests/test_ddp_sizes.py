"""Ranks declare the sizes of their batches by themselves: the script passes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError
from signvote.engines.ddp import Balancer, VoteState, copy_from_majority, vote_gradients, vote_hook
from signvote.errors import EngineError
from tests.ranks import alone, checksum, config, simulated, together, trained

__all__ = ["alone"]  # a fixture

Sizes = list[tuple[int, ...]]  # that the ranks declared, by round


class Net(nn.Module):
    """Can be called in many ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 3)

    def forward(self, batch: Any = None, **named: Any) -> Tensor:
        while isinstance(batch, dict | list | tuple):
            batch = batch["x"] if isinstance(batch, dict) else batch[-1]
        outputs: Tensor = self.last(named["x"] if batch is None else batch)
        return outputs


def rows(size: int) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


class Script:
    """A user's training script, with or without DDP."""

    def __init__(self, over_ddp: bool, **settings: Any) -> None:
        self.model = Net()
        self.net: nn.Module = DistributedDataParallel(self.model) if over_ddp else self.model
        self.state = VoteState(self.net, "weighted", **settings)
        self.register()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2**-8)

    def register(self) -> None:
        if isinstance(self.net, DistributedDataParallel):
            self.net.register_comm_hook(self.state, vote_hook)

    def step(self, *losses: Callable[[], Tensor]) -> tuple[int, ...]:
        """A round over accumulated losses; returns the sizes that the ranks declared."""
        self.optimizer.zero_grad()
        for i, loss in enumerate(losses, start=1):
            is_last = i == len(losses)
            over_ddp = isinstance(self.net, DistributedDataParallel)
            with self.net.no_sync() if over_ddp and not is_last else nullcontext():  # type: ignore[operator]
                loss().backward()  # type: ignore[no-untyped-call]
        if self.net is self.model:
            vote_gradients(self.state)
        self.optimizer.step()
        return self.state.batch_sizes

    def on(self, *sizes: int) -> tuple[int, ...]:
        """A round on batches of these sizes."""
        return self.step(*(partial(self.loss, rows(size)) for size in sizes))

    def loss(self, *args: Any, **named: Any) -> Tensor:
        outputs: Tensor = self.net(*args, **named)
        return outputs.square().mean()


# ---- what ranks do, in real processes ----------------------------------------------------------------


def unequal(rank: int, over_ddp: bool) -> Sizes:
    """Unequal batches; in the last round, rank 1 has fewer samples left."""
    script = Script(over_ddp)
    full = 4 * (rank + 1)
    return [script.on(full), script.on(full), script.on(3 if rank == 1 else full)]


def accumulated(rank: int, over_ddp: bool) -> Sizes:
    script = Script(over_ddp)
    return [script.on(8, 8, 2 + rank), script.on(5)]


def evaluated(rank: int, over_ddp: bool) -> Sizes:
    """Passes in evaluation mode or without gradients lie between the rounds."""
    script = Script(over_ddp)
    found = []
    for t in range(2):
        with torch.no_grad():
            script.net(rows(100))
        script.net.eval()
        script.net(rows(100))
        script.model(rows(100))
        script.net.train()
        found.append(script.on(6 + rank + t))
    return found


def called(rank: int, over_ddp: bool) -> Sizes:
    """However the batch is passed."""
    script = Script(over_ddp)
    x = rows(7 + rank)
    ways = [partial(script.loss, x=x), partial(script.loss, {"x": x}), partial(script.loss, [["a text", x]])]
    return [script.step(way) for way in ways]


def explicit(rank: int, over_ddp: bool) -> Sizes:
    """A size that the script gives wins: on one rank, on all; 0 declares nothing; None again counts."""
    script = Script(over_ddp, batch_size=50 if rank == 0 else None)
    found = [script.on(4)]
    for batch_size in (60 + rank, 0, None):
        script.state.batch_size = batch_size
        found.append(script.on(4))
    return found


def unknown(rank: int) -> Sizes:
    """In the first round rank 1 calls a part of its model, so that no batch passes through the whole."""
    script = Script(over_ddp=False)
    called = script.model.last if rank == 1 else script.net
    return [script.step(lambda: called(rows(4)).square().mean()), script.on(4)]


def balanced(rank: int, over_ddp: bool) -> Sizes:
    """The balancer's plan is the sampler's: it is declared, unless the script gives a size."""
    script = Script(over_ddp, balancer=Balancer(total=9, world=2, every=0, sizes=(2, 7)))
    found = [script.on(2 if rank == 0 else 7)]
    script.state.batch_size = 30 + rank
    return [*found, script.on(4)]


def repeated(rank: int, over_ddp: bool) -> Sizes:
    """A step that failed, because rank 1 had drifted, is repeated: its samples count once."""
    script = Script(over_ddp, check_every=2)
    found = [script.on(4 + rank)]
    if rank == 1:
        script.model.last.bias.data += 1
    with pytest.raises(EngineError, match="different parameters"):
        script.on(4 + rank)
    copy_from_majority(script.state, script.model, source=0)
    if over_ddp:
        script.net = DistributedDataParallel(script.model)
        script.register()
    return [*found, script.on(4 + rank)]


WANTED: dict[Callable[[int, bool], Sizes], Sizes] = {
    unequal: [(4, 8), (4, 8), (4, 3)],
    accumulated: [(18, 19), (5, 5)],
    evaluated: [(6, 7), (7, 8)],
    called: [(7, 8)] * 3,
    explicit: [(50, 4), (60, 61), (0, 0), (4, 4)],
    balanced: [(2, 7), (30, 31)],
    repeated: [(4, 5), (4, 5)],
}


def everything(rank: int, world: int) -> dict[str, Sizes]:
    found = {
        f"{work.__name__} {over_ddp}": work(rank, over_ddp) for work in WANTED for over_ddp in (True, False)
    }
    return found | {"unknown": unknown(rank)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Sizes]]:
    """What two ranks found, each: starting them is what takes long."""
    return together(2, everything, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("over_ddp", [True, False])
@pytest.mark.parametrize("work", WANTED, ids=lambda work: work.__name__)
def test_sizes_that_ranks_declare(
    work: Callable[[int, bool], Sizes], over_ddp: bool, answers: list[dict[str, Sizes]]
) -> None:
    """All ranks know the sizes of all."""
    for answer in answers:
        assert answer[f"{work.__name__} {over_ddp}"] == WANTED[work]


def test_a_rank_whose_batch_cannot_be_found_declares_nothing(answers: list[dict[str, Sizes]]) -> None:
    for answer in answers:
        assert answer["unknown"] == [(4, 0), (4, 4)]


def test_declared_by_themselves_as_simulated(tmp_path: Path) -> None:
    """The rule that weighs by sizes decides as in the simulator, which knows them."""
    case = config("weighted", 3, 12)
    wanted = simulated(case)
    ways = [(case, {"batch_size": None, "over_ddp": over_ddp}) for over_ddp in (True, False)]
    for sums in together(3, trained, ways, folder=tmp_path):
        assert sums == [wanted, wanted]


# ---- alone ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size is -1; it must lie in 0..2\^32-1"):
        VoteState(Net(), batch_size=-1)


@pytest.mark.usefixtures("alone")
def test_before_the_first_round_no_size_is_known() -> None:
    script = Script(over_ddp=False)
    assert script.state.batch_sizes == ()
    assert script.on(4) == (4,)
    assert checksum(script.model) != checksum(Net())


@pytest.mark.usefixtures("alone")
def test_samples_before_a_resume_do_not_count() -> None:
    script = Script(over_ddp=False)
    script.on(4)
    saved = script.state.state_dict()
    script.net(rows(100))
    script.state.load_state_dict(saved)
    assert script.on(4) == (4,)
