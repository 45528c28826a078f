"""docs/extend.md: every diff applies to the present tree, passes the tests it adds, and its command runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import launched

ROOT = Path(__file__).parent.parent
SECTIONS = (ROOT / "docs" / "extend.md").read_text().split("\n## ")[1:]
SMALL = {r"--rounds \d+": "--rounds 2", r"--mode (\d)": r"--mode \1 --total 120"}
PASSING = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")  # what other tests may be writing meanwhile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="diffs are applied by git"),
]


def blocks(section: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what diffs may touch; compiled kernels come along, as they are found by time and size."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=PASSING)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(tree: Path, *command: str, text: str | None = None) -> str:
    settings = {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(
        command, cwd=tree, env=os.environ | settings, input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ready(command: str) -> list[str]:
    """A command of the page in small form, as arguments of Python."""
    for pattern, small in SMALL.items():
        command = re.sub(pattern, small, command)
    program, *arguments = shlex.split(command)
    if program == "signvote":
        return ["-c", "from signvote.cli import main; main()", *arguments]
    assert (program, *arguments[:2]) == ("python", "-m", "pytest"), command
    return [*arguments, "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]  # before the fork


def test_the_page_shows_one_of_each() -> None:
    titles = [section.splitlines()[0] for section in SECTIONS]
    assert titles == ["A rule", "An attack", "A task", "A momentum form", "An engine"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.splitlines()[0].split()[-1])
def test_a_diff_applies_and_what_it_adds_works(tree: Path, section: str) -> None:
    (diff,), (commands,) = blocks(section, "diff"), blocks(section, "")
    run(tree, "git", "apply", "--whitespace=error-all", "-", text=diff)
    changed = [str(tree / name) for name in re.findall(r"^\+\+\+ b/(\S+\.py)$", diff, re.MULTILINE)]
    run(tree, sys.executable, "-m", "ruff", "check", "--no-cache", *changed)
    run(tree, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *changed)
    for command in commands.splitlines():
        done = launched(*ready(command), cwd=tree, PYTHONPATH=str(tree / "src"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("The page:" if command.startswith("signvote") else "100%") in done.stdout, done.stdout
