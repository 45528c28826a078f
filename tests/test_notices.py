"""Quorum and notices in the simulator, its results and its reports."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from signvote import RULES, report
from signvote.report import markdown, page
from signvote.results import read
from signvote.sim import Config, train
from signvote.sim.config import YARDSTICKS
from signvote.sim.machine import Machine
from signvote.sim.run import Run
from signvote.tasks import Task
from tests.strategies import RULES_AND_ZEROS
from tests.test_report import made_up_run, results_of

LOCAL = ("diloco", "sparseloco")
ALWAYS = [name for name in YARDSTICKS if name not in LOCAL]

both_ways = pytest.mark.parametrize("together", [False, True])


def short(rule: str, **settings: Any) -> Config:
    usual: dict[str, Any] = {"batch_sizes": (4,) * 15, "rounds": 110, "evaluate_every": 110}
    return Config(task="mnist-10k", model="mlp", rule=rule, **(usual | settings))


def finished(config: Config, task: Task, *, together: bool = False) -> Run:
    run = Run(config, task, Machine(together=together))
    with run.machine.ready():
        while run.round < config.rounds:
            run.step()
    return run


def needs_of(rule: str) -> dict[str, Any]:
    """The settings without which a rule is refused."""
    return {"local_steps": 2} if rule in LOCAL else {}


# ---- nobody voted, nothing moves -----------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    ("rule", "zeros"),
    [*RULES_AND_ZEROS, *product(ALWAYS, ("coin", "abstain")), *product(LOCAL, ("coin",))],
)
def test_below_the_quorum_nothing_moves(digits: Task, rule: str, zeros: Any, together: bool) -> None:
    """Two of three vote, of three that must. Weight decay does not move a parameter either."""
    few = {"batch_sizes": (4, 8, 16), "absent": ("1:2",), "decay": 0.5, "rounds": 3, "evaluate_every": 3}
    config = short(rule, zeros=zeros, min_voters=3, **few, **needs_of(rule))
    run = Run(config, digits, Machine(together=together))
    with run.machine.ready():
        run.step()
        moved = run.gradients.x.clone()
        run.step()
        run.step()
    assert not torch.equal(moved, Run(config, digits).gradients.x)
    assert torch.equal(run.gradients.x, moved)
    result = run.result("done")
    assert result["undecided"] == 2
    if run.server is not None:
        assert not run.server.report.is_decided
        assert result["notices"] == ["round 2: fewer than 3 voted, so no parameter moved"]


@pytest.mark.parametrize("rule", [*RULES, *YARDSTICKS])
def test_nobody_there_and_nothing_moves(digits: Task, rule: str) -> None:
    config = short(rule, miss=1.0, decay=0.5, rounds=2, **needs_of(rule))
    run = finished(config, digits)
    assert torch.equal(run.gradients.x, Run(config, digits).gradients.x)
    assert run.result("done")["undecided"] == 2


def test_rounds_that_decided_nothing_are_on_the_page(digits: Task, tmp_path: Path) -> None:
    config = short("majority", batch_sizes=(4, 8, 16), absent=("1:2",), min_voters=3, rounds=3)
    result = train(config, digits, tmp_path)
    report.write(results_of(result), tmp_path)
    said = "rounds in which too few voted and no parameter moved: 2"
    assert said in (tmp_path / "report.html").read_text()
    assert said in (tmp_path / "results.md").read_text()
    assert read(tmp_path / "results.json")["runs"][0]["undecided"] == 2


# ---- notices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, "oracle"])
def test_an_ordinary_run_of_15_honest_workers_has_no_notice(
    digits: Task, tmp_path: Path, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(short(rule), digits, tmp_path, machine=Machine(together=True))
    assert (result["notices"], result["undecided"]) == ([], 0)
    assert "signvote" not in caplog.text
    results = results_of(result)
    assert "Notices" not in page(results) + markdown(results)


@both_ways
def test_an_attacker_is_noticed_logged_once_and_on_the_page(
    digits: Task, tmp_path: Path, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = short("majority", attack="invert:1", batch_sizes=(16,) * 15)
    result = train(config, digits, tmp_path, machine=Machine(together=together))
    (notice,) = result["notices"]
    assert notice.startswith("round 50: worker 14 was overruled in ")
    lines = [record for record in caplog.records if record.name == "signvote"]
    assert [(line.levelno, line.getMessage()) for line in lines] == [
        (logging.WARNING, f"signvote: majority, seed 0: {notice}")
    ]
    report.write(results_of(result), tmp_path)
    assert f"<li>{notice}</li>" in (tmp_path / "report.html").read_text()
    assert f", seed 0): {notice}\n" in (tmp_path / "results.md").read_text()


def test_a_resumed_run_repeats_no_notice(
    digits: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = short("weighted", batch_sizes=(64, 1, 1, 1))
    whole = train(config, digits, tmp_path / "whole")
    assert any("more weight than all others" in notice for notice in whole["notices"])
    caplog.clear()
    for stop in (30, 70, 110):
        rest = train(config, digits, tmp_path / "cut", resume=True, watch=lambda run: run.round == stop)  # noqa: B023
    assert rest["notices"] == whole["notices"]
    assert len(caplog.records) == len(whole["notices"])


def test_notices_of_a_file_are_text_and_few(tmp_path: Path) -> None:
    run = made_up_run() | {"notices": ["<script>alert(1)</script> | x"], "undecided": 1234}
    text = page(results_of(run))
    assert "&lt;script&gt;alert(1)" in text
    assert "no parameter moved: 1,234" in text
    assert "no parameter moved: 1,234 (and 1 more)\n" in markdown(results_of(run))
    assert "&lt;script>alert(1)&lt;/script> \\| x\n" in markdown(results_of(run | {"undecided": 0}))
    path = tmp_path / "results.json"
    for name, wrong in (("notices", ["a"] * 101), ("notices", [1]), ("notices", "a"), ("undecided", -1)):
        path.write_text(json.dumps(results_of(run | {name: wrong})))
        with pytest.raises(Exception, match=f"has a wrong '{name}'"):
            read(path)
