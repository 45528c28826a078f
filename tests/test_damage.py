"""Damaged checkpoints: whatever happens to a file, loading it is refused with its name, and nothing else is raised."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file

from signvote import Layout, Server, StateError, checkpoint
from signvote.checkpoint import write_atomically
from signvote.cli import main
from signvote.sim import train
from tests.test_checkpoint import a_server, a_worker, same
from tests.test_formats import GOLDEN, config, toy


def save_server(rule: str, path: Path) -> None:
    checkpoint.save(path, a_server(rule, [0, 1, 2]).state_dict())


def load_server(rule: str, path: Path) -> None:
    Server(Layout([("w", (12,))]), rule).load_state_dict(checkpoint.load(path))


def save_worker(path: Path) -> None:
    worker = a_worker()
    worker.ballot(1)
    checkpoint.save(path, worker.state_dict())


def load_worker(path: Path) -> None:
    a_worker().load_state_dict(checkpoint.load(path))


def save_run(path: Path) -> None:
    train(config("weighted"), toy(), path.parent, watch=lambda run: run.round == 5)
    (path.parent / "result.json").unlink()
    (path.parent / "checkpoint.safetensors").rename(path)


def load_run(path: Path) -> None:
    """As `signvote train --resume` does it."""
    shutil.copy(path, path.parent / "checkpoint.safetensors")
    try:
        train(config("weighted"), toy(), path.parent, resume=True)
    except StateError as error:
        assert str(path.parent / "checkpoint.safetensors") in str(error)
        raise StateError(str(error).replace("checkpoint.safetensors", path.name)) from None


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "robust server": (partial(save_server, "robust"), partial(load_server, "robust")),
    "it-signsgd server": (partial(save_server, "it-signsgd"), partial(load_server, "it-signsgd")),
    "worker": (save_worker, load_worker),
    "run": (save_run, load_run),
}


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[bytes, Path, Callable[[Path], None]]:
    """A checkpoint of each kind, the place for damaged ones, and how a user loads it."""
    write, use = KINDS[request.param]
    path = tmp_path / "damaged"
    write(path)
    use(path)
    return path.read_bytes(), path, use


def refused(path: Path, use: Callable[[Path], Any]) -> None:
    try:
        use(path)
    except StateError as error:
        assert str(path) in str(error)
    else:
        raise AssertionError("it was loaded")


# ---- damage --------------------------------------------------------------------------------------


def test_every_changed_byte_is_refused(whole: tuple[bytes, Path, Callable[[Path], None]]) -> None:
    """Each byte of the file with a bit flipped, and with another value. Loading comes first in what a user calls."""
    data, path, use = whole
    chance = random.Random(0)
    with path.open("r+b", buffering=0) as file:
        for i, byte in enumerate(data):
            for mask in (1 << chance.randrange(8), chance.randrange(1, 256)):
                os.pwrite(file.fileno(), bytes([byte ^ mask]), i)
                refused(path, checkpoint.load)
            os.pwrite(file.fileno(), bytes([byte]), i)
    use(path)


def test_every_length_is_refused(whole: tuple[bytes, Path, Callable[[Path], None]]) -> None:
    data, path, _ = whole
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        refused(path, checkpoint.load)
    for more in (b"\0", data, data[-32:]):
        path.write_bytes(data + more)
        refused(path, checkpoint.load)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Several bytes changed, cut out, moved, repeated, or replaced by others."""
    start, end = sorted(chance.sample(range(len(data) + 1), 2))
    at = chance.randrange(len(data))
    noise = chance.randbytes(chance.randrange(1, 40))
    result = chance.choice(
        [
            data[:start] + data[end:],
            data[:start] + bytes(end - start) + data[end:],
            data[:start] + data[start:end][::-1] + data[end:],
            data[:end] + data[start:],
            data[:at] + noise + data[at + len(noise) :],
            data[:at] + noise + data[at:],
            len(data).to_bytes(8, "little") + data[8:],
            b"\xff" * 8 + data[8:],
            data[8:],
            noise,
        ]
    )
    return result if result != data else b""


def test_other_damage_is_refused(whole: tuple[bytes, Path, Callable[[Path], None]]) -> None:
    """Several hundred, through what a user calls."""
    data, path, use = whole
    chance = random.Random(1)
    for _ in range(150):
        path.write_bytes(damaged(data, chance))
        refused(path, use)
    path.write_bytes(data)
    use(path)


