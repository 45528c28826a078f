"""Checkpoints: a state comes back exactly or is refused; a crash leaves the previous file."""

from __future__ import annotations

import os
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import Layout, Server, StateError, Worker, checkpoint
from signvote.checkpoint import write_atomically


def state() -> dict[str, object]:
    return {
        "kind": "test",
        "number": 2**63,
        "real": 0.5,
        "nothing": None,
        "flag": True,
        "nested": {"counters": torch.arange(9).to(torch.uint16).view(3, 3), "list": [1, "a", torch.ones(2)]},
        "empty": torch.zeros(0, 2, dtype=torch.float64),
        "brain": torch.randn(3).bfloat16(),
        "strided": torch.arange(6.0).view(2, 3).T,
    }


def same(a: object, b: object) -> bool:
    """Whether values and types are equal, down to the sign of zero. Not a number is equal to itself."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a.tolist()) == repr(b.tolist())
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_a_state_comes_back(tmp_path: Path) -> None:
    saved = state()
    checkpoint.save(tmp_path / "x", saved)
    assert same(checkpoint.load(tmp_path / "x"), saved)
    assert os.listdir(tmp_path) == ["x"], "nothing else is left behind"


def test_a_crash_at_any_byte_leaves_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes some bytes and then no more, at every possible place; also a failing rename or sync."""
    path = tmp_path / "state"
    checkpoint.save(path, {"version": "old"})
    new, opened = b"x" * 300, open

    class Full:
        def __init__(self, file, room: int) -> None:  # type: ignore[no-untyped-def]
            self.file, self.room = file, room

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: self.room])
            self.file.flush()
            raise OSError(28, "No space left on device")

    for room in range(len(new)):
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", lambda name, mode, room=room: Full(opened(name, mode), room))
            with pytest.raises(OSError, match="No space left") as error:
                write_atomically(path, new)
        assert error.value.filename == str(path)
        assert checkpoint.load(path) == {"version": "old"}
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
            with pytest.raises(OSError, match="I/O error"):
                write_atomically(path, new)
        assert checkpoint.load(path) == {"version": "old"}
    assert os.listdir(tmp_path) == ["state"]


class Color(Enum):
    RED = 1


def holds_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["me"] = [state]
    return state


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{1, 2}]}, r"state\.a\.0 is a set, which a checkpoint does not hold"),
        ({"a": b"bytes"}, "state.a is a bytes"),
        ({"a": 1j}, "state.a is a complex"),
        ({"a": Color.RED}, "state.a is a Color"),
        ({"a": np.arange(3)}, "state.a is a ndarray"),
        ({"a": np.longdouble(0.1)}, "state.a is a longdouble"),
        ({"a": np.timedelta64(5, "ns")}, "state.a is a timedelta64"),
        ({"a": torch.float32}, "state.a is a dtype"),
        ({b"a": 1}, "a key of state is a bytes"),
        ({(0, b"a"): 1}, r"a key of state\.1 is a bytes"),
        ({torch.ones(1): 1}, "a key of state is a tensor, which a checkpoint does not hold"),
        ({"a": torch.ones(2).to_sparse()}, "state.a is a sparse tensor"),
        ({"a": torch.ones(2, device="meta")}, "state.a is a meta tensor"),
        ({"a": 2**20_000}, "state.a is an integer of 20,001 bits; a checkpoint holds 10,000"),
        (holds_itself(), "more than 100 lists and dicts in each other; does it hold itself"),
        ([1], "a state is a dict; this one is a list"),
    ],
)
def test_what_is_no_plain_value_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=message):
        checkpoint.save(tmp_path / "x", value)
    assert os.listdir(tmp_path) == []


def test_more_than_a_header_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_HEADER_BYTES", 1000)
    checkpoint.save(tmp_path / "x", {"a": list(range(100))})
    with pytest.raises(StateError, match="a checkpoint holds 1,000: turn long lists of numbers into tensors"):
        checkpoint.save(tmp_path / "x", {"a": list(range(1000))})
    assert len(checkpoint.load(tmp_path / "x")["a"]) == 100


def test_a_tensor_that_safetensors_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the state has a tensor that safetensors does not hold"):
        checkpoint.save(tmp_path / "x", {"a": torch.ones(2, dtype=torch.complex128)})


# ---- what comes back -----------------------------------------------------------------------------


