"""Tasks of one's own from the command line, and `train` with what Python has at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signvote import ConfigError
from signvote.report import page
from signvote.results import read
from signvote.sim import Config, Trained, train
from signvote.sim.compare import compare, name_of
from signvote.sim.gradients import evaluate
from signvote.sim.study import read_study
from signvote.tasks import load_task
from tests.test_own_tasks import config, regression
from tests.test_package import command

MODULE = '''
"""A regression."""

import torch
from torch import nn

from signvote.tasks import Data, Task, rmse, squared_error

number = 7


def make(noise: float = 0.1, recipe: str = "tuned") -> Task:
    """y = 3 x + noise."""
    torch.manual_seed(0)
    x = torch.randn(80, 1)
    data = Data(inputs=x, labels=3 * x + noise * torch.randn(80, 1))
    return Task(
        name="line", train=data, test=data, model=lambda: nn.Linear(1, 1), loss=squared_error, metrics=(rmse("m"),),
        recipe=recipe,
    )


def other():
    return 7
'''
SMALL = ("--task", "mine.tasks:make", "--batch-sizes", "4", "8", "--rounds", "6", "--evaluate-every", "3")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tasks.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nowhere\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_every_command_takes_a_task_by_its_function() -> None:
    one = command("train", *SMALL, "--task-options", "noise=0.5", "--out", "one")
    assert one.returncode == 0, one.stderr
    assert "Test rmse at the end, less is better" in one.stdout
    assert "rmse (m)" in one.stdout
    (run,) = read("one/results.json")["runs"]
    assert run["config"]["task_options"] == {"noise": 0.5}
    assert run["metrics"] == [{"name": "rmse", "unit": "m", "more_is_better": False}]

    many = command("compare", *SMALL, "--rules", "majority", "weighted", "--seeds", "0", "1", "--out", "many")
    assert many.returncode == 0, many.stderr
    assert "against" in many.stdout
    assert "Final rmse" in Path("many/report.html").read_text()
    assert "test rmse (m)" in Path("many/figure.svg").read_text()
    assert {path.name.split("-")[0] for path in Path("many/runs").iterdir()} == {"mine.tasks_make"}

    study = 'task = "mine.tasks:make"\nrounds = 4\nbatch_sizes = [4, 8]\n[[grid]]\nrules = ["weighted"]\n'
    Path("own.toml").write_text(study + "task_options = { noise = 0.25 }\n")
    (made,) = read_study(Path("own.toml")).values()
    assert made.task_options == {"noise": 0.25}
    assert command("study", "own.toml").returncode == 0
    report = command("report", "one", "many", "own", "--out", "all")
    assert report.returncode == 0, report.stderr
    assert "task_options" in Path("all/report.html").read_text()


@pytest.mark.usefixtures("here")
def test_a_task_names_the_recipe_of_runs_that_name_none() -> None:
    options = {"recipe": "text"}
    own = Config(task="mine.tasks:make", task_options=options, batch_sizes=(4, 8))
    assert own.recipe == load_task("mine.tasks:make", options=options).recipe == "text"
    assert Config(task="mine.tasks:make", task_options=options, recipe="paper").recipe == "paper"
    assert Config(task="mine.tasks:make").recipe == "tuned"


@pytest.mark.usefixtures("here")
def test_a_comparison_makes_each_task_with_its_own_options(tmp_path: Path) -> None:
    configs = [
        config(task="mine.tasks:make", batch_sizes=(4, 8), task_options={"noise": noise})
        for noise in (0.0, 2.0)
    ]
    results = compare(configs, tmp_path / "out", jobs=1)
    quiet, loud = (run["evaluations"]["rmse"][0] for run in results["runs"])
    assert quiet != loud
    assert len({name_of(config) for config in configs}) == 2
    assert "task_options" in page(results)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("nowhere:make", {}, "there is no module 'nowhere' here"),
        ("mine.nowhere:make", {}, "there is no module 'mine.nowhere' here"),
        (":make", {}, "there is no module '' here"),
        ("mine.tasks:mak", {}, r"mine\.tasks has no function 'mak', but make, other"),
        ("mine.tasks:number", {}, "has no function 'number'"),
        ("mine.tasks:other", {}, "made int; wanted a signvote"),
        ("mine.tasks:make", {"loud": 1}, r"takes \(noise: float = 0.1, recipe: .*\).*here are loud=1: got an un"),
        ("mnist-10k", {"loud": 1}, "task 'mnist-10k' takes no options; only a task given as MODULE:FACTORY does"),
        ("mine.tasks", {}, "there is no task 'mine.tasks'.* MODULE:FACTORY"),
    ],
)  # fmt: skip
def test_a_function_that_makes_no_task_is_one_sentence(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_task(name, options=options)


@pytest.mark.usefixtures("here")
def test_what_is_wrong_inside_a_module_is_shown_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        load_task("broken:make")
    with pytest.raises(ConfigError, match=r"model is 'mlp'; task 'mine\.tasks:make' brings its own"):
        load_task("mine.tasks:make", model="mlp")


# ---- train ---------------------------------------------------------------------------------------


def test_train_takes_a_text_and_a_model_and_returns_the_trained_one(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    task = regression(model=lambda: nn.Linear(7, 7))
    trained = train(config(), task, str(tmp_path / "one"), model=model)
    assert isinstance(trained, Trained)
    assert torch.equal(model.weight, before)
    assert not torch.equal(trained.model.get_parameter("weight"), before)
    assert evaluate(task, trained.model, 64)["rmse"] == trained["evaluations"]["rmse"][-1]
    assert json.loads((tmp_path / "one" / "result.json").read_text()) == json.loads(json.dumps(trained))
    again = train(config(), task, tmp_path / "two", model=lambda: model)
    assert again["evaluations"] == trained["evaluations"]


def test_a_trained_model_does_not_change_with_the_next_run(tmp_path: Path) -> None:
    workshop: dict[Any, Any] = {}
    first = train(config(), regression(), tmp_path / "a", workshop=workshop)
    kept = first.model.get_parameter("weight").clone()
    train(config(seed=1), regression(), tmp_path / "b", workshop=workshop)
    assert torch.equal(first.model.get_parameter("weight"), kept)


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "one"
    train(config(), regression(), out, watch=lambda run: run.round == 2)
    with pytest.raises(
        ConfigError, match=r"holds a run already; add --resume to continue it \(in Python, resume=True\)"
    ):
        train(config(), regression(), out)
    done = train(config(), regression(), out, resume=True)
    assert done["status"] == "done"
    (out / "checkpoint.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config(), regression(), out)
    assert json.loads((out / "result.json").read_text())["status"] == "done"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "results.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="holds the results of other runs"):
            train(config(), regression(), tmp_path / "two", resume=resume)


def test_options_are_part_of_the_configuration() -> None:
    mine = Config(task="a:b", recipe="tuned", task_options={"noise": 1})
    assert Config.from_dict(mine.as_dict()) == mine
    assert "task_options=" not in name_of(Config(task="a:b", recipe="tuned"))
