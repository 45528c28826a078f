"""Stored files: every format with an upgrade step is read, any other is refused; compressed results.

tests/golden has a folder for each format of results that signvote reads, named by its number, with files that the
simulator wrote. When a format changes, its folder stays and a new one joins it:
`python -m tests.test_formats tests/golden/NUMBER` writes it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from signvote import Layout, Server, StateError, Worker, checkpoint
from signvote.engines.flower import SignVote
from signvote.formats import upgraded
from signvote.report import page, table
from signvote.report import write as write_report
from signvote.results import COMPRESSED, FORMAT, NAME, files, merged, read, results_file, results_of, to_csv
from signvote.results import write as write_results
from signvote.settings import completed
from signvote.sim import Config, Run, train
from signvote.tasks import Data, Task
from tests.test_report import made_up_run

GOLDEN = Path(__file__).parent / "golden"
RULES: dict[str, dict[str, Any]] = {"weighted": {}, "majority": {}, "it-signsgd": {"warmup": 2}}
GONE = "pooled"  # a rule of release 0.1.0, whose files are still here
FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())


def toy() -> Task:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 4, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))

    train, test = Data(inputs=x[:64], labels=y[:64]), Data(inputs=x[64:], labels=y[64:])
    return Task(name="toy", train=train, test=test, model=model)


def config(rule: str) -> Config:
    return Config(
        task="toy",
        rule=rule,
        batch_sizes=(2, 4, 8),
        rounds=8,
        evaluate_every=2,
        step=1e-3,
        ramp=0.0,
        decay=0.0,
        decays="all",
        options=RULES[rule],
    )


def write(folder: Path) -> None:
    """The files of a format: a finished run of each rule, and its checkpoint after round 5."""
    folder.mkdir(parents=True)
    runs = []
    for rule in RULES:
        runs.append(train(config(rule), toy(), folder / "done"))
        train(config(rule), toy(), folder / "cut", watch=lambda run: run.round == 5)
        shutil.move(folder / "cut" / "checkpoint.safetensors", folder / f"{rule}.safetensors")
        shutil.rmtree(folder / "cut")
        shutil.rmtree(folder / "done")
    (folder / "results.json").write_text(json.dumps(results_of(runs, "signvote compare")))


@pytest.mark.parametrize("rule", ["it-signsgd"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_checkpoint_goes_on(folder: Path, rule: str, tmp_path: Path) -> None:
    shutil.copy(folder / f"{rule}.safetensors", tmp_path / "checkpoint.safetensors")
    saved = checkpoint.load(tmp_path / "checkpoint.safetensors")
    run = Run(config(rule), toy())
    run.load_state_dict(saved)
    assert run.round == 5
    assert run.server is not None
    mine, its = run.server.rule.state_dict(), saved["server"]["rule"]
    for name in set(mine) & set(its):
        same = torch.equal(mine[name], its[name]) if torch.is_tensor(mine[name]) else mine[name] == its[name]
        assert same, name
    result = train(config(rule), toy(), tmp_path, resume=True)
    assert (result["status"], result["rounds_done"], result["format"]) == ("done", 8, FORMAT)
    assert result["evaluations"]["round"] == [0, 2, 4, 6, 8]


def test_a_checkpoint_of_a_rule_that_is_gone_is_refused() -> None:
    """Another rule would go on from it with other weights: that is another run."""
    saved = checkpoint.load(GOLDEN / "3" / f"{GONE}.safetensors")
    with pytest.raises(StateError, match=f"rule '{GONE}'"):
        Run(config("majority"), toy()).load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:the rule:FutureWarning")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_results_are_shown(folder: Path) -> None:
    results = read(folder / "results.json")
    assert results["format"] == FORMAT
    rules = [Config.from_dict(run["config"]).rule for run in results["runs"]]
    assert rules == ["weighted", "it-signsgd"]
    assert {row["rule"] for row in table(results)} == {GONE, "it-signsgd"}
    assert "<html" in page(json.loads((folder / "results.json").read_text()))


def test_every_format_has_its_files() -> None:
    newest = FOLDERS[-1].name
    assert newest == str(FORMAT)
    stored = json.loads((GOLDEN / newest / "results.json").read_text())
    found = read(GOLDEN / newest / "results.json")
    for run, its in zip(found["runs"], stored["runs"], strict=True):
        assert run["config"] == completed(its["config"]), "settings that came later are at their default"
        assert run | {"config": its["config"]} == its


def test_formats_without_a_step_are_refused() -> None:
    steps = {2: lambda stored: {"b": stored["a"]}, 3: lambda stored: {"c": stored["b"]}}
    assert upgraded({"version": 2, "a": 7}, "it", 4, steps) == {"version": 4, "c": 7}
    assert upgraded({"version": 4, "c": 7}, "it", 4, steps) == {"version": 4, "c": 7}
    message = "it: format 1 is an earlier signvote's; this one reads from 2 on: run it again, or install the earlier"
    with pytest.raises(StateError, match=message):
        upgraded({"version": 1, "a": 7}, "it", 4, steps)


def test_of_another_signvote() -> None:
    """One sentence: what it is, what this one reads, what to do."""
    later = "format 9 is a later signvote's; this one reads up to {}: install a later one"
    earlier = "format {} is an earlier signvote's; this one reads from {} on: run it again"
    run = Run(config("majority"), toy())
    layout = Layout([("w", (3,))])
    worker, server = Worker({"w": torch.zeros(3)}, worker_id=0), Server(layout)
    for kept, oldest, newest in ((run, 3, 3), (worker, 1, 1), (server, 2, 2), (SignVote(layout), 1, 2)):
        state = kept.state_dict()
        with pytest.raises(StateError, match=later.format(newest)):
            kept.load_state_dict(state | {"version": 9})
        if oldest > 1:
            with pytest.raises(StateError, match=earlier.format(oldest - 1, oldest)):
                kept.load_state_dict(state | {"version": oldest - 1})
    with pytest.raises(StateError, match="kind 'server'; wanted 'run'"):
        run.load_state_dict(server.state_dict())
    with pytest.raises(StateError, match="version is None, which signvote never wrote"):
        worker.load_state_dict({})


def test_a_single_run_is_read_too(tmp_path: Path) -> None:
    result = train(config("majority"), toy(), tmp_path)
    assert read(tmp_path / "result.json")["runs"] == [json.loads(json.dumps(result))]


# ---- compressed ----------------------------------------------------------------------------------


def test_compressed_results_are_the_same_results_and_the_same_bytes(tmp_path: Path) -> None:
    results = results_of([made_up_run(seed=s) for s in range(9)], "signvote compare")
    plain, compressed = tmp_path / NAME, tmp_path / COMPRESSED
    write_results(plain, results)
    write_results(compressed, results)
    assert read(compressed) == read(plain)
    assert compressed.stat().st_size < plain.stat().st_size / 3
    first = compressed.read_bytes()
    write_results(compressed, results)
    assert compressed.read_bytes() == first
    renamed = compressed.rename(tmp_path / "mine.json")
    assert read(renamed) == read(plain), "known by its first bytes, not by its name"


def test_a_folder_that_holds_a_compressed_file_keeps_that_form(tmp_path: Path) -> None:
    assert results_file(tmp_path) == tmp_path / NAME
    results = results_of([made_up_run()], "signvote compare")
    write_results(tmp_path / COMPRESSED, results)
    assert results_file(tmp_path) == tmp_path / COMPRESSED
    write_report(results_of([made_up_run(), made_up_run(seed=1)]), tmp_path)
    assert len(read(tmp_path / COMPRESSED)["runs"]) == 2
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing", "header", "not JSON", "not UTF-8"])
def test_a_damaged_compressed_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / COMPRESSED
    write_results(path, results_of([made_up_run()]))
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = {
        "cut": data[:middle],
        "flipped": data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :],
        "trailing": data + b"more",
        "header": data[:2],
        "not JSON": gzip.compress(b"{"),
        "not UTF-8": gzip.compress(b"\xff"),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(StateError, match=r"results\.json\.gz is no results file of signvote: \S"):
        read(path)


def test_a_small_file_cannot_ask_for_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    results = results_of([], "")
    room = 1000 - len(json.dumps(results))
    write_results(tmp_path / COMPRESSED, results_of([], "x" * room))
    assert len(read(tmp_path / COMPRESSED)["command"]) == room
    write_results(tmp_path / COMPRESSED, results_of([], "x" * (room + 1)))
    with pytest.raises(
        StateError, match=r"gz unpacks to more than 1,000 bytes; if you trust it, unpack it with gunzip"
    ):
        read(tmp_path / COMPRESSED)


# ---- CSV and merging -----------------------------------------------------------------------------


def test_csv_has_a_row_per_evaluation(tmp_path: Path) -> None:
    result = train(config("majority"), toy(), tmp_path)
    rows = list(csv.DictReader(io.StringIO(to_csv(results_of([result])))))
    assert [int(row["round"]) for row in rows] == [0, 2, 4, 6, 8]
    assert [float(row["accuracy"]) for row in rows] == result["evaluations"]["accuracy"]
    ballot = 64 + 5  # N = 37: a header and 37 bits
    assert [int(row["bytes_up"]) for row in rows] == [3 * ballot * t for t in (0, 2, 4, 6, 8)]
    assert rows[0]["batch_sizes"] == "2 4 8"
    assert rows[0]["options"] == rows[0]["mode"] == rows[0]["sign_error"] == ""


def test_merging_takes_a_run_once_and_tells_different_results_apart() -> None:
    one, again, other = made_up_run(seed=0), made_up_run(seed=0), made_up_run("majority", seed=0)
    both = merged({"a": results_of([one, other], "x"), "b": results_of([again], "x\ny")})
    assert [run["evaluations"] for run in both["runs"]] == [one["evaluations"], other["evaluations"]]
    assert both["command"] == "x\ny"
    again["evaluations"] = {name: values[:5] for name, values in again["evaluations"].items()}
    cut = merged({"a": results_of([{**again, "status": "interrupted"}]), "b": results_of([one])})
    assert [run["status"] for run in cut["runs"]] == ["done"]
    third = made_up_run(seed=1)
    torn = merged({"a": results_of([one, third, other]), "b": results_of([again])})
    assert [run["config"].get("from") for run in torn["runs"]] == ["a", "b", "a", None]
    assert {row["detail"] for row in table(torn)} == {"from a", "from b", ""}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
