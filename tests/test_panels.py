"""What shares a panel, runs that collapse, the table for a README, and results as newer runs write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from signvote.report import figure, markdown, page, write
from signvote.report.experiments import experiments_of
from signvote.report.marks import COLORS, DASHES, marks_of
from signvote.report.measures import band
from signvote.report.panels import Fall, apart, arranged, lowest
from signvote.results import Result, Results, pack
from tests.test_browser import BROWSER, TRY, tried_in_a_browser
from tests.test_report import made_up_comparison, made_up_run, results_of

RULES = (("majority", "paper"), ("it-signsgd", "paper"), ("pooled", "paper"), ("pooled", "tuned"))


def the_papers_figure(seeds: int = 2) -> Results:
    """Four modes and four curves; one seed of it-signsgd in mode 4 falls to 11 %."""
    runs = [made_up_run(rule, mode, s, recipe=recipe)
            for rule, recipe in RULES for mode in (1, 2, 3, 4) for s in range(seeds)]  # fmt: skip
    fallen = next(r for r in runs if (r["config"]["rule"], r["config"]["mode"]) == ("it-signsgd", 4))
    fallen["evaluations"]["accuracy"][20:] = [0.12, 0.11] + [0.3] * 9
    return results_of(*runs)


def with_accuracy(*values: float | None, **settings: Any) -> Result:
    run = made_up_run(**settings)
    at = list(range(0, 10 * len(values), 10))
    return run | {"evaluations": {"round": at, "accuracy": list(values), "loss": [1.0] * len(at)}}


def test_few_curves_share_a_panel_and_many_get_one_for_each_mode() -> None:
    panels, marks = arranged(experiments_of(made_up_comparison(modes=(1, 4), seeds=1)))
    assert [(panel.title, len(panel.members)) for panel in panels] == [("mnist-10k · tuned recipe", 6)]
    assert not marks.by_curve
    panels, marks = arranged(experiments_of(the_papers_figure()))
    assert [panel.title for panel in panels] == [
        "mnist-10k · mode 1: 15 x 64",
        "mnist-10k · mode 2: 9 x 4 + 6 x 154",
        "mnist-10k · mode 3: 12 x 4 + 3 x 304",
        "mnist-10k · mode 4: 14 x 4 + 1 x 904",
    ]
    names = [
        "majority, paper recipe",
        "it-signsgd, paper recipe",
        "pooled, paper recipe",
        "pooled, tuned recipe",
    ]
    for panel in panels:
        assert [marks.name(experiment) for experiment in panel.members] == names
        assert len({marks.color(experiment) for experiment in panel.members}) == 4
    assert [bool(marks.dashes[name]) for name in names] == [True, False, False, False], (
        "plain voting is dashed"
    )
    assert len({panel.frame for panel in panels}) == 1, "modes are compared on one scale"


def test_many_rules_of_one_mode_stay_in_one_panel_and_of_one_recipe_are_named_without_it() -> None:
    rules = [f"rule-{i}" for i in range(9)]
    panels, _ = arranged(experiments_of(results_of(*(made_up_run(rule) for rule in rules))))
    assert len(panels) == 1
    panels, marks = arranged(
        experiments_of(results_of(*(made_up_run(rule, m) for rule in rules for m in (1, 4))))
    )
    assert [len(panel.members) for panel in panels] == [9, 9]
    assert list(marks.dashes) == rules
    looks = [(marks.color(experiment), marks.dash(experiment)) for experiment in panels[0].members]
    assert len(set(looks)) == 9, "more curves than colors"


RIVALS = ("majority", "pooled", "known-batch", "agreement", "robust", "oracle", "it-signsgd")


@pytest.mark.parametrize(
    "curves",
    [
        [
            *((rule, "tuned") for rule in RIVALS),
            *((rule, "paper") for rule in RIVALS),
        ],  # as in studies/0.1/rules-mnist
        [("majority", f"recipe-{i}") for i in range(42)],  # all dashed, if they could
        [(f"rule-{i}", "tuned") for i in range(36)] + [("oracle", f"recipe-{i}") for i in range(6)],
    ],
)
def test_no_two_curves_look_alike_while_there_are_colors_and_dashes(curves: list[tuple[str, str]]) -> None:
    found = experiments_of(results_of(*(made_up_run(rule, recipe=recipe) for rule, recipe in curves)))
    marks = marks_of(found, by_curve=True)
    looks = {(marks.color(experiment), marks.dash(experiment)) for experiment in found}
    assert len(looks) == len(curves) <= len(COLORS) * len(DASHES)


def test_of_too_many_curves_some_look_alike() -> None:
    rules = [f"rule-{i}" for i in range(len(COLORS) * len(DASHES) + 1)]
    marks = marks_of(experiments_of(results_of(*map(made_up_run, rules))), by_curve=True)
    assert (marks.colors[rules[-1]], marks.dashes[rules[-1]]) == (COLORS[0], ())


def test_tasks_have_panels_and_frames_of_their_own() -> None:
    hard = [r | {"config": {**r["config"], "task": "hard"}} for r in the_papers_figure()["runs"][8:]]
    panels, _ = arranged(experiments_of(results_of(*the_papers_figure()["runs"], *hard)))
    assert [panel.title.split(" · ")[0] for panel in panels] == ["mnist-10k"] * 4 + ["hard"] * 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.1, 0.5, 0.9, 0.95), None),  # rises
        ((0.1, 0.3, 0.4, 0.45), None),  # is slow
        ((0.1, 0.9, 0.6, 0.9), None),  # stumbles
        ((0.1, 0.9, 0.2, 0.9), (0.2, 20)),  # falls, and comes back
        ((0.1, 0.2, 0.9, 0.1), (0.1, 30)),  # was low before, which is no fall
        ((0.1, 0.12, 0.11), (0.11, 20)),  # never learns
        ((0.1, None, 0.9), None),  # was no number
        ((0.1,), None),  # was never trained
    ],
)
def test_what_a_collapse_is(values: tuple[float | None, ...], expected: tuple[float, int] | None) -> None:
    assert lowest(with_accuracy(*values), 1.0) == expected


def test_a_collapsed_run_is_marked_and_does_not_press_the_others_together() -> None:
    found = experiments_of(the_papers_figure())
    panels, _ = arranged(found)
    low, high = panels[0].frame
    assert 0.5 < low < 0.85
    assert high < 1.01
    falls = [panel.fall(experiment) for panel in panels for experiment in panel.members]
    (fall,) = [fall for fall in falls if fall]
    assert fall == Fall(seeds=1, of=2, round=210, accuracy=0.11)
    assert fall.text == "down to 11 % (1 of 2 seeds)"
    assert Fall(seeds=1, of=1, round=1, accuracy=0.1).text == "down to 10 %"
    assert "down to 11 % (1 of 2 seeds)" in page(the_papers_figure())


def test_a_run_that_stumbles_beside_one_that_collapsed_stays_in_the_frame() -> None:
    """Two runs under an attack from the middle on: one falls for good, the other recovers."""
    fallen = with_accuracy(0.1, 0.90, 0.92, 0.3, 0.2, 0.2, rule="weighted")
    recovers = with_accuracy(0.1, 0.86, 0.93, 0.86, 0.92, 0.94)
    (panel,), _ = arranged(experiments_of(results_of(fallen, recovers)))
    assert panel.frame == pytest.approx((0.84, 0.945))
    assert [fall and fall.accuracy for fall in map(panel.fall, panel.members)] == [0.2, None]


def test_where_nothing_collapsed_everything_after_round_0_is_in_the_frame() -> None:
    (panel,), _ = arranged(experiments_of(results_of(with_accuracy(0.1, 0.3, 0.5))))
    assert panel.frame == pytest.approx((0.29, 0.51))
    assert not panel.fixed
    (panel,), _ = arranged(experiments_of(results_of(with_accuracy(0.1, 0.9, 0.1, 0.1))))
    assert panel.frame[0] < 0.1, "nobody else is there to be pressed together"


def test_the_mark_is_drawn_and_told_of_below_its_panel(tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    with mock.patch.object(Axes, "legend", autospec=True, side_effect=Axes.legend) as legend:
        figure(the_papers_figure(), tmp_path / "figure.svg")
    (call,) = legend.call_args_list
    axes = call.args[0]
    marks, texts = axes.get_legend_handles_labels()
    assert texts == ["it-signsgd, paper recipe: down to 11 % (1 of 2 seeds)"]
    assert [mark.get_marker() for mark in marks] == ["v"]
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0, "where no curve is"


def test_marks_of_the_same_round_lie_side_by_side() -> None:
    assert apart([500, 750, 500, 510, 524], 25) == [500, 750, 525, 560, 599]
    assert apart([], 25) == []


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
def test_a_panel_for_each_mode_works_in_a_browser(tmp_path: Path) -> None:
    told = 'const told = (s) => [...document.querySelectorAll(s)].map((e) => e.textContent || e.getAttribute("fill"));'
    looked = f'try {{ {told} seen.falls = told("polygon.fall, .legend small");'
    seen = tried_in_a_browser(the_papers_figure(), tmp_path, TRY.replace("try {", looked, 1))
    assert seen["errors"] == []
    assert (seen["curves"], seen["buttons"], seen["others"], seen["back"]) == (16, 16, 15, 16)
    assert seen["falls"] == [COLORS[1], "\u25bc down to 11 % (1 of 2 seeds)"], "the triangle, then the legend"


def test_a_band_never_goes_beyond_the_seeds() -> None:
    low, high = band([0.97, 0.97, 0.11])
    assert high == 0.97
    assert 0.11 < low < 0.3


# ---- the table for a README ----------------------------------------------------------------------


def test_markdown_has_a_row_for_each_rule_and_a_column_for_each_mode() -> None:
    runs = [with_accuracy(0.1, 0.9, rule="majority", mode=1, recipe="paper"),
            with_accuracy(0.1, 0.91, mode=1), with_accuracy(0.1, 0.93, mode=1, seed=1),
            with_accuracy(0.1, 0.95, mode=4, status="interrupted")]  # fmt: skip
    for run, size in zip(runs, (145_624, 72_812, 72_812, 70_000), strict=True):
        run |= {
            "voters": [[15, 1]],
            "bytes_up": [[15 * size, 1]],
            "machine": [{"from_round": 1, "device": "cuda", "precision": "tf32"}],
        }
    caption, _, *lines = markdown(results_of(*runs)).splitlines()
    assert caption == (
        "mnist-10k: test accuracy in % after 10 rounds, 1 to 2 seeds, mean ± standard deviation"
        " (of two seeds, their distance). Ran on cuda tf32."
    )
    assert lines == [
        "| rule | recipe | mode 1: 15 x 64 | mode 4: 14 x 4 + 1 x 904 | bytes a vote | fewer than float32 |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| majority | paper | 90.00 |  | 145,624 | 16.0 |",
        "| pooled | tuned | 92.00 ± 2.00 | 95.00 (10 of 300 rounds, unfinished) | 70,000 to 72,812 | 32.0 to 33.3 |",
    ]


def test_names_cannot_break_the_markdown() -> None:
    text = markdown(results_of(made_up_run("a|b", task="<img src=x>\n# title")))
    assert "| a\\|b |" in text
    assert "<" not in text
    assert "\n#" not in text


# ---- seconds, machines, size ---------------------------------------------------------------------


def test_of_a_total_the_rest_is_shown() -> None:
    run = made_up_run(rounds=10) | {"seconds": {"gradients": 6.0, "server": 1.0, "total": 10.0}}
    (experiment,) = experiments_of(results_of(run))
    assert experiment.seconds_per_round() == pytest.approx({"gradients": 0.6, "server": 0.1, "rest": 0.3})


def test_the_page_says_what_it_ran_on() -> None:
    moved = [{"from_round": 1, "device": "cpu"}, {"from_round": 8, "device": "cuda", "precision": "bf16"}]
    text = page(results_of(made_up_run() | {"machine": moved}, made_up_run("majority")))
    assert "Ran on cpu, from round 8 cuda bf16." in text
    assert "&quot;ran on&quot;: &quot;cpu, from round 8 cuda bf16&quot;" in text
    assert "Ran on" not in page(results_of(made_up_run()))


def test_a_study_of_64_runs_stays_small(tmp_path: Path) -> None:
    """As the simulator writes them: lists packed, six digits."""
    runs = []
    for seed in range(16):
        for mode in (1, 2, 3, 4):
            run = made_up_run(mode=mode, seed=seed, rounds=300, evaluate_every=10)
            trust = run["trust"]
            trust["weight"] = [[float(f"{w:.6g}") for w in row] for row in trust["weight"]] * 5
            trust["round"] = list(range(100, 3100, 100))
            trust["overruled"] = [[float(f"{p:.6g}") for p in row] for row in trust["overruled"]] * 5
            runs.append(run | {key: pack([15 * 72_812] * 3000) for key in ("bytes_up", "bytes_down")})
    write(results_of(*runs), tmp_path)
    assert (tmp_path / "results.json").stat().st_size < 1_000_000
