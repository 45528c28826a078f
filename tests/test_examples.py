"""Every example runs in a small form, and what it prints is true."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Protocol

import nbclient
import nbformat
import pytest
import torch
import torch.distributed as dist

import signvote
from signvote import Layout, results
from signvote.core.trust import Evidence
from signvote.core.vote import Voters
from tests.ranks import together

EXAMPLES = Path(__file__).parent.parent / "examples"
FIGURE = EXAMPLES.parent / "paper" / "fig1-mnist" / "results.json.gz"
ELSEWHERE = {  # under torchrun
    "ddp_mnist.py": "tests/test_ddp_faults.py",
    "accelerate_votes.py": "tests/test_apps.py",
    "lightning_votes.py": "tests/test_apps.py",
    "trainer_votes.py": "tests/test_apps.py",
}


class Example(Protocol):
    def __call__(self, name: str, *arguments: str) -> str: ...


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs an example in this process; what it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def percents(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([0-9.]+)%", text)]


def row(text: str, start: str) -> list[float]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return percents(line)


def test_every_example_is_listed_with_its_command_and_tested() -> None:
    files = {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb")}
    listed = re.findall(r"^\| \[(.*?)\]\(\1\) \|.*\| `(.*?)` \|$", (EXAMPLES / "README.md").read_text(), re.M)
    assert {name for name, _ in listed} == files
    assert all(command.endswith(f"examples/{name}") for name, command in listed)
    mine = Path(__file__).read_text()
    assert {name for name in files if f'"{name}"' not in mine} == set()


def test_own_model(example: Example, tmp_path: Path) -> None:
    out = example("own_model.py", "--rounds", "30", "--out", str(tmp_path))
    before, after = row(out, "test accuracy")
    assert after > before + 10
    assert "the same by hand: equal, bit for bit" in out


def test_unequal_voters(example: Example) -> None:
    assert "optimum" in example("unequal_voters.py", "--rounds", "40", "--coordinates", "500")


def test_unequal_voters_are_what_theory_says() -> None:
    demo = module_of("unequal_voters.py")
    measured, predicted = demo.run(rounds=200, coordinates=2000), demo.predictions()
    for name in ("majority", "weighted", "optimum (p known)"):
        sigma = (predicted[name] * (1 - predicted[name]) / (100 * 2000)) ** 0.5
        assert abs(measured[name] - predicted[name]) < 5 * sigma, name
    assert measured["optimum (p known)"] < measured["it-signsgd"] < measured["majority"]


def test_custom_rule(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(signvote.RULES, "trimmed", signvote.RULES["majority"])  # taken out again afterwards
    out = example("custom_rule.py", "--rounds", "3", "--out", str(tmp_path))
    assert all(len(row(out, rule)) == 2 for rule in ("majority", "weighted", "trimmed"))
    assert signvote.RULES["trimmed"].__name__ == "Trimmed"


def test_trimmed_leaves_out_who_is_overruled_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(signvote.RULES, "trimmed", signvote.RULES["majority"])
    layout = Layout([("x", (8,))])
    rule = module_of("custom_rule.py").Trimmed(layout, trim=2)

    def weights(*workers: int) -> list[int]:
        found: list[int] = rule.weights(Voters(workers=workers))[:, 0].tolist()
        return found

    assert weights(0, 1, 2, 3) == [1024] * 4
    counts = torch.tensor([[1], [5], [2], [6]])
    rule.learn(Evidence(workers=(0, 1, 2, 3), mismatches=counts, cast=torch.full((4, 1), 8)))
    assert weights(0, 1, 2, 3) == [1024, 0, 1024, 0]
    assert weights(1, 3) == [1024, 0], "somebody always votes"


@pytest.mark.slow
def test_attack_study(example: Example, tmp_path: Path) -> None:
    out = example("attack_study.py", "--rounds", "4", "--rules", "robust", "--out", str(tmp_path))
    *accuracies, worst = row(out, "robust")
    assert len(accuracies) == 4
    assert worst == min(accuracies)
    assert "anti:5" in (tmp_path / "report.html").read_text()


def test_read_results(example: Example) -> None:
    out = example("read_results.py")
    runs = results.read(FIGURE)["runs"]
    last = {
        (c["rule"], c["recipe"], c["mode"], c["seed"]): run["evaluations"]["accuracy"][-1]
        for run in runs
        if (c := run["config"])
    }
    for recipe, rule in (("paper", "majority"), ("paper", "pooled"), ("tuned", "pooled")):
        means = [sum(last[rule, recipe, mode, seed] for seed in range(3)) / 3 for mode in (1, 2, 3, 4)]
        assert re.search(rf"{rule} +" + " +".join(f"{100 * mean:.2f}" for mean in means) + r"\b", out), out
    more = [last["pooled", "paper", 4, seed] - last["majority", "paper", 4, seed] for seed in range(3)]
    assert f" {100 * sum(more) / 3:.2f} " in next(line for line in out.splitlines() if "mode 4  " in line)


def test_read_results_of_explicit_batch_sizes(example: Example, tmp_path: Path) -> None:
    """The file of a single run: nothing to compare with."""
    example("tracker.py", "--rounds", "2", "--out", str(tmp_path))
    out = example("read_results.py", str(tmp_path / "result.json"), "--reach", "0")
    assert "4 4 4 64" in out
    assert "points more than" not in out


def test_tracker(example: Example, tmp_path: Path) -> None:
    out = example("tracker.py", "--rounds", "4", "--out", str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["start", *["log"] * 5, "finish"]
    assert [e["round"] for e in events] == [0, 0, 1, 2, 3, 4, 4]
    assert events[-2]["bytes_up"] == 4 * 4 * (64 + -(-50_890 // 8))
    assert f"{events[-2]['accuracy']:.1%}" in out.splitlines()[-2]


def as_ranks(rank: int, world: int, *commands: tuple[str, ...]) -> list[str]:
    """Examples in a process that is a rank already, one after the other; what each printed."""
    os.environ["WORLD_SIZE"] = str(world)  # as torchrun does
    dist.init_process_group = lambda backend: None  # type: ignore[assignment, misc]
    dist.destroy_process_group = lambda: None  # type: ignore[assignment, misc]
    printed = []
    for name, *arguments in commands:
        sys.argv = [name, *arguments]
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed.append(out.getvalue())
    return printed


def test_fsdp_votes_and_gpt_on_several_ranks(tmp_path: Path) -> None:
    """FSDP on two nodes of two ranks, then on two ranks without shards, from the checkpoint; the GPT on these two."""
    flags = ("--save", str(tmp_path / "saved"), "--rounds", "30")
    (first,), *others = together(4, as_ranks, ("fsdp_votes.py", *flags), folder=tmp_path)
    assert others == [[""]] * 3
    assert percents(first)[0] > 60
    assert first.endswith("samples of the nodes: (128, 128)\n")
    resumed = ("fsdp_votes.py", "--shards", "1", "--resume", str(tmp_path / "saved"), "--rounds", "3")
    gpt = ("gpt.py", *SMALL_GPT)
    printed, others = together(2, as_ranks, resumed, gpt, (*gpt, "--adamw"), folder=tmp_path)
    assert others == [""] * 3
    first, votes, floats = printed
    assert first.startswith("round 33: ")
    assert first.endswith("samples of the nodes: (64, 64)\n")
    assert 0.125 <= bytes_of(votes) < 0.14, "a bit each way, to one other rank: half of 2 / 8"
    assert bytes_of(floats) == 4.0


SHAPE = ("--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "4")
SMALL_GPT = (*SHAPE, "--rounds", "4", "--every", "2")


def bytes_of(printed: str) -> float:
    *rounds, last = printed.splitlines()
    assert [line.split(":")[0] for line in rounds] == ["round     2", "round     4"]
    assert all(0 < float(line.split()[2]) < 6 for line in rounds), "nats per byte"
    return float(re.findall(r"sent by each: (\S+) bytes per parameter and round", last)[0])


def test_gpt_resumes_as_if_nothing_had_happened(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = example("gpt.py", *SMALL_GPT)
    assert bytes_of(whole) == 0, "a worker alone sends nothing"
    save = torch.save

    def dying(state: dict[str, object], path: Path) -> None:
        if state["round"] == 4:
            raise KeyboardInterrupt
        save(state, path)

    saving = (*SMALL_GPT, "--checkpoint", str(tmp_path / "saved"))
    monkeypatch.setattr(torch, "save", dying)
    with pytest.raises(KeyboardInterrupt):
        example("gpt.py", *saving)
    monkeypatch.undo()
    resumed = example("gpt.py", *saving)
    assert resumed.splitlines()[-2:] == whole.splitlines()[-2:]


def test_the_page_about_fsdp_starts_with_the_example() -> None:
    page = (EXAMPLES.parent / "docs" / "fsdp.md").read_text()
    script = (EXAMPLES / "fsdp_votes.py").read_text()
    assert page.split("```python\n")[1].split("```")[0] == script


@pytest.mark.slow
def test_flower_votes(tmp_path: Path) -> None:
    """In a process of its own, as ray is hard to get rid of; it ends, without a word of warning."""
    script = str(EXAMPLES / "flower_votes.py")
    done = subprocess.run(
        [sys.executable, script, "--rounds", "2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    before, after = row(done.stdout, "test accuracy")
    assert after > before + 10
    assert "5 of 5 nodes voted" in done.stdout


@pytest.mark.slow
def test_the_tour_runs_top_to_bottom(tmp_path: Path) -> None:
    """Warnings would stand among its outputs."""
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    committed = {cell.id: cell.get("outputs") for cell in notebook.cells}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=None).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    text = "".join(output.get("text", "") for output in outputs)
    assert row(text, "weighted   wrong")[0] < row(text, "majority   wrong")[0]
    attacked = dict(re.findall(r"^(\w+) +([0-9.]+)% right under attack$", text, re.M))
    assert float(attacked["robust"]) > float(attacked["weighted"]) + 30
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {i for i, old in committed.items() if old} == {c.id for c in notebook.cells if c.get("outputs")}


def test_the_tour_is_committed_small_and_says_nothing_of_a_machine() -> None:
    text = (EXAMPLES / "tour.ipynb").read_text()
    assert len(text) < 300_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", text)


def one_part(rank: int, world: int, rule: str) -> str:
    """A rank of examples/tree.py."""
    settings = {"rule": rule, "relays": 2, "workers": 6, "rounds": 6, "lose": 2, "check": True}
    text: str = module_of("tree.py").part(rank, Namespace(**settings))
    return text


def test_a_tree_of_relays_decides_as_one_server_also_when_a_relay_dies(tmp_path: Path) -> None:
    found = together(5, one_part, "weighted", folder=tmp_path)
    assert "6 rounds decided as one server would, bit for bit; 3 workers voted in the last" in found[0]
    assert [rank for rank, text in enumerate(found) if text is None] == [2]
