"""The tables of the studies, from made-up runs."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from studies import former, local, tables
from studies.language import language

from signvote import ONE, Layout, Voters
from signvote.results import NAME, Result, pack, read, results_of, write
from signvote.sim.study import read_study
from tests.launcher import launched
from tests.test_report import made_up_run

ROOT = Path(__file__).parent.parent


def run(rule: str = "robust", accuracy: float = 0.97, **settings: Any) -> Result:
    config = {
        "rule": rule, "options": {}, "mode": 1, "attack": None, "seed": 0, "rounds": 500, "recipe": "tuned",
        "evaluate_every": 100, "batch_sizes": [4, 4, 4, 16, 16, 16], "workers": 6, "momentum": 0.9, "decay": 0.0,
        "feedback": False, "top": None,
    } | settings  # fmt: skip
    return {
        "config": config,
        "evaluations": {"accuracy": [0.1, accuracy]},
        "trust": {
            "round": [100, 200, 205, 210],
            "weight": [[1, 1, 1, 2, 2, 2.0]] * 3 + [[3, 3, 3, 0, 0, 0.0]],
        },
        "sign_error": {"round": [500], "error": [0.25]},
        "accuracy_by_class": [0.9, 0.5, accuracy],
        "bytes_up": [[6_000_000, 2]],
        "bytes_down": [[6_000_000, 2]],
        "status": "done",
    }


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_attacks_have_a_worst_case_and_targets() -> None:
    runs = [
        run(accuracy=0.97), run(accuracy=0.971, attack="invert:7"), run(accuracy=0.93, attack="anti:7"),
        run(accuracy=0.95, attack="anti:5"), run(accuracy=0.9, attack="alie:3", seed=0),
        run(accuracy=0.92, attack="alie:3", seed=1), run("pooled", 0.974), run(evaluate_every=5, mode=3),
        run(attack="random:15", rounds=3000, accuracy=0.1), run("pooled", 0.6, mode=3, attack="lie:3"),
    ]  # fmt: skip
    rows = cells(tables.attacks(runs))
    assert rows[0] == ["attackers", "rule", "clean", "invert", "anti", "alie", "worst"]
    assert ["3", "robust", "97.0", "", "", "91.0 ± 1.4", "**91.0**"] in rows
    assert ["7", "robust", "97.0", "97.1", "93.0", "", "**93.0**"] in rows
    assert ["pooled", "60.0"] in rows
    said = {row[0]: row[1:] for row in rows}
    assert said["anti:5: at most 2.0 below clean"] == ["2.00", "yes"]
    assert said["alie:3: at most 3.0 below clean"] == ["6.00", "**no**"]
    assert said["mode 1, no attack: at most 0.3 below pooled"] == ["0.40", "**no**"]
    assert said["three sleepers, seed 0: out of power within 25 rounds"] == ["10", "yes"]
    assert said["15 coins, robust, seed 0: share at most 0.15"] == ["0.333", "**no**"]


def test_rules_by_recipe_and_mode() -> None:
    runs = [run("pooled", a, mode=m, seed=s) for m, s, a in ((1, 0, 0.97), (1, 1, 0.99), (4, 0, 0.96))]
    runs += [run("pooled", 0.5, mode=4, recipe="paper", options={"per": "tensor"})]
    text = tables.rules(runs)
    assert text.index("tuned recipe") < text.index("paper recipe")
    rows = cells(text)
    assert ["pooled", "98.00 ± 1.41", "96.00"] in rows
    assert ["pooled", "0.250 ± 0.000", "0.250"] in rows
    assert ["sqrt(B) ratio", "2.0", "2.0"] in rows
    assert ["pooled, per tensor", "50.00"] in rows


def test_labels_and_options() -> None:
    assert cells(tables.labels([run("majority", 0.8)]))[2] == ["majority", "80.0", "50.0"]
    found = cells(tables.options([run("pooled"), run("pooled", 0.9, feedback=True, top=0.1)]))
    assert found[2:] == [["default", "97.0", "4.00"], ["feedback, top 0.1", "90.0", "4.00"]]


# ---- language models ---------------------------------------------------------------------------------

EQUAL = [8] * 8
UNEQUAL = [1] * 7 + [57]


def read_run(rule: str, loss: float, seed: int = 0, sizes: Sequence[int] = EQUAL, **settings: Any) -> Result:
    """A run of a language model of 1,000 parameters."""
    whole = made_up_run(rule, None, seed, rounds=20, batch_sizes=list(sizes), **settings)
    width = 4000 if rule == "adamw" else 125
    return whole | {
        "coordinates": 1000,
        "metrics": [{"name": "loss", "unit": "nats/byte", "more_is_better": False}],
        "evaluations": {"round": [0, 20], "loss": [5.5, loss]},
        "bytes_up": pack([width * len(sizes)] * 20),
    }


def test_language_has_a_row_for_each_rule_and_a_column_for_each_population() -> None:
    runs = [read_run("majority", 1.0 + seed / 100, seed) for seed in range(3)]
    runs += [read_run("majority", 1.4, 0, UNEQUAL, step=6e-4), read_run("weighted", 1.25, 0, UNEQUAL)]
    runs += [read_run("weighted", math.nan, 0, split="blocks"), read_run("adamw", 1.02, momentum=0.95)]
    runs += [read_run("robust", 1.03, polar=True)]
    first, second = language(runs).split("\n\n")
    equal, unequal = "8 x 8", "7 x 1 + 1 x 57"
    heads = ["test loss (nats/byte), less is better", equal, unequal, f"{equal}, blocks"]
    assert cells(first) == [
        [*heads, "bytes up per parameter and round"],
        ["---", "---:", "---:", "---:", "---:"],
        ["majority", "**1.01 ± 0.01**", "1.4", "", "0.125"],
        ["weighted", "", "**1.25**", "1 of 1 diverged", "0.125"],
        ["adamw", "1.02", "", "", "4.000"],
        ["robust", "1.03", "", "", "0.125"],
    ]
    assert cells(second)[2:] == [
        ["majority", "0.003, 0.9, 1", "0.0006, 0.9, 1", ""],
        ["weighted", "", "0.003, 0.9, 1", "0.003, 0.9, 1"],
        ["adamw", "0.003, 0.95, 1", "", ""],
        ["robust", "0.003, 0.9, 1, polar", "", ""],
    ]


def test_of_a_grid_the_best_settings_of_each_rule_come_first() -> None:
    runs = [read_run("sgd", 2.0), read_run("majority", 1.2, step=0.1), read_run("majority", 1.1, step=0.2)]
    rows = cells(language(runs).split("\n\n")[0])[2:]
    assert [row[:2] for row in rows] == [
        ["sgd", "2"],
        ["majority, step 0.2", "**1.1**"],
        ["majority, step 0.1", "1.2"],
    ], "the best is bold, whichever rule has it"


def test_every_rule_of_the_language_study_has_a_grid() -> None:
    configs = read_study(ROOT / "studies" / "begun" / "language-grid.toml").values()
    grids = Counter(config.rule for config in configs)
    assert set(grids) == {"majority", "it-signsgd", "sgd", "adamw"}, (
        "equal workers: the other rules are majority"
    )
    assert min(grids.values()) >= 12
    assert {config.seed for config in configs} == {41}


# ---- local steps ---------------------------------------------------------------------------------


def local_run(rule: str, losses: Sequence[float], seed: int = 0, **settings: Any) -> Result:
    """A run of four workers with ten local steps a round; a worker sends 100 bytes, or 400."""
    usual: dict[str, Any] = {"rule": rule, "batch_sizes": [4] * 4, "local_steps": 10, "seed": seed}
    config = usual | settings
    each = 400 if rule == "diloco" else 100
    sent = pack([each * len(config["batch_sizes"])] * 2)
    return {
        "config": config,
        "evaluations": {"round": [0, 1, 2], "loss": [5.5, *losses]},
        "bytes_up": sent,
        "bytes_down": sent,
        "status": "done",
    }


def test_local_steps_have_losses_and_bytes() -> None:
    runs = [
        local_run("diloco", [3.0, 2.0]),
        local_run("diloco", [3.0, 2.2], 1),
        local_run("majority", [3.0, 2.5]),
    ]
    runs += [
        local_run("weighted", [4.0, 2.3], batch_sizes=[1, 1, 1, 13]),
        local_run("weighted", [3.0, 2.0], local_steps=5),
    ]
    rows = cells(local.local(runs))[2:]
    assert rows == [
        ["4 x 4", "5", "weighted", "**2.000**", "20", "20"],
        ["4 x 4", "10", "majority", "2.500", "10", "10"],
        ["4 x 4", "10", "diloco", "**2.100 ± 0.141**", "40", "40"],
        ["3 x 1 + 1 x 13", "10", "weighted", "**2.300**", "10", "10"],
    ]
    megabytes, losses = local.curve(runs[:2])
    assert megabytes == [0.0008, 0.0016]
    assert losses == [3.0, 2.1]


def test_the_figure_of_local_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, figure = tmp_path / "results.json", tmp_path / "figure.png"
    runs = [
        made_up_run(rule, None, 0, batch_sizes=[4] * 4, local_steps=30) for rule in ("weighted", "diloco")
    ]
    for run in runs:
        run["evaluations"]["loss"] = [float(value) for value in run["evaluations"]["round"]]
    write(path, results_of(runs))
    monkeypatch.setattr(sys, "argv", ["local", str(path), str(figure)])
    local.main()
    assert figure.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["local", str(path)])
    with pytest.raises(SystemExit, match=r"FIGURE\.png"):
        local.main()


# ---- pages -------------------------------------------------------------------------------------------

COMMAND = re.compile(r"<!-- python -m studies\.tables (\w+) (\S+) -->\n\n?((?:\|.*\n|\n(?=\|))*)")


def tables_on(page: str) -> list[tuple[str, str, str]]:
    """Study, results file and tables below each comment of a page."""
    return [(study, path, found.strip()) for study, path, found in COMMAND.findall(page)]


def test_a_table_is_found_below_its_comment() -> None:
    page = "a\n\n<!-- python -m studies.tables rules x.json.gz -->\n\n| a |\n| b |\n\n| c |\n\nb\n\n| d |\n"
    assert tables_on(page) == [("rules", "x.json.gz", "| a |\n| b |\n\n| c |")]
    assert tables_on(page.replace("\n\n| a", "\n| a"))[0][2].startswith("| a |")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    for study, path, found in tables_on(page.read_text()):
        assert found == tables.text_of(study, ROOT / path)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    whole = made_up_run(batch_sizes=[4, 4, 4, 16, 16, 16]) | {"accuracy_by_class": [0.9, 0.5, 0.8]}
    done = whole | {"config": whole["config"] | {"rule": "majority"}}
    write(path, results_of([done, whole | {"status": "interrupted"}]))
    monkeypatch.setattr(sys, "argv", ["tables", "labels", str(path)])
    tables.main()
    assert "majority" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tables", "nothing", str(path)])
    with pytest.raises(SystemExit, match="attacks,rules,labels,language,local,options"):
        tables.main()


# ---- rules of earlier releases as yardsticks ---------------------------------------------------------


def test_former_rules_weigh_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([("w", (64,))])
    roots = former.SquareRoots(layout)
    voters = Voters(workers=(0, 1, 2), batch_sizes=(4, 16, 64))
    assert roots.weights(voters)[:, 0].tolist() == [2 * ONE, 4 * ONE, 8 * ONE]
    with pytest.raises(ValueError, match="needs the batch size of every worker"):
        roots.weights(Voters(workers=(0, 1), batch_sizes=(0, 4)))
    odds = former.LogOdds(layout)
    assert len(set(odds.weights(voters)[:, 0].tolist())) == 1, "nothing is learned yet"
    assert len(set(odds.weights(Voters(workers=(0, 1), batch_sizes=()))[:, 0].tolist())) == 1


def test_a_study_with_former_rules_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text(
        'task = "mnist-10k"\nmodel = "mlp"\nrounds = 4\n[[grid]]\nbatch_sizes = [4, 8, 64]\n'
        'rules = ["log-odds", "square-roots"]\n'
    )
    done = launched("-m", "studies.former", str(path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    runs = read(tmp_path / "few" / NAME)["runs"]
    assert [(run["config"]["rule"], run["status"]) for run in runs] == [
        ("log-odds", "done"),
        ("square-roots", "done"),
    ]
