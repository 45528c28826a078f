"""Metrics: how they are measured, and reports that speak of them."""

from __future__ import annotations

import csv
import io
import json
import math
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from signvote import ConfigError, StateError
from signvote.metrics import ACCURACY, LOSS, USUAL, Metric, check_metrics, metrics_of
from signvote.report import figure, markdown, page, table
from signvote.report.experiments import experiments_of
from signvote.report.panels import arranged
from signvote.report.terminal import tables_of
from signvote.results import read, results_of, to_csv, write
from signvote.sim import train
from signvote.sim.gradients import by_class, evaluate
from signvote.tasks import (
    Data,
    Measure,
    Task,
    accuracy,
    cross_entropy,
    loss,
    mae,
    perplexity,
    rmse,
    worst_class,
)
from tests.test_own_tasks import N, X, Y, config, regression, tasks
from tests.test_report import made_up_run

# ---- metrics -------------------------------------------------------------------------------------


@given(st.integers(1, N), st.integers(0, 100))
def test_metrics_do_not_depend_on_the_test_batch(batch: int, seed: int) -> None:
    def sums(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([(outputs - labels).square(), labels, labels.square()], 1)[..., 0]

    def explained(means: Tensor) -> float:
        error, mean, square = means.tolist()
        return float(1 - error / (square - mean**2))

    r2 = Measure(name="R2", more_is_better=True, values=sums, finish=explained)
    torch.manual_seed(seed)
    task = regression(metrics=(rmse(), mae(), loss(), perplexity(), r2))
    model = task.model()
    found = evaluate(task, model, batch)
    with torch.no_grad():
        error = (model(X) - Y).double()
    expected = {
        "rmse": error.square().mean().sqrt(),
        "mae": error.abs().mean(),
        "loss": error.square().mean(),
        "perplexity": error.square().mean().exp(),
        "R2": 1 - error.square().sum() / (Y - Y.mean()).square().sum(),
    }
    assert found == {name: pytest.approx(float(value), rel=1e-4) for name, value in expected.items()}


def test_accuracy_counts_pixels_and_perplexity_may_be_infinite() -> None:
    pixels = tasks()["pixels"]
    model = pixels.model()
    with torch.no_grad():
        hits = model(pixels.test.inputs).argmax(1) == pixels.test.labels
    assert evaluate(pixels, model, 7)["accuracy"] == pytest.approx(float(hits.double().mean()))
    assert perplexity().finish(1e4) == math.inf
    assert math.isnan(perplexity().finish(math.nan))


def test_the_worst_class_is_the_smallest_accuracy_by_class() -> None:
    three = torch.tensor([0, 0, 1, 1, 1, 2])
    data = Data(inputs=torch.eye(6)[:, :4], labels=three)
    task = Task(
        name="classes",
        train=data,
        test=data,
        model=lambda: torch.nn.Linear(4, 4),
        metrics=(worst_class(4), accuracy()),
    )
    for seed in range(20):
        torch.manual_seed(seed)
        model = task.model()
        expected = min(by_class(task, model, 6))
        assert evaluate(task, model, 1 + seed % 6)["worst class"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "round"}, "called 'round'; this name is taken"),
        ({"name": ""}, "has no name"),
        ({"name": "two\nlines"}, "printable"),
        ({"name": " a"}, "without spaces around it"),
        ({"name": "a", "unit": "x" * 61}, "at most 60 characters"),
    ],
)
def test_metrics_that_cannot_be(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Metric(**settings)  # type: ignore[arg-type]


def test_metrics_of_a_task() -> None:
    with pytest.raises(ConfigError, match="two metrics are called 'loss'"):
        regression(metrics=(loss(), loss()))
    with pytest.raises(ConfigError, match="there are 51 metrics; a task needs 1 to 50"):
        check_metrics([Metric(name=f"m{i}") for i in range(51)])
    assert [metric.name for metric in regression(metrics=()).metrics] == ["loss"]
    assert [metric.name for metric in regression(metrics=(), loss=cross_entropy).metrics] == [
        "accuracy",
        "loss",
    ]
    assert metrics_of({}) == USUAL == (ACCURACY, LOSS)
    assert Metric(name="error").rank(math.nan) == math.inf


# ---- results and reports -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two rules on the regression; `majority` is given the larger error."""
    runs = []
    for rule in ("majority", "weighted"):
        out = tmp_path_factory.mktemp(rule)
        run = dict(train(config(rule), regression(), out))
        factor = 2.0 if rule == "majority" else 1.0
        run["evaluations"]["rmse"] = [factor * value for value in (5.0, 4.0, 3.0)]
        runs.append(run)
    return results_of(runs, "signvote compare")


def test_the_table_knows_that_less_is_better(measured: dict[str, Any]) -> None:
    best, other = table(measured)
    assert (best["rule"], best["best"], best["value"]) == ("weighted", True, 3.0)
    assert (other["rule"], other["best"]) == ("majority", False)
    assert best["lead"] == -3.0
    assert best["metric"] == Metric(name="rmse", unit="m")


def test_reports_speak_of_the_metric(measured: dict[str, Any], tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(measured))))
    assert [float(row["rmse"]) for row in rows[:3]] == [10.0, 8.0, 6.0]
    assert "accuracy" not in rows[0]
    assert "own: test rmse in m (less is better) after 6 rounds" in markdown(measured)
    html = page(measured)
    assert "<h2>Final rmse</h2>" in html
    assert "Bold: the lowest mean" in html
    assert "Less is better, so a lead is below 0." in html
    assert "accuracy" not in html.split("<script")[0]
    panel = json.loads(html.split('id="data">')[1].split("</script>")[0])["panels"][0]
    assert panel["metrics"][0] == {
        "name": "rmse",
        "label": "test rmse (m, log scale)",
        "share": False,
        "log": True,
    }
    (terminal,) = tables_of(table(measured))
    assert str(terminal.title) == "Test rmse at the end, less is better"
    figure(measured, tmp_path / "figure.svg")
    assert "test rmse (m)" in (tmp_path / "figure.svg").read_text()


