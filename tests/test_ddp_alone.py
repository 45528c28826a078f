"""The engine in a world of one, in this process: gloo, and NCCL where a GPU is; gradients are on the GPU then."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError, Server, Worker
from signvote.engines import ddp
from signvote.engines.ddp import VoteState, load, save, torch_names, vote_gradients, vote_hook
from tests.ranks import INPUTS, deep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, STEP = 12, 3e-3
RULES = ("majority", "it-signsgd", "weighted", "robust")


@pytest.fixture(params=["nccl", "gloo"] if DEVICE == "cuda" else ["gloo"])
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A world of one."""
    dist.init_process_group(request.param, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def made() -> nn.Module:
    torch.manual_seed(1)
    return deep().to(DEVICE)


def loss(model: nn.Module, t: int) -> Tensor:
    random = torch.Generator().manual_seed(t)
    x, y = (
        torch.randn(8, INPUTS, generator=random).to(DEVICE),
        torch.randint(3, (8,), generator=random).to(DEVICE),
    )
    return nn.functional.cross_entropy(model(x), y)


def trained(
    rule: str, over_ddp: bool, rounds: int = ROUNDS, folder: Path | None = None, **how: Any
) -> Tensor:
    model = made()
    net = DistributedDataParallel(model, bucket_cap_mb=1e-5) if over_ddp else model
    state = VoteState(net, rule, batch_size=8, chunk=1280, **how)
    if isinstance(net, DistributedDataParallel):
        net.register_comm_hook(state, vote_hook)
    scaler, optimizer = how.get("scaler"), torch.optim.SGD(model.parameters(), lr=STEP)
    if folder and (found := load(folder, state)):
        model.load_state_dict(found[0]["model"])
    while state.round < rounds:
        optimizer.zero_grad()
        if scaler is None:
            loss(net, state.round).backward()  # type: ignore[no-untyped-call]
        else:
            scaler.scale(loss(net, state.round)).backward()
        if not over_ddp:
            vote_gradients(state)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    if folder:
        save(folder, state, {"model": model.state_dict()})
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def by_one(rule: str) -> Tensor:
    model = made()
    worker = Worker(model, 0, momentum=0.9, batch_size=8)
    server = Server(worker.layout, rule)
    for t in range(1, ROUNDS + 1):
        model.zero_grad()
        loss(model, t - 1).backward()  # type: ignore[no-untyped-call]
        worker.apply(server.decide(t, {0: worker.ballot(t)}), STEP)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("rule", RULES)
def test_alone_as_by_worker_and_server(rule: str, alone: str) -> None:
    wanted = by_one(rule)
    for over_ddp in (True, False):
        for overlap in (True, False):
            assert torch.equal(trained(rule, over_ddp, overlap=overlap), wanted), (over_ddp, overlap)


def test_a_checkpoint_and_amps_scaler(alone: str, tmp_path: Path) -> None:
    wanted = trained("it-signsgd", True)
    trained("it-signsgd", True, ROUNDS // 2, tmp_path / "saved")
    assert torch.equal(trained("it-signsgd", True, folder=tmp_path / "saved"), wanted)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, growth_interval=3)
    assert torch.equal(trained("it-signsgd", True, scaler=scaler), wanted)
    assert scaler.get_scale() > 2.0**12


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:the optimizer's momentum")
@pytest.mark.parametrize("over_ddp", [True, False])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_below_the_quorum_no_optimizer_moves_a_parameter(
    alone: str, over_ddp: bool, views: bool, amp: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by weight decay, nor by the optimizer's own momentum. The next round continues."""
    model = made()
    net = (
        DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-5)
        if over_ddp
        else model
    )
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0) if amp else None
    state = VoteState(net, "weighted", batch_size=8, scaler=scaler)
    if isinstance(net, DistributedDataParallel):
        net.register_comm_hook(state, vote_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP, weight_decay=0.5, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(net, state.round)
        (scaler.scale(value) if scaler else value).backward()  # type: ignore[no-untyped-call]
        if not over_ddp:
            vote_gradients(state)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first = step()
    state.poll.server.min_voters = 2
    assert torch.equal(step(), first)
    assert torch.equal(step(), first)
    assert not state.report.is_decided
    assert state.poll.server.watch.undecided == 2
    assert caplog.text.count("signvote: round 2: fewer than 2 voted, so no parameter moved") == 1
    assert amp or gradients_of(model) == [None] * len(list(model.parameters()))
    state.poll.server.min_voters = 1
    assert not torch.equal(step(), first)
    assert state.report.is_decided


def test_min_voters_is_a_setting_of_a_rank(alone: str) -> None:
    model = made()
    state = VoteState(model, min_voters=2)
    loss(model, 0).backward()  # type: ignore[no-untyped-call]
    vote_gradients(state)
    assert not state.report.is_decided
    with pytest.raises(ConfigError, match="min_voters is 0; it must be 1 or more"):
        VoteState(model, min_voters=0)


def test_the_names_that_torch_does_not_document() -> None:
    """If this fails, `torch_names.py` is the file to change."""
    for name in torch_names.NAMES:
        place: Any = torch
        for part in name.split("."):
            assert hasattr(place, part), f"torch {torch.__version__} has no torch.{name}"
            place = getattr(place, part)


def test_no_other_file_uses_a_private_name_of_torch_distributed() -> None:
    for path in Path(ddp.__file__).parent.glob("*.py"):
        if path.name != "torch_names.py":
            private = re.findall(r"torch\._\w+|_distributed_c10d|distributed_c10d\._\w+", path.read_text())
            assert not private, f"{path.name} uses {private}"


def test_an_old_torch_has_the_store_of_all_ranks(alone: str) -> None:
    class Old:
        """A group without get_group_store."""

    store = torch_names.store_of(Old())  # type: ignore[arg-type]
    store.set("key", "value")
    assert store.get("key") == b"value"
