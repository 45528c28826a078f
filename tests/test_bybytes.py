"""The metric by bytes sent: when there is such a figure, what it shows, and that labels can be read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from signvote.report import bybytes, write
from signvote.report.bybytes import differ, frame_of, line_of, spread_out
from signvote.report.experiments import experiments_of
from signvote.report.panels import arranged_by_mode
from signvote.results import Result, Results, pack
from tests.test_report import SHAPES, made_up_run, results_of

N = 1000
LOSS = [{"name": "loss", "unit": "nats/byte", "more_is_better": False}]


def read_run(rule: str, *losses: float, seed: int = 0, equal: bool = True) -> Result:
    """A run of 40 rounds: a bit per parameter and round, or 4 bytes under adamw."""
    sizes = [8, 8] if equal else [1, 15]
    up = pack([(4 * N if rule == "adamw" else N // 8) * len(sizes)] * 40)
    rounds = [10 * i for i in range(len(losses))]
    return made_up_run(rule, None, seed, rounds=40, batch_sizes=sizes) | {
        "coordinates": N,
        "metrics": LOSS,
        "evaluations": {"round": rounds, "loss": list(losses)},
        "bytes_up": up,
    }


def both() -> Results:
    return results_of(
        *(read_run("majority", 5.5, 4.0, 3.0, 2.0, 1.5, equal=equal) for equal in (False, True)),
        read_run("weighted", 5.5, 4.0, 3.0, 2.0, 1.1),
        read_run("weighted", 5.5, 4.0, 3.0, 2.0, 1.3, seed=1),
        read_run("adamw", 5.5, 3.0, 2.0, 1.5, 1.0),
    )


def test_bytes_are_those_of_a_worker_and_per_parameter() -> None:
    majority, _, weighted, adamw = (line_of(experiment) for experiment in experiments_of(both()))
    assert majority.sent == [1.25, 2.5, 3.75, 5.0], "not the untrained model"
    assert adamw.sent == [40.0, 80.0, 120.0, 160.0]
    assert weighted.mean[-1] == pytest.approx(1.2)
    assert (weighted.low[-1], weighted.high[-1]) == (1.1, 1.3)


def test_what_is_no_number_is_left_out() -> None:
    (experiment,) = experiments_of(results_of(read_run("majority", 5.5, 4.0, math.nan, math.inf, 3.0)))
    assert line_of(experiment).mean == [4.0, 3.0]


def test_there_is_a_figure_where_rules_sent_unequal_bytes(tmp_path: Path) -> None:
    write(both(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"figure.png", "bytes.png", "bytes.svg"}
    text = (tmp_path / "bytes.svg").read_text()
    assert "<!-- bytes sent by a worker per parameter (log scale) -->" in text
    assert text.index("2 x 8 ") < text.index("1 x 1 + 1 x 15"), "equal workers first"


def test_a_curve_has_its_name_and_its_last_value_at_its_end(tmp_path: Path) -> None:
    written: list[Any] = []

    def annotate(axes: Axes, *args: Any, **settings: Any) -> Any:
        written.append(draw(axes, *args, **settings))
        return written[-1]

    draw = Axes.annotate
    with mock.patch.object(Axes, "annotate", annotate):
        bybytes.figure(both(), tmp_path / "bytes.png")
    labels = sorted(text.get_text() for text in written)
    assert labels == ["adamw 1", "majority 1.5", "majority 1.5", "weighted 1.2"]
    sheet = written[0].axes.figure.bbox
    for text in written:
        box = text.get_window_extent()
        assert sheet.x0 < box.x0 < box.x1 < sheet.x1, f"{text.get_text()} is cut"
        assert box.y0 > text.axes.bbox.y0 - 1, f"{text.get_text()} lies on the axis"


def test_votes_alone_have_none() -> None:
    votes = [run for run in both()["runs"] if run["config"]["rule"] != "adamw"]
    assert not differ(results_of(*votes))
    assert not differ(SHAPES["one evaluation"])
    other = votes[0] | {"config": votes[0]["config"] | {"task": "other"}}
    alone = [run for run in both()["runs"] if run["config"]["rule"] == "adamw"]
    assert not differ(results_of(other, *alone)), "of other tasks"
    many = [run | {"config": run["config"] | {"split": f"dirichlet:{i}"}} for run in votes for i in range(26)]
    assert not differ(results_of(*many, *both()["runs"])), "too tall"


def test_the_start_of_training_may_lie_outside_the_frame() -> None:
    panels, _ = arranged_by_mode(experiments_of(both()))
    low, high = frame_of(panels)
    assert low == pytest.approx(1.0 - 0.05 * 3.0)
    assert high == pytest.approx(4.0 + 0.05 * 3.0), "a quarter of four evaluations is the first"
    (panel,), _ = arranged_by_mode(experiments_of(SHAPES["bare"]))
    assert frame_of([panel]) == list(panel.frame)


@pytest.mark.parametrize("name", ["bare", "one evaluation", "odd names", "attack, recipe, split"])
def test_every_shape_of_results_can_be_drawn(name: str, tmp_path: Path) -> None:
    bybytes.figure(SHAPES[name], tmp_path / "bytes.svg")
    assert (tmp_path / "bytes.svg").read_bytes().startswith(b"<?xml")


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 9))
def test_labels_are_apart_in_order_and_near_their_places(places: list[int], gap: int) -> None:
    found = spread_out(places, gap)
    ordered = sorted(zip(places, found, strict=True))
    heights = sorted(found)
    assert all(b - a > gap - 1e-9 for a, b in pairwise(heights))
    assert all(a[1] <= b[1] for a, b in pairwise(ordered) if a[0] < b[0])
    assert math.isclose(sum(found), sum(places), abs_tol=1e-6), "nobody is pushed further than the others"
    if all(abs(a - b) >= gap for i, a in enumerate(places) for b in places[:i]):
        assert found == pytest.approx(places)
