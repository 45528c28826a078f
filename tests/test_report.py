from __future__ import annotations

import io
import json
import math
import random
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from signvote.errors import ConfigError, SignVoteError
from signvote.report import figure, markdown, page, table, terminal
from signvote.report.experiments import experiments_of
from signvote.report.marks import COLORS, marks_of
from signvote.results import FORMAT, Result, Results, pack

N = 582_026
MODES = {1: [64] * 15, 2: [4] * 9 + [154] * 6, 3: [4] * 12 + [304] * 3, 4: [4] * 14 + [904]}
HEIGHT = {"majority": 0.13, "it-signsgd": 0.08, "pooled": 0.02}  # accuracy lost in mode 4, made up


def made_up_run(
    rule: str = "pooled", mode: int | None = 4, seed: int = 0, rounds: int = 300, **settings: Any
) -> Result:
    """A run as `signvote compare` would write it; the curve is invented."""
    sizes = settings.pop("batch_sizes", MODES.get(mode or 0, [4, 8, 16]))
    status = settings.pop("status", "done")
    noise = random.Random(f"{rule} {mode} {seed}")
    at = list(range(0, rounds + 1, 10))
    top = 0.98 - HEIGHT.get(rule, 0.03) * ((mode or 4) - 1) / 3
    accuracy = [top - (top - 0.1) * math.exp(-r / 25) + noise.gauss(0, 0.006) for r in at]
    overruled = [0.5 - 0.4 * (size / 1000) ** 0.5 for size in sizes]
    seen = at[5::5]
    return {
        "format": FORMAT,
        "config": {
            "task": "mnist-10k", "model": "mnist-cnn", "rule": rule, "recipe": "tuned", "mode": mode,
            "workers": len(sizes), "batch_sizes": sizes,
            "rounds": rounds, "seed": seed, "step": 0.003, "ramp": 0.05, "decay": 1.0, "momentum": 0.9, "zeros": "coin",
            "split": "shared", "attack": None, "schedule": "cosine",
        } | settings,
        "versions": {"signvote": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "status": status,
        "coordinates": N,
        "machine": [],
        "evaluations": {"round": at, "accuracy": accuracy, "loss": [2.4 * (1 - a) + 0.02 for a in accuracy]},
        "voters": pack([len(sizes)] * rounds),
        "bytes_up": pack([len(sizes) * 72_812] * rounds),
        "bytes_down": pack([len(sizes) * 72_812] * rounds),
        "seconds": {"gradients": 61.2, "encode": 3.1, "server": 1.9 + len(rule) / 10, "apply": 0.8, "evaluate": 7.5},
        "trust": {} if rule == "majority" else {
            "round": seen, "workers": list(range(len(sizes))),
            "weight": [[math.log((1 - p) / p) * noise.uniform(0.9, 1.1) for p in overruled] for _ in seen],
            "overruled": [overruled for _ in seen],
        },
        "sign_error": {},
        "accuracy_by_class": [],
    }  # fmt: skip


def results_of(*runs: Result) -> Results:
    return {"format": FORMAT, "command": "signvote compare --task mnist-10k", "runs": list(runs)}


def made_up_comparison(modes: tuple[int, ...] = (1, 2, 3, 4), seeds: int = 3) -> Results:
    rules = ("majority", "it-signsgd", "pooled")
    return results_of(*(made_up_run(r, m, s) for m in modes for r in rules for s in range(seeds)))


def attacked() -> Result:
    """Workers 0 and 1 invert their signs; worker 14 has the large batch."""
    run = made_up_run(attack="invert:2")
    for row, p in zip(run["trust"]["weight"], run["trust"]["overruled"], strict=True):
        row[0], row[1] = -1.0, -1.0
        p[0], p[1] = 0.73, 0.73
    return run


def diverged() -> Result:
    run = made_up_run()
    run["evaluations"]["loss"][:4] = [math.nan, None, 0.0, math.inf]
    return run | {"sign_error": {"round": [10, 20], "error": [0.4, 0.3]}}


SHAPES: dict[str, Results] = {
    "losses that are no numbers, sign error": results_of(diverged()),
    "one seed": made_up_comparison(modes=(4,), seeds=1),
    "two seeds": results_of(made_up_run(seed=0), made_up_run(seed=1)),
    "three seeds, four modes": made_up_comparison(),
    "no trust": results_of(made_up_run("majority")),
    "no mode": results_of(made_up_run(mode=None), made_up_run(mode=None, batch_sizes=[1, 2, 3, 4])),
    "interrupted": results_of(made_up_run(rounds=10, status="interrupted")),
    "one evaluation": results_of(made_up_run(rounds=0, status="interrupted")),
    "attack, recipe, split": results_of(
        attacked(), made_up_run(recipe="paper"), made_up_run(split="dirichlet:0.1"), made_up_run(task="mnist")
    ),
    "many workers": results_of(made_up_run(mode=None, batch_sizes=[4] * 99 + [904])),
    "odd names": results_of(made_up_run("a $\\frac rule_^", task="_</script><script>alert(1)</script>")),
    "bare": results_of(
        made_up_run() | {"seconds": {}, "trust": {}, "voters": [], "bytes_up": [], "bytes_down": []}
    ),
}


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_results_gives_a_figure(name: str, suffix: str, tmp_path: Path) -> None:
    figure(SHAPES[name], tmp_path / f"figure.{suffix}")
    data = (tmp_path / f"figure.{suffix}").read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_the_figure_is_1200_pixels_wide_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "a.svg", "b.svg"):
        figure(SHAPES["two seeds"], tmp_path / name)
    png = (tmp_path / "a.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == 1200
    assert png == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_drawing_leaves_no_trace_in_matplotlib(tmp_path: Path) -> None:
    """Neither the settings nor pyplot, which would look for a screen."""
    code = (
        "import sys, json, pathlib, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from signvote.report import figure\n"
        f"figure(json.load(sys.stdin), pathlib.Path({str(tmp_path / 'x.png')!r}))\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.rcParams.copy() == before)"
    )
    given = json.dumps(SHAPES["one seed"])
    answer = subprocess.run(
        [sys.executable, "-c", code], input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    assert answer.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("make", [table, page, lambda results: figure(results, Path("x.png"))])
@pytest.mark.parametrize(
    ("results", "text"),
    [
        (results_of(), "hold no measured run; run `signvote compare`"),
        (results_of({**made_up_run(), "evaluations": {}}), "hold no measured run"),
        ({"format": 7, "runs": []}, "the results: format 7 is a later signvote's; this one reads up to 3"),
        (
            {"format": 2, "runs": []},
            "the results: format 2 is an earlier signvote's; this one reads from 3 on",
        ),
        (results_of({"config": {"rule": "pooled"}}), "run 0 of the results lacks status, .*config.seed"),
        (
            results_of({**made_up_run(), "evaluations": {"round": [0, 1], "accuracy": [0.1]}}),
            "run 0 of the results has evaluations of unequal lengths: {'round': 2, 'accuracy': 1}",
        ),
        (
            results_of(
                made_up_run(), made_up_run(seed=1) | {"evaluations": {"round": [7], "accuracy": [0.5]}}
            ),
            "the seeds of pooled, mode 4 share no evaluated round",
        ),
    ],
)
def test_results_that_cannot_be_shown(make: Any, results: Results, text: str) -> None:
    with pytest.raises(SignVoteError, match=text):
        make(results)


def test_a_figure_is_png_or_svg(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'figure.gif': the name must end in .png or .svg"):
        figure(SHAPES["one seed"], tmp_path / "figure.gif")
    assert not list(tmp_path.iterdir())


def with_final(accuracy: float, **settings: Any) -> Result:
    run = made_up_run(**settings)
    run["evaluations"]["accuracy"][-1] = accuracy
    return run


def test_table_numbers() -> None:
    finals = (0.90, 0.92, 0.97)
    (row,) = table(results_of(*(with_final(a, seed=s) for s, a in enumerate(finals))))
    assert row["value"] == pytest.approx(0.93)
    assert row["spread"] == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2))
    assert row["bytes_up"] == 72_812
    assert row["times_fewer"] == pytest.approx(4 * N / 72_812)
    numbers = ("metric", "value", "spread", "bytes_up", "times_fewer")
    assert {key: value for key, value in row.items() if key not in numbers} == {
        "task": "mnist-10k", "recipe": "tuned", "attack": None, "split": "shared", "batches": "mode 4",
        "rule": "pooled", "seeds": 3, "status": "done", "detail": "", "best": False, "lead": None, "lead_spread": None,
    }  # fmt: skip


def test_absent_workers_send_nothing_and_make_nothing_look_cheaper() -> None:
    run = made_up_run(rounds=20) | {"voters": pack([15, 5]), "bytes_up": pack([15 * 80, 5 * 40])}
    assert table(results_of(run))[0]["bytes_up"] == (15 * 80 + 5 * 40) / 20


def test_rows_are_sorted_by_mode_and_then_by_accuracy() -> None:
    rows = table(results_of(*(with_final(a, rule=r, mode=m) for a, r, m in
                 [(0.7, "majority", 4), (0.9, "majority", 1), (0.8, "pooled", 4), (0.6, "pooled", None)])))  # fmt: skip
    assert [(row["batches"], row["rule"]) for row in rows] == [
        ("mode 1", "majority"), ("mode 4", "pooled"), ("mode 4", "majority"), ("1 x 4 + 1 x 8 + 1 x 16", "pooled"),
    ]  # fmt: skip


def test_the_best_rule_of_a_mode_is_bold_where_there_is_a_choice() -> None:
    text = page(results_of(with_final(0.7, rule="majority"), with_final(0.9), with_final(0.8, mode=1)))
    assert re.findall(r'<tr class="best">.*?<td class="rule">(.*?)</td>', text) == ["pooled"]
    assert text.count('<tr class="best">') == 1


def test_a_column_that_is_the_same_in_every_row_is_in_the_note_of_the_final_table() -> None:
    alike = page(results_of(with_final(0.7, rule="majority"), with_final(0.9)))
    final = alike[alike.index('id="final"') : alike.index('id="trust"')]
    assert ">seeds</th>" not in final
    assert '<p class="note">In every row: 1 seed, ' in final
    assert re.search(r", [\d,]+ bytes a vote, [\d.]+ times fewer than float32\. Bold: ", final)
    more = page(results_of(with_final(0.7, rule="majority"), made_up_run(seed=0), made_up_run(seed=1)))
    assert '<th scope="col" class="number">seeds</th>' in more


@pytest.mark.parametrize(("number", "folded"), [(5, False), (6, True)])
def test_many_notices_of_a_run_are_folded_up(number: int, folded: bool) -> None:
    texts = [f"round {t}: worker {t} was never overruled in 50 rounds" for t in range(1, number + 1)]
    text = page(results_of(made_up_run() | {"notices": texts}))
    assert all(f"<li>{each}</li>" in text for each in texts)
    assert (f": {number} notices</summary>" in text) == folded


def unfinished(rule: str = "pooled", seed: int = 1, points: int = 3) -> Result:
    run = made_up_run(rule, seed=seed, status="interrupted")
    cut = {key: values[:points] for key, values in run["evaluations"].items()}
    return run | {"evaluations": cut, "rounds_done": cut["round"][-1]}


def test_unfinished_runs_are_in_no_mean_and_no_lead() -> None:
    (row,) = table(results_of(with_final(0.9), unfinished()))
    assert (row["seeds"], row["value"], row["status"]) == (1, 0.9, "done")
    assert "1 run left out, because unfinished." in page(results_of(with_final(0.9), unfinished()))
    both = results_of(unfinished(seed=1), unfinished(seed=2, points=5), with_final(0.1, rule="majority"))
    for results in (both, results_of(unfinished("majority", 2), with_final(0.1, seed=2))):
        for row in table(results):
            assert (row["lead"], row["best"], row["seeds"]) == (None, False, 1)
    (row,) = [row for row in table(both) if row["rule"] == "pooled"]
    assert row["value"] == unfinished(seed=2, points=5)["evaluations"]["accuracy"][-1], (
        "the one that came furthest"
    )
    assert row["status"] == "40 of 300 rounds, unfinished"


def test_unfinished_runs_are_marked_wherever_they_are_shown(tmp_path: Path) -> None:
    results = results_of(unfinished() | {"notices": ["odd"]}, with_final(0.1, rule="majority"))
    mark = "20 of 300 rounds, unfinished"
    assert mark in markdown(results)
    html = page(results)
    for part in ("notices", "trust", "seconds", "final", "configuration"):
        assert mark in html.split(f'<section id="{part}">')[1].split("</section>")[0], part
    assert f"pooled, mode 4 ({mark})" in html.split('id="data">')[1]
    shown = io.StringIO()
    for each in terminal.tables_of(table(results)):
        Console(file=shown, width=200).print(each)
    assert mark in shown.getvalue()
    figure(results, tmp_path / "figure.svg")
    assert mark in (tmp_path / "figure.svg").read_text()


def test_a_seed_run_twice_counts_once_and_no_round_says_nothing_about_bytes() -> None:
    (row,) = table(results_of(with_final(0.8), with_final(0.9)))
    assert (row["seeds"], row["value"], row["spread"]) == (1, 0.9, None)
    (row,) = table(SHAPES["one evaluation"])
    assert row["bytes_up"] is row["times_fewer"] is None


def test_what_would_carry_the_same_name_is_told_apart() -> None:
    found = experiments_of(
        results_of(made_up_run(step=0.1), made_up_run(step=0.01), made_up_run("sgd", step=0.5))
    )
    assert [experiment.detail for experiment in found] == ["step 0.1", "step 0.01", ""]
    assert found[0].panel == "mnist-10k · tuned recipe · step 0.1"
    found = experiments_of(results_of(made_up_run(mode=1), made_up_run(mode=1, batch_sizes=[64] * 30)))
    assert [experiment.detail for experiment in found] == ["15 x 64", "30 x 64"]


def test_curves_are_means_with_their_spread() -> None:
    runs = [made_up_run(seed=s) for s in range(3)]
    for run, a in zip(runs, (0.1, 0.2, 0.3), strict=True):
        run["evaluations"] = {"round": [0, 50], "accuracy": [0.1, a], "loss": [2.3, None]}
    curve = experiments_of(results_of(*runs))[0].curve("accuracy")
    assert curve.rounds == [0, 50]
    assert [curve.low[1], curve.mean[1], curve.high[1]] == pytest.approx([0.1, 0.2, 0.3])
    assert math.isnan(experiments_of(results_of(*runs))[0].curve("loss").mean[1])


def test_a_color_per_mode_and_dashes_per_rule() -> None:
    found = experiments_of(made_up_comparison(seeds=1))
    marks = marks_of(found)
    assert list(map(marks.color, found)) == [c for c in COLORS[:4] for _ in range(3)]
    assert len(set(marks.dashes.values())) == 3
    alone = experiments_of(made_up_comparison(modes=(4,), seeds=1))
    assert len({marks_of(alone).color(experiment) for experiment in alone}) == 3, (
        "of one mode, colors tell the rules"
    )


def test_long_runs_keep_the_page_small() -> None:
    run = made_up_run(rounds=10_000)
    text = page(results_of(run))
    assert len(text) < 400_000
    assert f"round {run['trust']['round'][-1]}: " in text, "the last round is always shown"


def test_the_page_says_what_was_sent_and_how_to_repeat_it() -> None:
    text = unescape(page(made_up_comparison(seeds=1)))
    assert "72,812 a vote, 72,812 a decision" in text
    assert "2,328,104 a gradient" in text
    assert "32.0 times fewer" in text
    assert "signvote compare --task mnist-10k" in text
    assert "signvote 0.1.0, torch 2.13.0, python 3.11.2" in text
    assert '"batch_sizes": [4, 4, 4,' in text
    floats = [[15 * 4 * N, 1]]
    full = made_up_run("sgd") | {"voters": [[15, 1]], "bytes_up": floats, "bytes_down": floats}
    assert "the same</span>" in page(results_of(full))
    assert page(SHAPES["bare"]).count("Not recorded.") == 2


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_results_gives_a_page_that_loads_nothing(name: str) -> None:
    text = page(SHAPES[name])
    assert not re.search(r"\$[a-z]", re.sub(r"<script.*?</script>", "", text, flags=re.S)), (
        "a place left open"
    )
    assert re.findall(r"https?://[^\"'\s]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<link|<img|<iframe|\ssrc=|@import|url\((?!#)", text)


def test_text_from_results_never_becomes_markup() -> None:
    evil = "\"'><script>alert(1)</script><!--"
    run = made_up_run(evil, mode=None, task=evil, recipe=evil, attack=evil, split=evil, schedule=evil)
    run["versions"] = {evil: evil}
    run["seconds"] = {evil: 1.0}
    other = made_up_run(evil, mode=None, task=evil, recipe=evil, attack=evil, split=evil, schedule="plain")
    text = page({**results_of(run, other), "command": evil})
    clean = page(results_of(made_up_run()))
    for tag in ("<script", "</script"):
        assert text.count(tag) == clean.count(tag)
    assert "<!--" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert evil in json.loads(data[1])["panels"][0]["title"]
