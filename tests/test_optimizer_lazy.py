"""A rank that is alone does not wait for its device: whether gradients were finite is asked for in the next step.

`reference`, the plain kernels, leave that flag in a tensor, as those of a GPU do. So a CPU goes a GPU's way here. What
a GPU itself does is in `test_optimizer_cuda.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from signvote import Vote
from signvote.core import trust
from signvote.engines.ddp.sender import Sender
from signvote.kernels import download

SHAPES = [(33, 5), (5,), (64, 2), (1,), (130,)]
OVERFLOW = 2  # the round whose gradient is not finite
HOWS: list[dict[str, Any]] = [
    {"rule": "majority"},
    {"rule": "it-signsgd"},
    {"rule": "weighted", "zeros": "abstain"},
    {"rule": "weighted", "per": "tensor"},
    {"rule": "robust"},
    {"rule": "mean"},
    {"feedback": True},
    {"feedback": True, "momentum": 0.0},
    {"top": 0.1},
    {"min_voters": 2},
]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a GPU does, with plain kernels."""
    monkeypatch.setenv("SIGNVOTE_KERNELS", "reference")
    with patch.object(Sender, "_averages_early", False):
        yield


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], t: int) -> None:
    """Small integers, of which many are 0; one NaN in the round of the overflow."""
    random = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randint(-3, 4, p.shape, generator=random).to(p)
    if t == OVERFLOW:
        params[1].grad = torch.full_like(params[1], math.nan)


def look_away(optimizer: Vote) -> None:
    """Nobody reads a report."""


def steps(how: dict[str, Any], dtype: torch.dtype, look: Callable[[Vote], Any]) -> list[Any]:
    """All that shows after some steps: an overflow, a parameter without a gradient, and a round without any."""
    params = parameters(dtype)
    groups = [{"params": params[:2], "weight_decay": 0.7}, {"params": params[2:], "lr": 3e-3}]
    optimizer = Vote(groups, batch_size=4, **how)
    seen = []
    for t in range(6):
        set_gradients(params, t)
        for p in {4: params[2:3], 5: params}.get(t, []):
            p.grad = None
        optimizer.step()
        seen.append(look(optimizer))
    states = [dict(state) for _, state in optimizer.named_state()]
    moved = [p.detach() for p in params]
    return [moved, seen, optimizer.report, optimizer.rank_state(), optimizer.state_dict(), states]


def are_equal(one: Any, other: Any) -> bool:
    """Bit for bit, and of the same type."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_what_a_cpu_decides_bit_for_bit(
    how: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    wanted = steps(how, dtype, look_away)
    request.getfixturevalue("on_a_device")
    assert are_equal(steps(how, dtype, look_away), wanted)


@pytest.mark.parametrize("rule", ["it-signsgd", "weighted", "robust"])
def test_reading_every_report_changes_nothing(rule: str, request: pytest.FixtureRequest) -> None:
    how = {"rule": rule}
    wanted = steps(how, torch.float32, lambda optimizer: optimizer.report)
    assert [report.is_decided for report in wanted[1]] == [True, True, False, True, True, False]
    request.getfixturevalue("on_a_device")
    assert are_equal(steps(how, torch.float32, lambda optimizer: optimizer.report), wanted)


def test_evidence_is_not_read_before_the_next_step_or_the_report(on_a_device: None) -> None:
    read: list[int] = []

    def counted(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        arrived = download(*tensors)

        def arrive() -> tuple[Tensor, ...]:
            read.append(1)
            return arrived()

        return arrive

    params = parameters()
    optimizer = Vote(params)
    with patch.object(trust, "download", counted):
        for t in range(3):
            set_gradients(params, t)
            optimizer.step()
            assert len(read) == t
        assert optimizer.report.abstained == {0: "non-finite gradient"}
        assert len(read) == 3
    assert optimizer.round == 3


def test_an_overflow_is_logged_with_the_next_step(
    on_a_device: None, caplog: pytest.LogCaptureFixture
) -> None:
    params = parameters()
    optimizer = Vote(params)
    set_gradients(params, OVERFLOW)
    optimizer.step()
    assert not caplog.text
    for t in range(2):
        set_gradients(params, t)
        optimizer.step()
    assert caplog.text.count("round 1: fewer than 1 voted, so no parameter moved") == 1


def test_momentum_and_its_views_stay_where_they_are(on_a_device: None) -> None:
    """So `optimizer.state` is written once."""
    params = parameters()
    optimizer = Vote(params)
    places = set()
    for t in range(3):
        set_gradients(params, t)
        optimizer.step()
        momentum = optimizer.state[params[0]]["momentum_buffer"]
        places.add(momentum.data_ptr())
        assert torch.equal(momentum, optimizer.rank_state()["average"][: momentum.numel()].view_as(momentum))
    assert len(places) == 1


@pytest.mark.parametrize("on_device", [True, False])
def test_gradscaler_divides_by_a_scale_that_nobody_reads(
    on_device: bool, request: pytest.FixtureRequest
) -> None:
    """Any scale, and one overflow: the bits of gradients that were never scaled."""
    if on_device:
        request.getfixturevalue("on_a_device")
    scaled, plain = parameters(), parameters()
    optimizers = [Vote(scaled), Vote(plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for t in range(5):
        set_gradients(plain, t)
        for p, q in zip(scaled, plain, strict=True):
            assert q.grad is not None
            p.grad = q.grad * scaler.get_scale()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
    assert scaler.get_scale() == 512
    assert are_equal(*([p.detach() for p in params] for params in (scaled, plain)))
