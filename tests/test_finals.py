"""The final table compares runs under the same conditions only: leads over the baseline, and which rule is best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from signvote.report import table
from signvote.results import read
from tests.test_report import MODES, made_up_run, results_of, with_final

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("task", "mnist"), ("model", "mlp"), ("recipe", "paper"), ("batch_sizes", [4] * 15), ("rounds", 200),
        ("step", 0.01), ("momentum", 0.5), ("schedule", "constant"), ("zeros", "abstain"), ("decay", 0.1),
        ("feedback", True), ("top", 0.1), ("split", "iid"), ("attack", "invert:2"), ("miss", 0.1),
        ("absent", ["0:1"]), ("test_batch", 8), ("of a later signvote", 1),
    ],
)  # fmt: skip
def test_a_lead_is_over_runs_of_the_same_conditions(setting: str, value: Any) -> None:
    one = made_up_run(**{setting: value})
    other, its_own = made_up_run("majority"), made_up_run("majority", **{setting: value})
    assert [row["lead"] for row in table(results_of(one, other))] == [None, None]
    (row,) = (row for row in table(results_of(one, other, its_own)) if row["rule"] == "pooled")
    mine, its = (run["evaluations"]["accuracy"][-1] for run in (one, its_own))
    assert row["lead"] == pytest.approx(mine - its)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("pooled", {"options": {"cap": 2.0}}),
        ("pooled", {"mode": None, "batch_sizes": MODES[4]}),
        ("pooled", {"evaluate_every": 10}),
        ("pooled", {"sign_error": True}),
        ("sgd", {"step": 1.0, "decay": 1e-3}),
    ],
)
def test_what_is_no_condition_of_a_lead(rule: str, settings: dict[str, Any]) -> None:
    """The rule, its options and its usual step, how batch sizes were written down, what else was measured."""
    rows = table(results_of(made_up_run(rule, **settings), made_up_run("majority")))
    assert {row["rule"]: row["lead"] is None for row in rows} == {rule: False, "majority": True}


def test_leads_of_a_study_that_varies_step_and_zeros() -> None:
    """In each row pooled is paired with the majority of its own step and zeros."""
    rows = table(read(ROOT / "paper" / "why-mnist" / "results.json.gz"))
    found = {row["detail"]: row for row in rows if row["batches"] == "mode 4" and row["rule"] == "pooled"}
    assert {detail: round(100 * row["lead"], 1) for detail, row in found.items()} == {
        "step 0.0001, zeros abstain": 36.1,
        "step 0.001, zeros coin": 11.8,
    }
    assert all(row["lead"] is None for row in rows if row["rule"] == "majority")


def test_the_best_is_best_under_its_own_conditions() -> None:
    """Neither name tells that the steps differ; the conditions do."""
    rows = table(results_of(with_final(0.7, rule="majority", step=0.1), with_final(0.9, step=0.01)))
    assert [row["best"] for row in rows] == [False, False]
    rows = table(
        results_of(with_final(0.7, rule="majority"), with_final(0.9), with_final(0.8, options={"cap": 2.0}))
    )
    assert {row["value"]: row["best"] for row in rows} == {0.7: False, 0.9: True, 0.8: False}
