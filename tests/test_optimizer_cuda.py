"""The optimizer on a GPU: the parameters that it has on a CPU after the same gradients, bit for bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import Vote

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPES = [(33, 17), (5,), (64, 64), (1,), (130,)]
HOWS: list[dict[str, Any]] = [
    {"rule": "majority"},
    {"rule": "it-signsgd"},
    {"rule": "weighted", "zeros": "abstain"},
    {"rule": "robust"},
    {"rule": "mean"},
    {"feedback": True},
    {"momentum": 0.0},
]

WAITLESS = [how for how in HOWS if how.get("rule") != "robust"] + [{"overlap": True}, {"check_every": 2}]


def parameters(device: str, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=random).to(device, dtype)) for shape in SHAPES]


def gradients(t: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 + t)
    return [torch.randint(-3, 4, shape, generator=random).float() for shape in SHAPES]


def trained(device: str, dtype: torch.dtype, how: dict[str, Any]) -> list[Tensor]:
    params = parameters(device, dtype)
    groups: list[dict[str, Any]] = [
        {"params": params[:2], "lr": 3e-3, "weight_decay": 0.7},
        {"params": params[2:]},
    ]
    optimizer = Vote(groups, **how)
    for t in range(6):
        for p, gradient in zip(params, gradients(t), strict=True):
            p.grad = gradient.to(p)
        if t == 3:
            params[0].grad = torch.full_like(params[0], math.nan)
        optimizer.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_same_bits_as_on_a_cpu(how: dict[str, Any], dtype: torch.dtype) -> None:
    pairs = zip(trained("cuda", dtype, how), trained("cpu", dtype, how), strict=True)
    assert all(torch.equal(there, here) for there, here in pairs)


@pytest.mark.parametrize("overlap", [True, False])
def test_over_nccl_in_a_world_of_one(overlap: bool, tmp_path: Path) -> None:
    """Under DDP, with AMP's scaler where gradients do not leave early."""
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    model.load_state_dict(alone.state_dict())
    optimizers = [Vote(alone.parameters())]
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net = DistributedDataParallel(model)
        optimizers.append(Vote(model.parameters(), overlap=overlap))
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**6, enabled=not overlap)
        for _ in range(5):
            x = torch.randn(8, 20, device="cuda")
            alone.zero_grad()
            alone(x).square().mean().backward()
            optimizers[0].step()
            model.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizers[1])
            scaler.update()
    finally:
        dist.destroy_process_group()
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizers[1].batch_sizes == (8,)


@contextmanager
def without_a_wait() -> Iterator[None]:
    """An operation that waits for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", WAITLESS, ids=str)
def test_a_step_does_not_wait_for_the_gpu(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Nor does one with an overflow, or with AMP's scale. Rules may wait in their first round, and kernels compile."""
    params = parameters("cuda", dtype)
    optimizer = Vote(params, weight_decay=0.7, **how)
    for t in range(5):
        for p, gradient in zip(params, gradients(t), strict=True):
            p.grad = gradient.to(p)
        if t == 3:
            params[0].grad = torch.full_like(params[0], math.nan)
        if t == 4 and "overlap" not in how:
            optimizer.grad_scale = torch.tensor(2.0, device="cuda")  # type: ignore[attr-defined]
        with without_a_wait() if t > 1 else nullcontext():
            optimizer.step()
    assert optimizer.round == 5
    assert optimizer.report.is_decided


def test_an_overflow_is_reported_when_somebody_asks() -> None:
    params = parameters("cuda", torch.float32)
    optimizer = Vote(params, weight_decay=0.7)
    for p, gradient in zip(params, gradients(0), strict=True):
        p.grad = gradient.to(p)
    params[1].grad = torch.full_like(params[1], math.inf)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert optimizer.report.abstained == {0: "non-finite gradient"}
    assert not optimizer.report.is_decided
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())
