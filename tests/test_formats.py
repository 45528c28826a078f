"""What an earlier signvote wrote is read; what a later one wrote is refused. tests/golden holds real files.

`1-early` and `1-late` were written by the simulator before and after rules could own ranges of coordinates,
both as format 1; `2` is today's. When a format changes, its files stay and a new folder joins them:
`python -m tests.test_formats tests/golden/NUMBER` writes it.
"""

from __future__ import annotations

import csv
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
from signvote.report import page, table
from signvote.sim import Config, Run, train
from signvote.sim.results import FORMAT, merged, read, results_of, to_csv
from signvote.tasks import Data, Task
from tests.test_report import made_up_run

GOLDEN = Path(__file__).parent / "golden"
RULES: dict[str, dict[str, Any]] = {"pooled": {}, "it-signsgd": {"warmup": 2}}
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
        task="toy", rule=rule, batch_sizes=(2, 4, 8), rounds=8, evaluate_every=2, options=RULES[rule]
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


@pytest.mark.parametrize("rule", RULES)
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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_results_are_shown(folder: Path) -> None:
    results = read(folder / "results.json")
    assert results["format"] == FORMAT
    assert [Config.from_dict(run["config"]) for run in results["runs"]] == [config(rule) for rule in RULES]
    assert {row["rule"] for row in table(results)} == set(RULES)
    assert "<html" in page(json.loads((folder / "results.json").read_text()))


def test_every_format_has_its_files() -> None:
    assert {folder.name[0] for folder in FOLDERS} == {str(n + 1) for n in range(FORMAT)}


def test_of_a_later_signvote() -> None:
    """One sentence: what it is, what this one reads, what to do."""
    later = "format 9 is a later signvote's; this one reads up to {}: install a later one"
    run = Run(config("pooled"), toy())
    layout = Layout([("w", (3,))])
    worker, server = Worker({"w": torch.zeros(3)}, worker_id=0), Server(layout)
    for kept, newest in ((run, 2), (worker, 1), (server, 2), (SignVote(layout), 1)):
        state = kept.state_dict() | {"version": 9}
        with pytest.raises(StateError, match=later.format(newest)):
            kept.load_state_dict(state)
    with pytest.raises(StateError, match="kind 'server'; wanted 'run'"):
        run.load_state_dict(server.state_dict())
    with pytest.raises(StateError, match="version is None, which signvote never wrote"):
        worker.load_state_dict({})


def test_a_single_run_is_read_too(tmp_path: Path) -> None:
    result = train(config("pooled"), toy(), tmp_path)
    assert read(tmp_path / "result.json")["runs"] == [json.loads(json.dumps(result))]


# ---- CSV and merging -----------------------------------------------------------------------------


def test_csv_has_a_row_per_evaluation(tmp_path: Path) -> None:
    result = train(config("pooled"), toy(), tmp_path)
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
