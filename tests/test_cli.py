"""The commands as a user types them: help, completion, doctor, report, what is said when something is wrong."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_origin, get_type_hints

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from signvote import checkpoint
from signvote.cli import training
from signvote.cli.commands import COMMANDS, ELSEWHERE, parse, run
from signvote.cli.flags import GROUPS
from signvote.cli.progress import Bars, Lines
from signvote.cli.showing import path_text
from signvote.cli.training import Report
from signvote.doctor import findings
from signvote.errors import ConfigError
from signvote.report import table
from signvote.results import write
from signvote.settings import SETTINGS
from tests.test_package import command
from tests.test_report import made_up_run, results_of


def test_help_names_every_command_in_a_line_and_each_explains_itself() -> None:
    overview = command("--help").stdout
    for name, kind in COMMANDS.items():
        assert f"• {name} " in overview
        assert (kind.__doc__ or "").splitlines()[0][:30] in overview
    assert "Ctrl-C stops after the" not in overview
    train = command("train", "--help").stdout
    assert "Ctrl-C stops after the" in train
    assert "signvote train --rule robust" in train


def flags_of(command: type) -> set[str]:
    """The flags of a command and its groups."""
    hints = get_type_hints(command)
    groups = [get_origin(hint) is None and hint for hint in hints.values()]
    inside = [fields(group) for group in groups if is_dataclass(group)]
    return {field.name for group in inside for field in group} | hints.keys() - GROUPS.keys()


def test_commands_and_flags_have_one_spelling() -> None:
    """The same setting has the same name everywhere; many of it, the plural."""
    flags = {name: flags_of(kind) for name, kind in COMMANDS.items()}
    assert flags["train"] - flags["compare"] == {"rule", "mode", "seed", "resume", "options"}
    assert flags["compare"] - flags["train"] == {"rules", "modes", "seeds", "jobs"}
    assert {"out", "device", "precision", "data_dir", "tensorboard", "seeds", "jobs"} <= flags["study"]


def test_every_setting_is_in_one_group_of_the_help() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SETTINGS)


GROUPED = [
    training.Whats,
    training.Whos,
    training.Hows,
    training.TrainPlace,
    training.ComparePlace,
    training.StudyPlace,
]


@pytest.mark.parametrize("kind", [*COMMANDS.values(), *GROUPED], ids=lambda kind: kind.__name__)
def test_every_flag_is_explained(kind: type) -> None:
    """A text after each field is its help; a group has one of its own."""
    for each in kind.__mro__[:-1]:
        assert each.__doc__
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) not in GROUPS:
                assert isinstance(after, ast.Expr), ast.unparse(field)


def test_the_help_has_groups_and_says_what_a_default_comes_to() -> None:
    shown = " ".join(re.sub("[│╭╰─╮╯]+", " ", command("train", "--help").stdout).split())
    places = [
        shown.index(text) for text in ("What to train.", "Who takes part", "How votes", "Where to compute")
    ]
    assert places == sorted(places)
    assert "--step FLOAT Step size. (default: tuned 0.003, text " in shown
    assert "(default: a sixth of --rounds, at most 50)" in shown
    assert "None" not in shown


def test_a_command_without_arguments_shows_the_help_and_a_version_is_a_flag_too() -> None:
    bare = command()
    assert (bare.returncode, bare.stdout) == (0, command("--help").stdout)
    assert command("--version").stdout == command("version").stdout


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_names_of_other_programs_point_to_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argument in (flag, f"{flag}=1"):
        with pytest.raises(SystemExit):
            run(["train", argument])
        assert f"signvote: there is no {flag}: {ELSEWHERE[flag]}" in capsys.readouterr().err
    for ours in re.findall("--[a-z-]+", ELSEWHERE[flag]):
        assert ours[2:].replace("-", "_") in flags_of(COMMANDS["train"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_flag_leads_to_the_help_of_its_command(name: str) -> None:
    wrong = command(name, "--no-such-flag")
    assert wrong.returncode == 2
    assert f"signvote {name} --help" in wrong.stderr


def test_a_command_whose_reader_has_seen_enough_ends_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", "from signvote.cli import main; main()", "train", "--help"]
    ended = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_without_a_terminal_a_line_shows_each_tenth_and_each_half_minute() -> None:
    said: list[str] = []
    clock = [0.0]
    lines = Lines({"a": 1000, "b": 4}, said.append, lambda: clock[0])
    for round in range(1, 1001):
        lines.show(0, round, "90 %" if round > 500 else "")
    assert said == [
        f"[1/2] a: {round} of 1000 rounds{', 90 %' if round > 500 else ''}" for round in range(100, 1001, 100)
    ]
    said.clear()
    for seconds in (10.0, 29.0, 31.0, 50.0, 62.0):
        clock[0] = seconds
        lines.show(0, 1000, "")
    assert said == ["[1/2] a: 1000 of 1000 rounds"] * 2
    lines.show(1, 3, "")
    assert said[2:] == ["[2/2] b: 3 of 4 rounds"]


def test_in_a_terminal_bars_show_the_runs_that_are_under_way() -> None:
    shown = io.StringIO()
    with Progress(console=Console(file=shown, force_terminal=True), auto_refresh=False) as progress:
        bars = Bars({"a": 10, "b": 10}, progress)
        bars.show(0, 10, "")
        bars.show(1, 3, "")
    visible = {bar.description: bar.visible for bar in progress.tasks}
    assert visible == {"all runs": True, "a": False, "b": True}
    assert progress.tasks[0].completed == 13


def test_a_path_is_a_link_in_a_terminal_and_plain_text_elsewhere(tmp_path: Path) -> None:
    for terminal in (True, False):
        shown = io.StringIO()
        Console(file=shown, force_terminal=terminal, color_system="standard" if terminal else None).print(
            path_text(tmp_path / "a b.html"), soft_wrap=True
        )
        text = shown.getvalue()
        assert "a b.html" in text
        assert ("\x1b]8;" in text) == (f"{tmp_path.as_uri()}/a%20b.html" in text) == terminal
    assert path_text(tmp_path).plain == str(tmp_path)  # outside of the current folder: no chain of ..
    assert path_text(Path("runs/demo")).plain == "runs/demo"


def test_together_is_a_flag_of_every_command_that_trains() -> None:
    """It asks for the joint pass on a CPU too; without it, a GPU alone has it."""
    lines = [["train"], ["compare"], ["study", "paper/fig1-mnist.toml"]]
    for line in lines:
        assert not parse(line).where.machine().is_together
        assert parse([*line, "--together"]).where.machine().is_together
        assert "all workers in one pass" in " ".join(command(line[0], "--help").stdout.split())
    assert parse([*lines[2], "--together"])._command() == "signvote study paper/fig1-mnist.toml --together"


@pytest.mark.slow
def test_together_from_the_command_line_gives_the_same_parameters(tmp_path: Path) -> None:
    small = ("--model", "mlp", "--rounds", "2", "--batch-sizes", "4", "8", "16")
    for name, flags in (("one", ()), ("all", ("--together",))):
        assert command("train", *small, *flags, "--out", str(tmp_path / name)).returncode == 0
    one, every = (checkpoint.load(tmp_path / name / "checkpoint.safetensors") for name in ("one", "all"))
    assert one["config"] == every["config"]
    assert all(torch.equal(p, every["model"][name]) for name, p in one["model"].items())


@pytest.mark.parametrize("name", ["results.json", "results.json.gz"])
def test_train_does_not_write_over_the_results_of_other_runs(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, results_of(made_up_run()))
    before = (tmp_path / name).read_bytes()
    for resume in ([], ["--resume"]):
        train = parse(["train", "--model", "mlp", "--rounds", "1", "--out", str(tmp_path), *resume])
        with pytest.raises(ConfigError, match="holds the results of other runs; choose another folder"):
            train.run()
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, tmp_path: Path) -> None:
    script = command("completion", shell).stdout
    assert "signvote" in script
    if shell == "bash":
        (tmp_path / "script").write_text(script)
        ask = (
            f"source {tmp_path / 'script'}; COMP_WORDS=(signvote do); COMP_CWORD=1; COMP_LINE='signvote do'; "
            'COMP_POINT=11; f=$(complete -p signvote | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
            '$f signvote do signvote; echo "${COMPREPLY[@]}"'
        )
        told = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
        assert told.stdout.split() == ["doctor"]


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signvote.bench.WARM_UP_SECONDS", 0.0)
    found = {finding.what: finding for finding in findings(tmp_path)}
    assert found["versions"].text.startswith("signvote ")
    assert found["kernels on the CPU"].text == "numba"
    assert re.match(r"pack \d+\.\d\d, majority", found["speed"].text)
    assert (found["mnist-10k"].good, found["mnist-10k"].text) == (True, "needs no download")
    assert not found["mnist"].good
    assert "and 3 more: signvote data mnist, or --data-dir" in found["mnist"].text
    assert "gloo" in found["torch.distributed"].text
    monkeypatch.setattr("signvote.doctor.EXTRAS", {"no-such-package": ("nothing", "signvote[nothing]")})
    monkeypatch.setenv("SIGNVOTE_KERNELS", "reference")
    found = {finding.what: finding for finding in findings(tmp_path)}
    assert found["no-such-package"].text == "needed for nothing: pip install 'signvote[nothing]'"
    assert found["kernels on the CPU"].text == "plain torch, as SIGNVOTE_KERNELS=reference says"
    run = command("doctor", "--data-dir", str(tmp_path))
    assert run.returncode == 0
    assert "missing cifar10: " in run.stdout
    assert "pip install 'signvote[nothing]'" in run.stdout


def test_report_merges_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = (0, 1, 2)
    one = results_of(*(made_up_run("majority", seed=s) for s in seeds))
    two = results_of(*(made_up_run("weighted", seed=s) for s in seeds), made_up_run("majority", seed=0))
    for name, results in (("one", one), ("two", two)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    (tmp_path / "alone.json").write_text(json.dumps(made_up_run("robust")))
    out = tmp_path / "out"
    Report(folders=(tmp_path / "one", tmp_path / "two", tmp_path / "alone.json"), out=out).run()
    merged = json.loads((out / "results.json").read_text())
    assert len(merged["runs"]) == 7
    names = {"figure.png", "figure.svg", "report.html", "results.csv", "results.json", "results.md"}
    assert {path.name for path in out.iterdir()} == names
    assert "against" in capsys.readouterr().out
    assert "in points, paired by seed" in (out / "report.html").read_text()
    lead = {row["rule"]: (row["lead"], row["lead_spread"]) for row in table(merged)}
    last = {
        (run["config"]["rule"], run["config"]["seed"]): run["evaluations"]["accuracy"][-1]
        for run in merged["runs"]
    }
    by_seed = [last["weighted", s] - last["majority", s] for s in seeds]
    assert lead["weighted"][0] == pytest.approx(sum(by_seed) / 3)
    assert lead["robust"] == (pytest.approx(last["robust", 0] - last["majority", 0]), None)
    assert lead["majority"] == (None, None)
    assert {row["rule"]: row["lead"] for row in table(merged, "robust")}["robust"] is None


def test_a_report_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report: give the folders of some runs"):
        Report(folders=()).run()
    with pytest.raises(ConfigError, match=r"holds no results.json or result.json; give a folder that train"):
        Report(folders=(tmp_path,)).run()
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results_of(made_up_run())))
    with pytest.raises(ConfigError, match="there is no rule 'poled'; did you mean 'pooled'"):
        Report(folders=(tmp_path,), baseline="poled").run()