def test_a_panel_of_decades_is_logarithmic(measured: dict[str, Any], tmp_path: Path) -> None:
    spread = json.loads(json.dumps(measured))
    spread["runs"][0]["evaluations"]["rmse"] = [1e4, 1e3, 1e2]
    (panel,), _ = arranged(experiments_of(spread))
    assert panel.is_log
    assert panel.frame[0] < 3 < 1e3 < panel.frame[1]
    assert panel.fall(panel.members[0]) is None
    figure(spread, tmp_path / "figure.png")
    (panel,), _ = arranged(experiments_of(measured))
    assert not panel.is_log


def test_tasks_with_other_metrics_have_their_own_panels_and_tables(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    both = results_of([*measured["runs"], made_up_run("majority"), made_up_run("weighted")])
    html, text = page(both), markdown(both)
    assert "Final rmse, accuracy" in html
    assert text.count("bytes a vote") == 2
    assert "mnist-10k: test accuracy in %" in text
    panels, _ = arranged(experiments_of(both))
    assert [panel.metric.name for panel in panels] == ["rmse", "accuracy"]
    assert len(list(tables_of(table(both)))) == 2
    rows = list(csv.DictReader(io.StringIO(to_csv(both))))
    assert rows[0]["accuracy"] == ""
    assert float(rows[-1]["accuracy"]) > 0.5
    figure(both, tmp_path / "figure.png")


def test_runs_of_one_task_that_measured_different_things_are_refused(measured: dict[str, Any]) -> None:
    other = made_up_run("majority", task="own")
    text = r"some runs of task 'own' measured rmse \(m\) \(less is better\) and loss.*others accuracy.*report them sep"
    with pytest.raises(ConfigError, match=text):
        table(results_of([*measured["runs"], other]))


def test_runs_on_other_data_are_other_experiments(measured: dict[str, Any]) -> None:
    one = measured["runs"][0] | {"data": {"version": "3.11"}}
    two = measured["runs"][1] | {"data": {"version": "3.12"}}
    rows = table(results_of([one, two]))
    assert all(row["lead"] is None for row in rows)
    assert not any(row["best"] for row in rows)


def test_values_that_are_no_numbers_are_reported(measured: dict[str, Any], tmp_path: Path) -> None:
    broken = json.loads(json.dumps(measured))
    broken["runs"][0]["evaluations"]["rmse"] = [math.nan, math.inf, math.nan]
    best, other = table(broken)
    assert (best["rule"], other["rule"]) == ("weighted", "majority")
    assert math.isnan(other["value"])
    page(broken)
    markdown(broken)
    figure(broken, tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("metrics", []),
        ("metrics", [{"name": "rmse", "unit": "m"}] * 2),
        ("metrics", [{"name": 7, "unit": "m"}]),
        ("metrics", [{"name": "round", "unit": ""}]),
        ("metrics", [{"name": "a", "unit": "", "more_is_better": 1}]),
        ("metrics", [{"name": "a", "unit": "", "color": "red"}]),
        ("metrics", {"name": "a"}),
        ("evaluations", {"round": [0], "accuracy": [0.5], "loss": [1.0]}),
        ("evaluations", {"round": [0], "rmse": ["a"], "loss": [1.0]}),
        ("data", {"version": 7}),
    ],
)
def test_damaged_metrics_are_refused(
    measured: dict[str, Any], entry: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    write(path, results_of([measured["runs"][0] | {entry: value}]))
    with pytest.raises(StateError, match=f"has a wrong '{entry}'"):
        read(path)


NAMES = st.text(max_size=12)
NUMBERS = st.floats() | st.none()


@settings(max_examples=60)
@given(
    names=st.lists(NAMES, min_size=1, max_size=3),
    unit=st.sampled_from(["", "%", "m", "<b>", "[/red]", "$x$"]),
    more=st.booleans(),
    values=st.lists(NUMBERS, min_size=6, max_size=6),
)
def test_what_is_read_is_reported(
    names: list[str], unit: str, more: bool, values: list[float | None]
) -> None:
    """Whatever the metrics of a file are called and measured: it is refused in a sentence, or shown everywhere."""
    described = [{"name": name, "unit": unit, "more_is_better": more} for name in names]
    runs = []
    for rule, three in (("majority", values[:3]), ("weighted", values[3:])):
        measured = {"round": [0, 10, 20], **dict.fromkeys(names, three)}
        runs.append(made_up_run(rule) | {"metrics": described, "evaluations": measured})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        write(path, results_of(runs))
        try:
            found = read(path)
        except StateError:
            return
    assert names[0] in page(found) or escape(names[0]) in page(found)
    markdown(found)
    to_csv(found)
    text = io.StringIO()
    console = Console(file=text, width=200)
    for shown in tables_of(table(found)):
        console.print(shown)
    assert "at the end" in text.getvalue()
