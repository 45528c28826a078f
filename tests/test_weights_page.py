"""The part of the page about the weights of the workers: words, strips, marks."""

from __future__ import annotations

import math
import re
from html import unescape

from signvote.report import markdown, page, table
from signvote.report.trust import MOST_ROWS, sentence, workers_of
from signvote.results import pack
from tests.test_report import SHAPES, attacked, made_up_run, results_of


def in_words(*weights: float | None) -> str:
    run = made_up_run(mode=None, batch_sizes=[4] * len(weights))
    run["trust"] = {
        "round": [1, 2],
        "workers": range(len(weights)),
        "weight": [[9.0] + [0.0] * (len(weights) - 1), weights],
    }
    return sentence(workers_of(run))


def test_weights_in_words() -> None:
    assert in_words(0.0, 0.0) == in_words(0.0, math.nan) == "Every weight is 0: no vote counts."
    similar = "All weights are similar: each worker has 45.5 % to 54.5 % of all weight."
    assert in_words(1.0, 1.2) == similar
    assert (
        in_words(0.0, 1.0, 1.2)
        == "Worker 0 has weight 0. Each of the others has 45.5 % to 54.5 % of all weight."
    )
    assert (
        in_words(0.0, 0.0, 1.0, 1.0)
        == "Workers 0, 1 have weight 0. Each of the others has 50.0 % of all weight."
    )
    largest = "worker 2 (batch 4) with 80.0 % of all weight, more than all others together"
    assert largest in in_words(0.5, 0.5, 4.0)
    assert "worker 0 is wrong more often than right (p > 1/2), and inverts its votes" in in_words(-1.0, 2.0)
    text = unescape(page(results_of(attacked())))
    assert "workers 0, 1 are wrong more often than right (p > 1/2), and inverts their votes" in text
    assert "Largest weight: worker 14 (batch 904), overruled in 12.0 % of its votes in round 300," in text
    assert 'class="inverted"' in text


def test_a_run_that_sent_nothing_is_shown_all_the_same() -> None:
    results = results_of(made_up_run() | {"bytes_up": [], "bytes_down": []})
    (row,) = table(results)
    assert (row["bytes_up"], row["times_fewer"]) == (None, None)
    assert "| pooled |" in markdown(results)
    assert "pooled" in page(results)


def test_overruled_is_of_one_round_which_is_named() -> None:
    """Worker 14 did not vote in round 300: the number shown is that of round 250."""
    run = made_up_run()
    run["trust"]["overruled"] = [[0.2] * 15, *([0.4] * 15 for _ in range(4)), [*[0.3] * 14, None]]
    text = unescape(page(results_of(run)))
    assert "worker 14 (batch 904), overruled in 40.0 % of its votes in round 250," in text
    assert "overruled<br>in 300</span>" in text
    assert text.count("<span>30.0 %</span></div>") == 14
    assert text.count("<span>40.0 %<br><small>in 250</small></span></div>") == 1
    assert text.count('class="missed"') == 1
    assert text.count("round 300: ") - text.count("of all weight, did not vote") == 14
    assert "It is not p" in text


def test_attackers_are_marked_and_all_strips_share_one_scale() -> None:
    mild = made_up_run("it-signsgd", attack="invert:2")
    mild["trust"]["weight"] = [[1.0] * 14 + [2.0]] * len(mild["trust"]["round"])
    html = page(results_of(made_up_run(), mild)).split('<div class="strips">')[1]
    strips = [
        [float(x) for x in re.findall(r'fill-opacity="(.*?)"', part)] for part in html.split("<article>")[1:]
    ]
    assert max(strips[0]) == 1.0, "the largest share of all"
    assert max(strips[1]) < 0.5
    assert re.findall(r"<span>(\d+) <small>batch \d+</small> <em", html) == ["13", "14"]


def test_a_vote_has_one_ratio_to_float32_on_the_whole_page() -> None:
    """Also if decisions are larger than votes."""
    run = made_up_run() | {"bytes_down": pack([15 * 145_624] * 300)}
    assert re.findall(r"(\d+\.\d) times", page(results_of(run))) == ["32.0", "32.0"]


def test_of_many_workers_the_largest_and_the_smallest_weights_are_shown() -> None:
    text = page(SHAPES["many workers"])
    assert text.count('aria-label="weight of') == MOST_ROWS
    assert f"{100 - MOST_ROWS} workers with weights between these are not shown" in text
    assert "worker 99 (batch 904)" in text
