"""What the package promises as a whole: who imports whom, what is public, what a newcomer runs."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

import signvote
from signvote.cli import explained, main
from signvote.core.rules import RULES, summary

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "signvote"
LAYERS = [
    "errors",
    "formats",
    "names",
    "atomic",
    "spool",
    "metrics",
    "recipes",
    "settings",
    "results",
    "kernels",
    "core",
    "checkpoint",
    "engines",
    "tasks",
    "sim",
    "report",
    "bench",
    "bench_cuda",
    "doctor",
    "cli",
    "__main__",
]  # each may import those before it


MAY_IMPORT: dict[str, set[str]] = {  # folder -> other folders of the repository; all may import signvote
    "src": set(),
    "examples": set(),
    "docs": set(),
    "paper": set(),
    "studies": {"paper"},
    "tests": {"paper", "studies"},
    "soak": {"tests"},
    "benchmarks": {"tests"},
}


def all_imports_of(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in the file; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    """The same, of signvote alone."""
    return {name for name in all_imports_of(path) if name.startswith("signvote.")}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports_of(path) - {"signvote.__version__"}:
        assert LAYERS.index(name.split(".")[1]) <= LAYERS.index(own), f"{path.name} imports {name}"


def test_no_engine_imports_another() -> None:
    """An engine is a folder or a module of `engines`."""
    engines = SOURCE / "engines"
    for path in engines.rglob("*.py"):
        own = path.relative_to(engines).parts[0].removesuffix(".py")
        for name in imports_of(path):
            if name.startswith("signvote.engines."):
                assert name.split(".")[2] == own, f"{path.relative_to(engines)} imports {name}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_no_others(folder: str) -> None:
    """Among them: only benchmarks import benchmarks."""
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[folder] - {folder}
    for path in (ROOT / folder).rglob("*.py"):
        found = {name.split(".")[0] for name in all_imports_of(path)}
        assert not found & forbidden, f"{path.relative_to(ROOT)} imports {found & forbidden}"


def test_contributing_explains_every_folder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(name) for name in tracked.stdout.splitlines()]
    folders = {path.parts[0] for path in paths if len(path.parts) > 1} - {"src"}
    packages = {"/".join(path.parts[:3]) for path in paths if path.parts[0] == "src" and len(path.parts) > 3}
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    explained = {name for row in rows for name in re.findall("`(.+?)`", row)}
    assert folders | packages <= explained


def test_ci_runs_lint_and_tests_on_every_python_and_at_both_ends_of_the_range_of_torch() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups())  # type: ignore[union-attr]
    pythons = [f"3.{minor}" for minor in range(first, end)]
    assert "python: [" + ", ".join(f'"{version}"' for version in pythons) + "]" in text
    assert [name[-4:] for name in project["classifiers"] if ":: Python ::" in name] == pythons
    (torch,) = [need for need in project["dependencies"] if need.startswith("torch")]
    oldest, after = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())  # type: ignore[union-attr]
    tried = re.findall(r'"(2[.][0-9]+[.][0-9]+)"', text)
    assert tried == [f"2.{oldest}.0", f"2.{after - 1}.0"]
    install = (ROOT / "docs" / "install.md").read_text()
    assert all(version in install for version in [*tried, *pythons])
    assert re.findall(r"make \w+", text) == ["make lint", "make test"]


@pytest.mark.parametrize("path", sorted((SOURCE / "core").glob("*.py")), ids=lambda p: p.name)
def test_core_is_pure(path: Path) -> None:
    """No clock, no files, no printing, no global randomness."""
    tree = ast.parse(path.read_text())
    banned = {"time", "datetime", "random", "os", "pathlib", "logging", "sys", "io", "pickle", "tempfile"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & banned
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in banned
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"print", "open", "input"}
            assert not called.startswith(("torch.rand", "torch.manual_seed", "np.random"))


def test_no_pickle_anywhere() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "torch.save" not in text


HEAVY = ("torch", "numpy", "numba", "triton", "flwr", "safetensors", "matplotlib")


def loaded_by(code: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    """Those of the modules that a process of its own has loaded when it ends."""
    said = f"import atexit, sys; atexit.register(lambda: print([m for m in {modules} if m in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", f"{said}\n{code}"], capture_output=True, text=True)
    assert "Traceback" not in run.stderr, run.stderr
    found: list[str] = ast.literal_eval(run.stdout.splitlines()[-1])
    return found


def test_import_waits_for_nothing() -> None:
    """What is heavy is loaded by the first name that needs it; compiling starts with first use."""
    assert loaded_by("import signvote; signvote.ConfigError", (*HEAVY, "rich", "tyro")) == []
    code = (
        "from signvote import Layout, Server, Worker; import signvote; signvote.theory, signvote.checkpoint"
    )
    assert loaded_by(code, ("torch", "numba", "triton", "flwr", "matplotlib", "rich")) == ["torch"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("rules",), ("version",), ("train", "--help"), ("completion", "bash"),
        ("train", "--ruel", "weighted"), ("bnech",), ("train", "--step", "large"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_command_line_answers_at_once(arguments: tuple[str, ...]) -> None:
    """Help and mistakes do not wait for torch, which takes longer to load than all the rest."""
    assert loaded_by(f"import sys; from signvote.cli import main; sys.argv[1:] = {arguments}; main()") == []


REPORT = """
import sys, tempfile
from pathlib import Path
from signvote import report, results
found = results.merged({path: results.read(path) for path in sys.argv[1:]})
with tempfile.TemporaryDirectory() as folder:
    report.write(found, Path(folder))
    assert len(list(Path(folder).iterdir())) == 6
