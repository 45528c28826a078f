"""python-source: a language model without a download. Text, windows, models, runs."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from signvote import ConfigError, DataError, StateError, checkpoint
from signvote.results import read
from signvote.sim import Config, Run, train
from signvote.sim.machine import Machine
from signvote.tasks import MODELS, Task, load_task
from signvote.tasks import text as text_module
from signvote.tasks.gpt import GPTS
from signvote.tasks.text import Windows, is_test, modules, python_source
from tests.test_package import command

LIBRARY = Path(sysconfig.get_path("stdlib"))


def config(**settings: Any) -> Config:
    usual: dict[str, Any] = {
        "task": "python-source", "batch_sizes": (2, 2, 8), "rounds": 6, "evaluate_every": 3, "step": 2e-3,
    }  # fmt: skip
    return Config(rule="weighted", **usual | settings)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task with a short test."""
    monkeypatch.setattr(text_module, "TEST_WINDOWS", 64)
    return load_task("python-source")


# ---- the text ------------------------------------------------------------------------------------


def test_the_text_is_the_library_without_tests_in_the_order_of_the_paths() -> None:
    names = modules(LIBRARY)
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "email/message.py"} <= set(names)
    for name in names:
        assert not {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))
        assert (LIBRARY / name).is_file()
    train, test, about = python_source()
    texts = {
        part: b"".join((LIBRARY / name).read_bytes() + b"\0" for name in names if is_test(name) == part)
        for part in (False, True)
    }
    assert bytes(train.tolist()) == texts[False]
    assert bytes(test.tolist()) == texts[True]
    assert 0.03 < len(test) / len(train) < 0.3
    assert f"{platform.python_version()}, {len(names):,} files" in about["text"]
    digests = b"".join(hashlib.sha256(texts[part]).digest() for part in (False, True))
    assert about["sha256"] == hashlib.sha256(digests).hexdigest()


@given(st.text(min_size=1))
def test_a_file_is_sent_by_its_path_alone(name: str) -> None:
    assert is_test(name) == (int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 10 == 0)


def test_an_installation_without_a_library_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"has 0 modules of Python's standard library; they are the text"):
        python_source.__wrapped__()


# ---- windows -------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(90, 300), st.integers(0, 99), st.integers(1, 30) | st.none())
def test_windows_are_pieces_of_the_text_and_what_follows(
    length: int, size: int, seed: int, spaced: int | None
) -> None:
    text = torch.arange(size) % 251
    windows = Windows(text.to(torch.uint8), length, spaced)
    assert len(windows) == min(spaced or size, (size - 1) // length)
    indices = torch.arange(len(windows))
    draws = windows.draw(len(windows), torch.Generator().manual_seed(seed))
    for chosen in (None, draws):
        inputs, labels = windows.batch(indices, chosen)
        assert inputs.shape == labels.shape == (len(windows), length)
        for row, following in zip(inputs.tolist(), labels.tolist(), strict=True):
            piece = [*row, following[-1]]
            assert following == piece[1:]
            start = piece[0]
            assert piece in [text[at : at + length + 1].tolist() for at in range(start, size, 251)]
    plain, _ = windows.batch(indices)
    starts = (plain[:, 0]).tolist()
    assert starts[0] == 0


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(DataError, match="a text of 10 bytes is too short for sequences of 9"):
        Windows(torch.zeros(10, dtype=torch.uint8), 9)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("gpt-tiny", 119_104), ("gpt-small", 4_852_992)])
def test_the_size_and_the_start_of_a_model(name: str, count: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert not list(model.buffers())
    context = GPTS[name].keywords["context"]
    tokens = torch.randint(256, (2, context))
    with torch.no_grad():
        outputs = model(tokens)
    assert outputs.shape == (2, context, 256)
    following = torch.randint(256, (2 * context,))
    uniform = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), following)
    assert float(uniform) == pytest.approx(math.log(256), abs=0.3)
    layers = GPTS[name].keywords["layers"]
    added = model.get_parameter("blocks.0.attention.out.weight")
    assert float(added.detach().std()) == pytest.approx(0.02 / math.sqrt(2 * layers), rel=0.05)


def test_no_place_sees_what_follows() -> None:
    torch.manual_seed(0)
    model = MODELS["gpt-tiny"]()
    tokens = torch.randint(256, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 256

    def outputs(of: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(of)
        return found[0]

    torch.testing.assert_close(outputs(tokens)[:40], outputs(changed)[:40])
    assert not torch.allclose(outputs(tokens)[40:], outputs(changed)[40:])


def test_models_and_tasks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="model 'gpt-tiny' reads text, and the task has images"):
        load_task("mnist-10k", model="gpt-tiny")
    with pytest.raises(ConfigError, match=r"there is no model 'mlp'.*gpt-tiny, gpt-small"):
        load_task("python-source", model="mlp")


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_learns_and_resumes_bit_for_bit(few: Task, tmp_path: Path) -> None:
    whole = train(config(), few, tmp_path / "whole")
    train(config(), few, tmp_path / "cut", watch=lambda run: run.round == 2)
    cut = train(config(), few, tmp_path / "cut", resume=True)
    assert cut["evaluations"] == whole["evaluations"]
    for a, b in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    first, *_, last = whole["evaluations"]["loss"]
    assert last < first < 6
    assert whole["evaluations"]["perplexity"][-1] == pytest.approx(math.exp(last))
    assert whole["metrics"][0] == {"name": "loss", "unit": "nats/byte", "more_is_better": False}
    assert whole["data"] == python_source()[2]


def test_a_checkpoint_of_another_python_is_refused(few: Task, tmp_path: Path) -> None:
    train(config(), few, tmp_path, watch=lambda run: run.round == 2)
    path = tmp_path / "checkpoint.safetensors"
    state = checkpoint.load(path)
    state["data"] = {"text": "standard library of CPython 3.99"}
    checkpoint.save(path, state)
    with pytest.raises(
        StateError, match=r"is of other data: text standard library of CPython 3\.99 instead of"
    ):
        train(config(), few, tmp_path, resume=True)
    del state["data"]
    Run(config(), few).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"split": "labels:2"}, "split is 'labels:2'; it needs class labels"),
        ({"split": "dirichlet:0.1"}, "split is 'dirichlet:0.1'; it needs class labels"),
        ({"attack": "label-flip:1"}, "attack is 'label-flip:1'; it needs class labels"),
    ],
)
def test_what_needs_classes_is_one_sentence(few: Task, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Run(config(**settings), few)


def test_the_joint_pass_draws_the_same_windows(few: Task) -> None:
    runs = [Run(config(momentum=0.0), few, Machine(together=way)) for way in (False, True)]
    for run in runs:
        run.step()
    assert (runs[0].gradients.x != runs[1].gradients.x).float().mean() < 0.05  # other windows: half of them


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--task", "python-source", "--batch-sizes", "2", "4", "--rounds", "2", "--evaluate-every", "2")
    done = command("train", *small, "--out", "one")
    assert done.returncode == 0, done.stderr
    assert "loss (nats/byte)" in done.stdout
    (run,) = read("one/results.json")["runs"]
    assert run["data"]["text"].startswith("standard library of ")
    assert len(run["data"]["sha256"]) == 64
    assert json.dumps(run["data"]["sha256"]) in Path("one/results.json").read_text()
    assert "test loss (nats/byte)" in Path("one/figure.svg").read_text()
    assert run["data"]["sha256"] in Path("one/report.html").read_text()
    assert "python-source needs no download." in command("data", "python-source").stdout
