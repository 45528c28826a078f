from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from signvote import StateError, checkpoint
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
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_state_comes_back(tmp_path: Path) -> None:
    saved = state()
    checkpoint.save(tmp_path / "x", saved)
    assert same(checkpoint.load(tmp_path / "x"), saved)
    assert os.listdir(tmp_path) == ["x"], "nothing else is left behind"


def test_a_file_cut_at_any_byte_is_refused_and_never_half_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "whole", state())
    data = (tmp_path / "whole").read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(StateError, match="is cut short or no signvote checkpoint"):
            checkpoint.load(tmp_path / "cut")


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


def test_what_is_no_plain_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"state\.a\.0 is a set, which a checkpoint does not hold"):
        checkpoint.save(tmp_path / "x", {"a": [{1, 2}]})
    with pytest.raises(StateError, match="a string that starts with 'tensor:' cannot be saved"):
        checkpoint.save(tmp_path / "x", {"a": "tensor:b"})
    assert not (tmp_path / "x").exists()


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("hello, this is not a checkpoint at all")
    for name in ("foreign", "text"):
        with pytest.raises(StateError, match="no signvote checkpoint"):
            checkpoint.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "missing")
