"""A model that memory holds only in part: files are mapped, and no whole vector of floats is copied."""

from __future__ import annotations

import mmap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from signvote import Ballot, BallotError, Layout, Server, Worker
from signvote.core import worker as of_worker
from signvote.core.ballot import parse
from signvote.core.bits import Zeros, pack_signs
from signvote.kernels import Coin

N = 8_000_000  # coordinates: a megabyte of signs


def mapped(path: Path, message: bytes) -> memoryview:
    path.write_bytes(message)
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def ballots(n: int, workers: int, zeros: Zeros = "coin") -> dict[int, bytes]:
    messages = {}
    for m in range(workers):
        x = torch.zeros(n)
        x.grad = torch.randint(-1, 2, (n,)).float()
        messages[m] = Worker({"x": x}, m, zeros=zeros).ballot(1)
    return messages


def cast(n: int, coin: Coin | None) -> Ballot:
    planes, _ = pack_signs(torch.randint(-1, 2, (n,)).float(), coin)
    return Ballot.cast(Layout([("x", (n,))]), planes, worker=1, round=1, run=0)


@pytest.mark.parametrize("coin", [Coin(1), None])
def test_a_mapped_ballot_is_read_where_it_is(tmp_path: Path, coin: Coin | None) -> None:
    sent = cast(N, coin)
    view = mapped(tmp_path / "ballot", sent.to_bytes())
    tracemalloc.start()
    got = parse(view, layout=sent.layout, run=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file = np.frombuffer(view, np.uint8)
    assert np.shares_memory(got.signs, file)
    assert got.support is None or np.shares_memory(got.support, file)
    assert np.array_equal(got.signs, sent.signs)
    assert peak < 400_000


@pytest.mark.parametrize("coin", [Coin(1), None])
def test_a_ballot_is_written_without_a_copy(tmp_path: Path, coin: Coin | None) -> None:
    sent = cast(N, coin)
    message = sent.to_bytes()
    tracemalloc.start()
    parts = sent.buffers()
    with (tmp_path / "ballot").open("wb") as file:
        file.writelines(parts)
    shared = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    again = sent.to_bytes()
    once = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "ballot").read_bytes() == message == again
    planes = 1 if coin else 2
    assert shared < 400_000
    assert once < planes * N // 8 + 400_000


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
@pytest.mark.parametrize("stream", [False, True])
def test_mapped_ballots_are_decided_as_others(tmp_path: Path, zeros: Zeros, stream: bool) -> None:
    sent = ballots(1001, 5, zeros)
    views = {m: mapped(tmp_path / str(m), message) for m, message in sent.items()}
    decided = []
    for messages in (sent, views):
        server = Server(Layout([("x", (1001,))]), zeros=zeros)
        opened = server.open(1, stream=stream)
        receipts = [opened.add(m, message) for m, message in messages.items()]
        assert [receipt.status for receipt in receipts] == ["admitted"] * 5
        decided.append((opened.close(), server.report))
    assert decided[0] == decided[1]


def test_a_view_with_gaps_is_refused() -> None:
    (message,) = ballots(1001, 1).values()
    gaps = memoryview(message)[::2]
    with pytest.raises(BallotError, match="not a view with gaps"):
        parse(gaps, layout=Layout([("x", (1001,))]), run=0)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor that torch makes, besides views of known ones."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
def test_no_vector_of_floats_is_copied(tmp_path: Path, zeros: Zeros) -> None:
    x, gradient = (
        torch.from_file(str(tmp_path / name), shared=True, size=N, dtype=torch.float32)
        for name in ("parameters", "gradient")
    )
    gradient[::3] = 1.0
    x.grad = gradient
    worker = Worker({"x": x}, 0, zeros=zeros)
    with Allocations(x, gradient) as made:
        message = worker.ballot(1)
    assert made.largest <= 4 * of_worker.RANGE < 4 * N
    decision = Server(worker.layout, zeros=zeros).decide(1, {0: message})
    view = mapped(tmp_path / "decision", decision)
    with Allocations(x, gradient) as made:
        worker.apply(view, step=1.0)
    assert made.largest <= of_worker.RANGE
    assert (x[::3] == -1).all()


@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    length=st.sampled_from([64, 128, 192]),
    zeros=st.sampled_from(["coin", "abstain"]),
    missing=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ranges_change_no_bit(sizes: list[int], length: int, zeros: Zeros, missing: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"p{i}": (size, 1 + i) for i, size in enumerate(sizes)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    gradients = {name: torch.randint(-1, 2, shape, generator=generator) for name, shape in shapes.items()}
    outcomes = []
    usual = of_worker.RANGE
    for of_worker.RANGE in (length, usual):  # usual is left in place
        model = {name: value.clone() for name, value in values.items()}
        for name, tensor in model.items():
            tensor.grad = None if missing and name == "p1" else gradients[name].float()
        worker = Worker(model, 3, zeros=zeros, decay=0.1)
        message = worker.ballot(1)
        worker.apply(Server(worker.layout, zeros=zeros).decide(1, {3: message}), step=0.1)
        outcomes.append((message, [tensor.tolist() for tensor in model.values()]))
    assert outcomes[0] == outcomes[1]


def test_a_bad_number_in_the_last_range_is_an_abstention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_worker, "RANGE", 64)
    x = torch.zeros(200)
    x.grad = torch.ones(200)
    worker = Worker({"x": x}, 0)
    assert not parse(worker.ballot(1), layout=worker.layout, run=0).reason
    x.grad[-1] = torch.inf
    assert parse(worker.ballot(2), layout=worker.layout, run=0).reason
    assert worker.abstained == "non-finite gradient"
    x.grad[-1] = 1
    worker.ballot(3)
    assert worker.abstained == ""


def test_gradients_that_are_not_contiguous_vote_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_worker, "RANGE", 64)
    gradient = torch.randn(30, 20)
    messages = []
    for grad in (gradient, gradient.T.contiguous().T):
        x = torch.zeros(30, 20)
        x.grad = grad
        messages.append(Worker({"x": x}, 0).ballot(1))
    assert messages[0] == messages[1]


def test_trust_does_not_grow_with_the_model() -> None:
    sizes = []
    for n in (1000, 1_000_000):
        server = Server(Layout([("x", (n,))]))
        server.decide(1, ballots(n, 4))
        sizes.append(len(repr(server.state_dict())))
    assert sizes[1] < sizes[0] + 100