def test_an_optimizer_comes_back_with_its_momentum(tmp_path: Path) -> None:
    """Its state has integer keys, and tuples among the options."""

    def trained(steps: int, start: Path | None = None) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(4))
        optimizer = torch.optim.AdamW([weights], lr=0.1, betas=(0.9, 0.99))
        if start is not None:
            saved = checkpoint.load(start)
            weights.data = saved["weights"]
            optimizer.load_state_dict(saved["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            weights.square().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return optimizer

    half = trained(3)
    (weights,) = half.param_groups[0]["params"]
    checkpoint.save(tmp_path / "x", {"optimizer": half.state_dict(), "weights": weights})
    assert same(checkpoint.load(tmp_path / "x")["optimizer"], half.state_dict())
    whole, resumed = trained(6), trained(3, tmp_path / "x")
    assert same(resumed.state_dict(), whole.state_dict())


def test_names_that_look_alike_are_different_tensors(tmp_path: Path) -> None:
    saved = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1), 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)},
        "sha256": torch.full((1,), 4.0),
        "\ud800": torch.full((1,), 5.0),
        "__metadata__": "tensor:a",
    }
    checkpoint.save(tmp_path / "x", saved)
    assert same(checkpoint.load(tmp_path / "x"), saved)


def test_numbers_of_numpy_come_back_as_pythons(tmp_path: Path) -> None:
    saved = {
        np.int64(3): [np.int8(-1), np.uint64(2**64 - 1), np.bool_(True)],
        np.float32(0.5): (np.float16(0.1), np.float64("nan")),
        (np.int32(1), "a"): None,
    }
    checkpoint.save(tmp_path / "x", saved)  # type: ignore[arg-type]
    tenth = float(np.float16(0.1))
    expected = {3: [-1, 2**64 - 1, True], 0.5: (tenth, float("nan")), (1, "a"): None}
    assert same(checkpoint.load(tmp_path / "x"), expected)


@pytest.mark.parametrize("rule", ["robust", "weighted", "it-signsgd"])
def test_workers_numbered_by_numpy_are_saved(rule: str, tmp_path: Path) -> None:
    server = a_server(rule, [np.int64(0), np.int64(1), np.int64(2)])
    checkpoint.save(tmp_path / "x", server.state_dict())
    again = Server(server.layout, rule)
    again.load_state_dict(checkpoint.load(tmp_path / "x"))
    assert same(again.state_dict(), a_server(rule, [0, 1, 2]).state_dict())


def test_subclasses_come_back_as_the_plain_type(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    saved = {"model": model.state_dict(), "size": torch.Size([2, 1]), "ordered": OrderedDict(b=1, a=2)}
    checkpoint.save(tmp_path / "x", saved)
    loaded = checkpoint.load(tmp_path / "x")
    assert loaded == {"model": loaded["model"], "size": (2, 1), "ordered": {"b": 1, "a": 2}}
    assert list(loaded["ordered"]) == ["b", "a"]
    model.load_state_dict(loaded["model"])


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=4)
)
NUMPY = st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)) | st.builds(np.float32, st.floats(width=32))
OTHERS = st.sampled_from([b"x", 1j, {1}, 2**12_000, np.arange(2)])
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.uint16]),
)
KEYS = st.recursive(SCALARS | NUMPY, lambda inner: st.tuples(inner, inner), max_leaves=3)
VALUES = st.recursive(
    SCALARS | NUMPY | TENSORS | OTHERS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS | st.sampled_from(["a", "a.b", "0", 0, "tensor:a", "dict"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """The value with numbers of Python instead of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def is_refused(value: Any) -> bool:
    """Whether a state has a value of OTHERS."""
    if isinstance(value, dict):
        return any(map(is_refused, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_refused, value))
    return isinstance(value, bytes | complex | set | np.ndarray) or (
        type(value) is int and value >= 2**12_000
    )


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_state_comes_back_exactly_or_is_refused(tmp_path_factory: Any, state: dict[Any, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    if is_refused(state):
        with pytest.raises(StateError, match=r"a checkpoint (does not hold|holds)"):
            checkpoint.save(path, state)
    else:
        checkpoint.save(path, state)
        assert same(checkpoint.load(path), plain(state))


# ---- states to save ------------------------------------------------------------------------


def a_worker(number: int = 0, round: int = 1) -> Worker:
    weights = torch.nn.Parameter(torch.zeros(12))
    generator = torch.Generator().manual_seed(number + 10 * round)
    weights.grad = torch.randn(12, generator=generator)
    return Worker({"w": weights}, number, momentum=0.9, feedback=True)


def a_server(rule: str, workers: list[Any]) -> Server:
    """A server after two rounds, in which it refused a ballot of the last worker."""
    server = Server(Layout([("w", (12,))]), rule)
    for t in (1, 2):
        ballots = [(m, a_worker(int(m), t).ballot(t)) for m in workers]
        server.decide(t, [(workers[-1], b"garbage"), *ballots])
    return server
