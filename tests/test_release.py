"""What is published: wheel and sdist build, hold the same, and run where only they are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import signvote

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "signvote"
LIMIT = 400  # lines of a file


def build(kind: str, where: Path, out: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=where, check=True, capture_output=True,
    )  # fmt: skip
    (built,) = out.iterdir()
    return built


def files_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert files_in(wheel) == {name.removeprefix("src/") for name in tracked}
    assert wheel.stat().st_size < 3_000_000


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert files_in(build("wheel", unpacked, tmp_path / "again")) == files_in(wheel)
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "tests", "benchmarks"} <= {
        path.name for path in unpacked.iterdir()
    }


@pytest.mark.slow
def test_it_runs_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """Dependencies are lent from here; `make dist` installs them for real."""
    venv.create(tmp_path / "empty", with_pip=False)
    site = tmp_path / "empty" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    where = "import signvote; print(signvote.__file__)"
    python = str(tmp_path / "empty" / "bin" / "python")

    plain = os.environ | {"SIGNVOTE_KERNELS": "reference"}  # nothing to compile

    def run(*arguments: str) -> str:
        return subprocess.run(
            [python, *arguments], cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
        ).stdout

    assert Path(run("-c", where).strip()).is_relative_to(site)
    command = ("-c", "from signvote.cli import main; main()")
    assert run(*command, "version").strip() == signvote.__version__
    shown = run(*command, "train", "--model", "mlp", "--rounds", "2", "--evaluate-every", "1", "--out", "run")
    assert "weighted" in shown
    assert (tmp_path / "run" / "report.html").exists()
    assert "pyproject.toml" in run(*command, "flower-app", "app")


def test_the_version_stands_in_one_place() -> None:
    assert re.search(rf"^version: {signvote.__version__}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"\n## [{signvote.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert (
        "version" not in (ROOT / "pyproject.toml").read_text().split("[build-system]")[1].split("dynamic")[0]
    )


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks", "paper", "studies", "docs"])
def test_no_file_is_too_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= LIMIT, path
