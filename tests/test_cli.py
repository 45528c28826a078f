"""The commands as a user types them: help, completion, doctor, report, what is said when something is wrong."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from signvote import checkpoint
from signvote.cli import COMMANDS, parse
from signvote.cli.training import Report
from signvote.doctor import findings
from signvote.errors import ConfigError
from signvote.report import table
from signvote.results import write
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


def test_commands_and_flags_have_one_spelling() -> None:
    """The same setting has the same name everywhere; many of it, the plural."""
    fields = {name: set(getattr(kind, "__dataclass_fields__", {})) for name, kind in COMMANDS.items()}
    assert fields["train"] - fields["compare"] == {"rule", "mode", "seed", "resume", "options"}
    assert fields["compare"] - fields["train"] == {"rules", "modes", "seeds", "jobs"}
    assert {"out", "device", "precision", "data_dir", "tensorboard", "seeds", "jobs"} <= fields["study"]


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=COMMANDS)
def test_every_flag_is_explained(kind: type) -> None:
    """A text after each field is its help."""
    for each in kind.__mro__[:-1]:
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(after, ast.Expr), ast.unparse(field)


def test_together_is_a_flag_of_every_command_that_trains() -> None:
    """It asks for the joint pass on a CPU too; without it, a GPU alone has it."""
    lines = [["train"], ["compare"], ["study", "paper/fig1-mnist.toml"]]
    for line in lines:
        assert not parse(line).machine().is_together
        assert parse([*line, "--together"]).machine().is_together
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
