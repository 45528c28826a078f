"""Result files: `results.json` holds {"format", "command", "runs": [result, ...]}.

The result of a run is a dictionary. Its lists by round are run-length coded: `[7, 7, 7, 5]` is written
`[[7, 3], [5, 1]]` (lengths.py). `results.json.gz` is the same file, compressed: the form of a committed study.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from signvote.atomic import write_atomically
from signvote.errors import StateError
from signvote.formats import upgraded
from signvote.recipes import RECIPES
from signvote.results.shape import check_run, is_text
from signvote.settings import Settings, completed

Result = dict[str, Any]
Results = dict[str, Any]

FORMAT = 3
NAME = "results.json"
COMPRESSED = f"{NAME}.gz"
GZIP_MAGIC = b"\x1f\x8b"
MOST_BYTES = 2**26  # of a compressed file when unpacked; as Python objects it may take 40 times that
ALWAYS_THERE = ("task", "rule", "recipe", "batch_sizes", "seed")  # in every configuration that signvote wrote


def results_of(runs: Iterable[Result], command: str = "") -> Results:
    """Runs as `results.json` holds them."""
    return {
        "format": FORMAT,
        "command": command,
        "runs": list(runs),
    }


def results_file(folder: Path | str) -> Path:
    """Path of the results in a folder: the compressed file if there is one, otherwise the plain file."""
    folder = Path(folder)
    compressed = folder / COMPRESSED
    return compressed if compressed.exists() else folder / NAME


def write(path: Path | str, results: Results | Result) -> None:
    """Write a results file, or the result of one run. A name that ends in .gz is written compressed.

    The old file stays until the new one is complete. The same results give the same bytes.
    """
    path = Path(path)
    data = json.dumps(results).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_atomically(path, data)


def read(path: Path | str) -> Results:
    """Read a results file, plain or compressed, or the `result.json` of a single run.

    Every entry is checked, so that nothing else has to. A damaged file raises a StateError that names it.
    """
    what = str(path)
    try:
        found = json.loads(_content(Path(path)))
    except StateError:
        raise
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise StateError(f"{what} is no results file of signvote: {error}") from None
    if not isinstance(found, dict):
        raise StateError(f"{what} is no results file of signvote")
    results = _current(results_of([found]) if "evaluations" in found else found, what, check_run)
    command = results.get("command", "")
    if not isinstance(command, str) or not all(map(is_text, command.splitlines())):
        raise StateError(f"{what}: 'command' is no text; was the file edited?")
    return results


def current(results: Results, what: str = "the results") -> Results:
    """The same results in today's format, with every setting of every run."""
    return _current(results, what, lambda run, what: None)


def _current(results: Results, what: str, check: Callable[[Result, str], None]) -> Results:
    written = {"format": results.get("format")}  # of a run that does not say its own
    results = upgraded(results, what, FORMAT, key="format")
    if not isinstance(results.get("runs"), list):
        raise StateError(f"{what}: 'runs' is no list; was the file edited?")
    runs = []
    for i, run in enumerate(results["runs"]):
        if not isinstance(run, dict):
            raise StateError(f"run {i} of {what} is no result of signvote; was the file edited?")
        run = upgraded(written | run, f"run {i} of {what}", FORMAT, key="format")
        run = _complete(run)
        check(run, f"run {i} of {what}")
        runs.append(run)
    return {**results, "runs": runs}


def identity(settings: Settings) -> str:
    """A text that two configurations share if, and only if, they are equal."""
    return _text(settings.as_dict())


def identity_of(result: Result) -> str:
    """The identity of a result's configuration. Settings that did not exist yet are at their default."""
    return _text(completed(result["config"]))


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _content(path: Path) -> str:
    """The text of a file, unpacked if it is compressed. The size is bounded: a small file may unpack to gigabytes."""
    with path.open("rb") as file:
        if file.read(len(GZIP_MAGIC)) != GZIP_MAGIC:
            return path.read_text("utf-8")
    with gzip.open(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise StateError(
            f"{path} unpacks to more than {MOST_BYTES:,} bytes; if you trust it, unpack it with gunzip first"
        )
    return data.decode("utf-8")


def _complete(run: Result) -> Result:
    """With the settings that did not exist yet when signvote wrote the run, each at its default."""
    config = run.get("config")
    if not isinstance(config, dict):
        return run
    recipe = config.get("recipe")
    written = all(name in config for name in ALWAYS_THERE) and isinstance(recipe, str) and recipe in RECIPES
    return {**run, "config": completed(config) | config} if written else run
