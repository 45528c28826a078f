"""Results of others: whatever a file holds, there is a report, or one sentence that names the file."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from signvote import report
from signvote.cli.training import Report
from signvote.errors import ConfigError, SignVoteError, StateError
from signvote.results import (
    NAME,
    Results,
    add,
    current,
    length,
    pack,
    read,
    results_of,
    to_csv,
    total,
    unpack,
)
from signvote.results.lengths import running_totals
from tests.test_report import made_up_run

Where = tuple[Any, ...]  # keys and indexes from the top of a file to a value
JUNK: list[Any] = [
    None, True, -1, 0, 0.5, 2**70, 10**400, 1e308, float("nan"), float("-inf"),
    "", "x", "=1+1", "\ud800", "\0", "y" * 30_000,
    [], [[]], [[7, 10**12]], [None], {}, {"a": 1}, {"round": [0]}, [-1, "x"],
]  # fmt: skip


def small() -> Results:
    """A finished run with everything in it, and an interrupted one."""
    one = made_up_run(mode=None, batch_sizes=[4, 8], rounds=60) | {
        "machine": [{"from_round": 1, "device": "cpu", "precision": "float32"}],
        "sign_error": {"round": [10, 20], "error": [0.4, 0.3]},
        "rounds_done": 60,
    }
    one["config"] |= {"options": {"cap": 2.0}, "absent": ["0:1"]}
    other = made_up_run("majority", mode=4, rounds=10, status="interrupted")
    return results_of([one, other], "signvote compare")


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """`signvote report` of a file. It draws figures only if asked to, because that takes most of the time."""
    path = tmp_path / "given.json"
    drawn: list[bool] = [False]
    figure = report.figure
    monkeypatch.setattr(report, "figure", lambda *given: figure(*given) if drawn[0] else None)
    monkeypatch.setattr("signvote.cli.showing.tell", lambda *given: None)

    def result(content: bytes, *, draw: bool = False) -> bool:
        """Whether there is a report; otherwise the error names the file."""
        path.write_bytes(content)
        drawn[0] = draw
        try:
            Report(folders=(path,), out=tmp_path / "out").run()
        except SignVoteError as error:
            assert str(path) in str(error)
            return False
        assert "<html" in (tmp_path / "out" / "report.html").read_text()
        return True

    return result


# ---- damage --------------------------------------------------------------------------------------


def places(value: Any, where: Where = ()) -> Iterator[Where]:
    """Every place in a file; of a long list, the first, the second and the last."""
    yield where
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*where, key))
    if isinstance(value, list):
        for i in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[i], (*where, i))


def changed(results: Any, where: Where, junk: Any, *, remove: bool = False) -> Any:
    """The results with another value in one place, or without it."""
    if not where:
        return junk
    results = copy.deepcopy(results)
    inner = results
    for key in where[:-1]:
        inner = inner[key]
    if remove:
        del inner[where[-1]]
    else:
        inner[where[-1]] = junk
    return results


def test_any_value_in_any_place_gives_a_report_or_one_sentence(reported: Callable[..., bool]) -> None:
    """Each place with a few kinds of junk, and with nothing; all kinds of junk are tried in turn."""
    results = small()
    kinds = 0
    outcomes = []
    for where in places(results):
        for _ in range(2):
            damaged = changed(results, where, JUNK[kinds % len(JUNK)])
            kinds += 1
            outcomes.append(reported(json.dumps(damaged).encode(), draw=kinds % 300 == 0))
        if where:
            outcomes.append(reported(json.dumps(changed(results, where, None, remove=True)).encode()))
    assert len(outcomes) > 300
    assert outcomes.count(False) > len(outcomes) / 2


def test_any_damage_of_the_bytes_gives_a_report_or_one_sentence(reported: Callable[..., bool]) -> None:
    chance = random.Random(0)
    plain = json.dumps(small()).encode()
    for data in (plain, gzip.compress(plain, mtime=0)):
        assert reported(data, draw=True)
        for _ in range(60):
            start, end = sorted(chance.sample(range(len(data) + 1), 2))
            at = chance.randrange(len(data))
            flipped = bytes([data[at] ^ (1 << chance.randrange(8))])
            reported(
                chance.choice(
                    [
                        data[:at],
                        data[:at] + flipped + data[at + 1 :],
                        data[:start] + data[end:],
                        data[:end] + data[start:],
                        data[:at] + chance.randbytes(9) + data[at + 9 :],
                    ]
                )
            )


def bomb(text: str, **entries: Any) -> bytes:
    run = made_up_run("majority") | entries
    return json.dumps(results_of([run])).replace('"here"', text).encode()


@pytest.mark.parametrize(
    "data",
    [
        bomb("[[1, 750000000]]", bytes_up="here", voters="here"),
        bomb("[" + "[]," * 200_000 + "[]]", machine="here"),
        bomb("[" + "{}," * 200_000 + "{}]", trust="here"),
        bomb("[" * 300_000, versions="here"),
        b'{"format": 3, "runs": [' + b"{}," * 200_000 + b"{}]}",
    ],
    ids=["run lengths", "lists", "dicts", "depth", "runs"],
)
def test_a_small_file_cannot_ask_for_gigabytes(data: bytes, reported: Callable[..., bool]) -> None:
    """8 kB of compressed file or less; 0.6 MB when unpacked, and never 100 MB in memory."""
    packed = gzip.compress(data)
    assert len(packed) < 8_000
    tracemalloc.start()
    reported(packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


def test_a_figure_has_a_largest_size(tmp_path: Path) -> None:
    runs = [made_up_run("majority", rounds=10, task=f"task {i}") for i in range(300)]
    with pytest.raises(
        ConfigError, match="a figure of 300 panels is too tall to be drawn; report fewer results"
    ):
        report.figure(results_of(runs), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("where", "junk", "message"),
    [
        (("command",), 3, "given.json: 'command' is no text"),
        (("runs", 1), "x", "run 1 of .*given.json is no result of signvote"),
        (("runs", 0, "coordinates"), 0, "run 0 of .*given.json has a wrong 'coordinates'"),
        (("runs", 0, "config", "seed"), None, r"run 0 of .* lacks config\.seed"),
        (("runs", 0, "config", "mode"), "4", "has a wrong setting mode = '4'"),
        (("runs", 0, "config", "mode"), -4, "has a wrong setting mode = -4"),
        (("runs", 0, "config", "options"), {str(i): i for i in range(9999)}, "more than 20,000 characters"),
        (("runs", 0, "config", "attack"), "\ud800", "has a number or a text that no run has"),
        (("runs", 0, "trust", "workers"), [0, 9], "has a 'trust' that does not fit its workers"),
    ],
)
def test_the_sentence_names_the_entry(where: Where, junk: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(changed(small(), where, junk)))
    with pytest.raises(StateError, match=message):
        read(path)


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(changed(small(), ("runs", 0, "voters"), None, remove=True)))
    with pytest.raises(StateError, match=r"run 0 of .*given.json lacks voters; was the file edited\?"):
        read(path)


# ---- lists kept short ----------------------------------------------------------------------------


def test_sums_of_packed_lists_need_no_unpacking() -> None:
    chance = random.Random(3)
    for _ in range(50):
        values = [chance.randrange(3) for _ in range(chance.randrange(12))]
        packed = pack(values)
        assert (length(packed), total(packed)) == (len(values), sum(values))
        ends = range(len(values) + 3)
        assert running_totals(packed, ends) == [sum(values[:end]) for end in ends]
        assert unpack(packed) == values


# ---- CSV -----------------------------------------------------------------------------------------


def test_no_text_of_a_csv_is_a_formula() -> None:
    """A spreadsheet computes a cell that begins with = + - @; numbers stay numbers."""
    texts = ["=1+1", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "plain", "-1.5", "+2", "a=b"]
    runs = [made_up_run("majority", rounds=0, task=text, absent=[text]) for text in texts]
    runs[0]["evaluations"]["loss"] = [-0.25]
    rows = list(csv.DictReader(io.StringIO(to_csv(results_of(runs)), newline="")))
    cells = [row["task"] for row in rows]
    assert cells[:4] == [f"'{text}" for text in texts[:4]]
    assert cells[4:] == texts[4:]
    assert [row["absent"] for row in rows] == cells
    assert rows[0]["loss"] == "-0.25"


# ---- one file, several writers -------------------------------------------------------------------


def test_adding_keeps_the_runs_of_others(tmp_path: Path) -> None:
    path = tmp_path / NAME
    rules = ("majority", "weighted", "robust")
    mine, other, third = current(results_of(made_up_run(rule, rounds=10) for rule in rules))["runs"]
    cut = mine | {"status": "interrupted"}
    assert add(path, [cut], "one")["runs"] == [cut]
    both = add(path, [other], "two")
    assert both["command"].splitlines() == ["one", "two"]
    assert add(path, [mine], "one")["runs"] == [mine, other]
    kept = add(path, [cut, third], "one")
    assert [(run["config"]["rule"], run["status"]) for run in kept["runs"]] == [
        ("majority", "done"), ("robust", "done"), ("weighted", "done"),
    ], "a finished run is not replaced by an interrupted one"  # fmt: skip
    assert read(path)["runs"] == kept["runs"]
    whole = add(path, [mine, other, third], "all")
    assert whole["command"] == "all"