@pytest.mark.slow
def test_the_command_line_refuses_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    flags = ["--model", "mlp", "--batch-sizes", "2", "4", "--evaluate-every", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["signvote", "train", *flags, "--rounds", "1"])
    main()
    data = path.read_bytes()
    monkeypatch.setattr("sys.argv", ["signvote", "train", *flags, "--rounds", "1", "--resume"])
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
    for content in (flipped, data[:-1], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert f"signvote: {path} is damaged, cut short or no signvote checkpoint" in capsys.readouterr().err
    path.write_bytes(data)
    main()


# ---- other formats -------------------------------------------------------------------------------


def test_a_checkpoint_is_a_safetensors_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "x", {"a": {"b": torch.arange(3)}})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert set(file.keys()) == {"0 state.a.b", "sha256"}
        assert file.get_tensor("0 state.a.b").tolist() == [0, 1, 2]


def old_file(path: Path, state: str, **tensors: torch.Tensor) -> None:
    save_file(tensors, path, metadata={"signvote": state})


def test_files_of_format_1_are_read_without_a_digest(tmp_path: Path) -> None:
    old_file(tmp_path / "x", '{"a": ["tensor:state.a.0"], "b": 2.5}', **{"state.a.0": torch.arange(2)})
    assert same(checkpoint.load(tmp_path / "x"), {"a": [torch.arange(2)], "b": 2.5})
    assert checkpoint.load(GOLDEN / "3" / "pooled.safetensors")["round"] == 5


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"a": "tensor:b"}', '{"a": 1, "rest": "tensor:nowhere"}']
)
def test_a_wrong_file_of_format_1_is_refused(text: str, tmp_path: Path) -> None:
    old_file(tmp_path / "x", text, a=torch.ones(1))
    refused(tmp_path / "x", checkpoint.load)


def test_damage_of_format_1_raises_nothing_else(tmp_path: Path) -> None:
    """A changed number cannot be noticed there. Everything else is refused in one sentence."""
    data = (GOLDEN / "3" / "pooled.safetensors").read_bytes()
    path = tmp_path / "checkpoint.safetensors"
    chance = random.Random(2)
    header = int.from_bytes(data[:8], "little")
    refusals = 0
    for _ in range(200):
        at = chance.randrange(8 + header)
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
        try:
            train(config("weighted"), toy(), tmp_path, resume=True)
        except StateError as error:
            assert str(path) in str(error)
            refusals += 1
    assert refusals > 100


def sealed(path: Path, content: object, **tensors: torch.Tensor) -> None:
    """A file with a right digest and any content."""
    file = to_bytes(tensors, metadata={"checkpoint": json.dumps(content)})
    write_atomically(path, *checkpoint._sealed(file))


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {"dict": 3},
        {"dict": [[1]]},
        {"dict": [[{"dict": []}, 1]]},
        {"set": []},
        {"dict": [], "tuple": []},
        {"tensor": "nowhere"},
        {"tensor": []},
        {},
    ],
)
def test_a_right_digest_over_a_wrong_content_is_refused(state: object, tmp_path: Path) -> None:
    sealed(tmp_path / "x", {"format": 2, "state": state})
    refused(tmp_path / "x", checkpoint.load)


def test_a_later_format_is_refused_as_such(tmp_path: Path) -> None:
    sealed(tmp_path / "x", {"format": 3, "state": {"dict": []}})
    with pytest.raises(StateError, match="x: format 3 is a later signvote's; this one reads up to 2"):
        checkpoint.load(tmp_path / "x")
    contents: list[object] = [3, [], {"format": 2}, {"format": True, "state": {"dict": []}}]
    for content in contents:
        sealed(tmp_path / "x", content)
        refused(tmp_path / "x", checkpoint.load)


def test_a_file_cannot_ask_for_more_memory_than_it_has(tmp_path: Path) -> None:
    """Neither by the size of its header, nor by a shape, nor by lists in lists."""
    claims = [
        (2**62).to_bytes(8, "little") + b"{}",
        b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}',
        b"[" * 100_000,
    ]
    for claim in claims:
        size = b"" if claim.startswith(b"\0") else len(claim).to_bytes(8, "little")
        (tmp_path / "x").write_bytes(size + claim)
        refused(tmp_path / "x", checkpoint.load)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("hello, this is not a checkpoint at all")
    for name in ("foreign", "text"):
        with pytest.raises(StateError, match="no signvote checkpoint"):
            checkpoint.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "missing")