"""


def test_the_report_command_loads_no_torch(tmp_path: Path) -> None:
    line = ["report", str(ROOT / "paper" / "why-mnist"), "--out", str(tmp_path)]
    code = f"import sys; from signvote.cli import main; sys.argv[1:] = {line}; main()"
    assert loaded_by(code, ("torch", "numba", "safetensors", "matplotlib")) == ["matplotlib"]


def test_results_become_a_report_without_torch() -> None:
    """Plain or compressed, from reading to the page, the figure and the table."""
    paths = [str(ROOT / "paper" / "why-mnist" / "results.json.gz")]
    paths += [str(path) for path in sorted(ROOT.glob("tests/golden/*/results.json"))]
    code = f"import sys; sys.argv[1:] = {paths}\n{REPORT}"
    assert loaded_by(code, ("torch", "numba", "safetensors", "matplotlib")) == ["matplotlib"]


def test_rules_are_explained_as_their_classes_are() -> None:
    assert explained.rules() == {name: summary(name) for name in RULES}
    assert list(explained.rules()) == list(RULES)


def test_all_is_the_public_surface() -> None:
    modules = set(LAYERS) - set(signvote.__all__)
    public = {name for name in dir(signvote) if not name.startswith("_")} - modules
    assert public == set(signvote.__all__)
    assert signvote.__all__ == sorted(
        signvote.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n)
    )


def test_names_are_loaded_from_where_type_checkers_find_them() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (checked,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imported = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: f"{imported[name]}.{name}" for name in ("checkpoint", "theory")}
    assert imported | modules == signvote._HOMES
    errors = {name for name in signvote.__all__ if name.endswith("Error")}
    assert {*signvote._HOMES, *errors} == set(signvote.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'signvote' has no attribute 'Sever'"):
        signvote.Sever  # type: ignore[attr-defined]  # noqa: B018


def test_public_things_are_documented() -> None:
    for name in set(signvote.__all__) - {"ONE", "RULES"}:
        assert getattr(signvote, name).__doc__, name


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a user would see; in this process, as starting another takes seconds."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch("sys.argv", ["signvote", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_bench_prints_a_table_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signvote.bench.WARM_UP_SECONDS", 0.0)
    out = tmp_path / "bench.json"
    run = command("bench", "kernels", "--coordinates", "100000", "--workers", "3", "--threads", "1", "2",
                  "--repeats", "1", "--out", str(out))  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "it-signsgd" in run.stdout
    report = json.loads(out.read_text())
    assert {t["coordinates"] for t in report["timings"]} == {6250, 25_000, 100_000}
    assert {t["threads"] for t in report["timings"]} == {1, 2}
    assert all(t["seconds"] > 0 and t["copies"] > 0 for t in report["timings"])
    assert report["versions"]["signvote"] == signvote.__version__


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bench", "kernels", "--workers", "0"), "workers is 0; it must be 1 or more"),
        (("bench", "kernels", "--coordinates", "-5"), "coordinates is -5"),
        (("bench", "kernels", "--out", "/nowhere/at/all.json"), "/nowhere/at is no folder"),
        (("bench", "kernles"), "kernles"),
        (("bnech",), "bnech"),
        (("train", "--rule", "weigted"), "did you mean 'weighted'"),
        (("train", "--task", "minst"), "did you mean 'mnist'"),
        (("train", "--task", "mnist", "--data-dir", "/nowhere"), "train-images-idx3-ubyte"),
        (("train", "--batch-sizes", "9000"), "batch size of 9000"),
        (("train", "--workers", "0"), "workers is 0"),
        (("train", "--rounds", "1", "--out", "/proc/nowhere"), "/proc/nowhere"),
        (("train", "--options", "warmup"), "option 'warmup' has no value; wanted KEY=VALUE"),
        (("train", "--options", "per=layer"), "per is 'layer'; it must be 'worker' or 'tensor'"),
        (("compare", "--seeds"), "nothing to compare"),
        (("compare", "--jobs", "0"), "jobs is 0"),
        (("data", "mnits"), "did you mean 'mnist'"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_code_2(arguments: tuple[str, ...], text: str) -> None:
    run = command(*arguments)
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr


def test_version_in_a_process_of_its_own() -> None:
    line = [sys.executable, "-m", "signvote", "version"]
    run = subprocess.run(line, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == signvote.__version__
