"""docs/tasks.md: every script runs as it is shown, and so do its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from signvote.results import read
from tests.test_package import command
from tests.test_scripts import run

PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = re.findall(r'^```python title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^signvote (.*)$", PAGE, re.MULTILINE)


def test_every_block_is_run() -> None:
    assert PAGE.count("```python") == len(SCRIPTS) + len(FILES) == 4
    assert len(COMMANDS) == 4


@pytest.mark.parametrize(
    ("number", "says"), [(0, r"([\d.]+)% right"), (1, r"([\d.]+) m"), (2, r"([\d.]+) nats")]
)
def test_a_script_learns(number: int, says: str, tmp_path: Path) -> None:
    out = run(SCRIPTS[number], tmp_path)
    found = re.search(says, out)
    assert found, out
    value = float(found[1])
    assert value > 80 if number == 0 else value < 1.5, out


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    for line in COMMANDS:
        done = command(*shlex.split(line))
        assert done.returncode == 0, done.stderr
    (line,) = read("runs/line/results.json")["runs"]
    assert line["evaluations"]["rmse"][-1] < line["evaluations"]["rmse"][0]
    assert "Final rmse" in Path("runs/both/report.html").read_text()
