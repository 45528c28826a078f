"""Studies: what their file may say, each run once, going on from results.json alone; the paper's claims."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper.claims import Lead, leads, report, verdicts
from studies.ways import WAYS

from signvote import ConfigError
from signvote.core.rules import FORMER
from signvote.metrics import percent
from signvote.report.experiments import experiments_of
from signvote.results import COMPRESSED, FORMAT, NAME, current, identity, identity_of, read, write
from signvote.results.lengths import pack, unpack
from signvote.sim import Config
from signvote.sim import config as config_module
from signvote.sim.compare import compare, in_order, name_of, names_of
from signvote.sim.study import read_study
from tests.test_package import command
from tests.test_report import made_up_run, results_of
from tests.test_sim import small

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "paper"
COMMITTED = sorted([*PAPER.glob("*.toml"), *ROOT.glob("studies/*.toml")])
TINY = """
task = "mnist-10k"
model = "mlp"
rounds = 3
evaluate_every = 2
total = 60

[[grid]]
rules = ["majority", "weighted"]
modes = [1, 4]
recipe = "paper"

[[grid]]
rules = ["weighted"]
modes = [4]
recipe = "tuned"
"""


def written(folder: Path, text: str = TINY) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


# ---- lists kept short ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3)))
def test_packing_loses_nothing(values: list[int]) -> None:
    packed = pack(values)
    assert unpack(packed) == values
    assert all(times > 0 for _, times in packed)
    assert all(a[0] != b[0] for a, b in pairwise(packed))


def test_a_constant_list_is_one_pair() -> None:
    assert pack([15] * 3000) == [[15, 3000]]


# ---- the file ------------------------------------------------------------------------------------


def test_grids_are_multiplied_out(tmp_path: Path) -> None:
    runs = read_study(written(tmp_path))
    assert list(runs) == [
        "mnist-10k-majority-paper-mode1-seed0",
        "mnist-10k-weighted-paper-mode1-seed0",
        "mnist-10k-majority-paper-mode4-seed0",
        "mnist-10k-weighted-paper-mode4-seed0",
        "mnist-10k-weighted-tuned-mode4-seed0",
    ]
    assert {config.model for config in runs.values()} == {"mlp"}
    assert runs["mnist-10k-weighted-tuned-mode4-seed0"].momentum == 0.9
    assert {config.seed for config in read_study(written(tmp_path), (3, 5)).values()} == {3, 5}


def test_a_grid_may_have_a_table_of_numbers(tmp_path: Path) -> None:
    text = 'task = "mnist"\n[[grid]]\nrules = ["sgd"]\nstep = 1\nsteps = { "0.*" = 0.5 }\n'
    (run,) = read_study(written(tmp_path, text)).values()
    assert (run.step, run.steps) == (1.0, {"0.*": 0.5})


def test_a_grid_goes_before_what_is_shared_and_a_run_in_two_grids_is_one(tmp_path: Path) -> None:
    text = 'task = "mnist"\nrounds = 5\nrules = ["majority"]\n[[grid]]\nseeds = [0, 1]\n'
    assert len(read_study(written(tmp_path, text + "[[grid]]\nseeds = [1, 2]\n"))) == 3
    runs = read_study(written(tmp_path, text + "[[grid]]\nrounds = 9\nstep = 1\nabsent = ['0:1:2']\n"))
    assert [config.rounds for config in runs.values()] == [5, 5, 9]
    assert list(runs.values())[2].absent == ("0:1:2",)
    assert len(read_study(written(tmp_path, text + "[[grid]]\nseeds = [0]\nmiss = 0\n"))) == 2, "0 is 0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = ", r"tiny.toml is no TOML: "),
        ('task = "mnist"', r"asks for no runs; wanted at least one \[\[grid\]\]"),
        ('[grid]\nrules = ["weighted"]', "asks for no runs"),
        ('[[grid]]\nrules = ["weighted"]', "grid 1: task is missing; give one, such as task = 'mnist'"),
        ('task = "mnist"\n[[grid]]\n', "rules is missing; give one"),
        ('[[grid]]\nruels = ["weighted"]', "grid 1: there is no setting 'ruels'; did you mean 'rules'"),
        ("[[grid]]\nmode = 4", "there is no setting 'mode'; did you mean 'modes'"),
        ('task = "mnist"\nround = 5\n[[grid]]', "there is no setting 'round'; did you mean 'rounds'"),
        ("[[grid]]\nrules = []", r"rules is \[\]; wanted a list, each a text"),
        ('[[grid]]\nseeds = ["one"]', r"seeds is \['one'\]; wanted a list, each a whole number"),
        ("[[grid]]\nrounds = 3.5", "rounds is 3.5; wanted a whole number"),
        ("[[grid]]\nrounds = true", "rounds is True; wanted a whole number"),
        ('[[grid]]\nstep = "big"', "step is 'big'; wanted a number"),
        ("[[grid]]\nsign_error = 1", "sign_error is 1; wanted true or false"),
        ('[[grid]]\nzeros = "up"', "zeros is 'up'; wanted 'coin' or 'abstain'"),
        ("[[grid]]\noptions = 3", "options is 3; wanted a table"),
        ('task = "mnist"\n[[grid]]\nrules = ["poled"]', "grid 1: there is no rule 'poled'; did you mean"),
        (
            'task = "mnist"\n[[grid]]\nrules = ["weighted"]\noptions = { warm = 3 }',
            "has no option warm; it has",
        ),
    ],
)
def test_a_file_that_says_it_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_study(written(tmp_path, text))


# ---- names ---------------------------------------------------------------------------------------


def test_a_name_tells_what_is_not_as_usual() -> None:
    def name(rule: str = "weighted", **settings: Any) -> str:
        return name_of(Config(task="mnist", rule=rule, **settings))

    assert name(mode=4, seed=2) == "mnist-weighted-tuned-mode4-seed2"
    assert name("sgd") == "mnist-sgd-tuned-mode1-seed0"
    assert name(batch_sizes=(4, 4)) == "mnist-weighted-tuned-batches-seed0"
    assert name(attack="flip=0.3:2", split="dirichlet:0.5") == (
        "mnist-weighted-tuned-mode1-split=dirichlet_0.5-attack=flip=0.3_2-seed0"
    )
    assert name(options={"per": "tensor", "forgetting": 0.98}, step=0.01) == (
        "mnist-weighted-tuned-mode1-forgetting=0.98-per=tensor-step=0.01-seed0"
    )
    assert name(absent=("0:1:6", "3:4")) == "mnist-weighted-tuned-mode1-absent=0_1_6+3_4-seed0"


def test_namesakes_are_told_apart() -> None:
    configs = [small(), small(rounds=5), small(batch_sizes=(4, 4), rounds=5), small("majority")]
    names = names_of(configs)
    assert len(set(names)) == 4
    assert names[1] == f"{name_of(configs[1])}-workers=4-batch_sizes=4+4+8+32-rounds=5"
    assert names[3] == name_of(configs[3])


def test_a_name_is_never_too_long_for_a_folder(tmp_path: Path) -> None:
    """It is cut before anything starts; the digest of all settings tells runs apart."""
    many = tuple(f"0:{t}:{t + 9}" for t in range(60))
    configs = [small(absent=many, seed=seed, rounds=9) for seed in (0, 1)]
    configs += [small(absent=(*many, "3:1"), rounds=rounds, batch_sizes=(2,) * 90) for rounds in (9, 8)]
    configs.append(Config(task="é" * 200, rule="weighted", batch_sizes=(2, 2)))
    names = [*names_of(configs), *map(name_of, configs[:3])]
    assert len(set(names[:5])) == 5
    for name in names:
        assert len(name.encode()) <= 255
        (tmp_path / name).mkdir(exist_ok=True)
    assert names[0].startswith("mnist-10k-weighted-tuned-batches-absent=0_0_9+0_1_10+")
    assert names_of(configs) == names[:5], "the same run has the same folder again"


def test_runs_of_equal_batches_follow_each_other() -> None:
    configs = [small(batch_sizes=sizes) for sizes in ((4, 4), (8, 8), (4, 4), (8, 8), (2, 2))]
    assert in_order([0, 1, 2, 3, 4], configs) == [0, 2, 1, 3, 4]
    assert in_order([1, 2, 4], configs) == [2, 1, 4]


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_from_the_command_line_runs_once_and_goes_on_from_its_results_alone(tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "tiny"
    first = command("study", str(path), "--jobs", "1", "--only", "weighted")
    assert first.returncode == 0, first.stderr
    assert {f.name for f in out.iterdir()} == {
        "figure.png", "figure.svg", "report.html", "results.csv", "results.json", "results.md", "runs",
    }  # fmt: skip
    assert len(read(out / NAME)["runs"]) == 3
    shutil.rmtree(out / "runs")
    write(out / COMPRESSED, read(out / NAME))  # as a committed study is kept
    (out / NAME).unlink()

    assert command("study", str(path), "--jobs", "1").returncode == 0
    assert sorted(f.name for f in (out / "runs").iterdir()) == [
        "mnist-10k-majority-paper-mode1-seed0", "mnist-10k-majority-paper-mode4-seed0",
    ]  # fmt: skip
    assert not (out / NAME).exists()
    results = read(out / COMPRESSED)
    assert [run["config"]["rule"] for run in results["runs"]] == [
        "majority", "weighted", "majority", "weighted", "weighted",
    ]  # fmt: skip
    assert results["command"] == f"signvote study {path}", "of a whole study, one command"

    more = command("study", str(path), "--jobs", "1", "--seeds", "1", "--only", "tuned")
    assert more.returncode == 0, more.stderr
    results = read(out / COMPRESSED)
    assert [run["config"]["seed"] for run in results["runs"]] == [1, 0, 0, 0, 0, 0]
    assert results["command"].splitlines() == [
        f"signvote study {path}", f"signvote study {path} --seeds 1 --only tuned",
    ]  # fmt: skip
    table = (out / "results.md").read_text()
    assert table.startswith("mnist-10k: test accuracy in % after 3 rounds, 1 to 2 seeds")
    assert "| weighted | tuned |" in table


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Missing from signvote study"),
        (("nowhere.toml",), "No such file or directory: nowhere.toml"),
        (
            ("tiny.toml", "--only", "weightedd"),
            "no run has 'weightedd' in its name; a name is 'mnist-10k-maj",
        ),
        (("tiny.toml", "--jobs", "0"), "jobs is 0"),
        (("tiny.toml", "--precision", "half"), "half"),
        (("tiny.toml", "--device", "abacus"), "device is 'abacus'; it must be cpu, cuda or cuda:NUMBER"),
    ],
)
def test_a_study_that_cannot_be_run(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = command("study", *arguments)
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr
    assert [f.name for f in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.parametrize("name", [NAME, COMPRESSED])
def test_results_alone_say_what_is_done(name: str, tmp_path: Path) -> None:
    """No process is started, no folder made; what nobody asks for stays, other settings are other runs."""
    config, other = small(), small(rounds=99)
    made_up = made_up_run("majority")
    runs = [
        made_up | {"config": c.as_dict(), "rounds_done": c.rounds, "status": status}
        for c, status in ((other, "interrupted"), (config, "done"))
    ]
    runs.append(made_up | {"config": {**config.as_dict(), "rule": "of old"}, "rounds_done": 1})
    write(tmp_path / name, results_of(*runs))
    seen: list[tuple[int, int, str]] = []
    results = compare([config], tmp_path, command="new", watch=lambda *news: seen.append(news))
    kept = current(results_of(runs[1], runs[0], runs[2]))["runs"]
    assert results["runs"] == json.loads(json.dumps(kept))
    assert results["command"].splitlines() == ["signvote compare --task mnist-10k", "new"]
    assert seen == [(0, config.rounds, percent(runs[1]["evaluations"]["accuracy"][-1]))]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no results file of signvote: Expecting value"),
        ("[]", "is no results file"),
        ("{}", "format is None, which signvote never wrote"),
        (
            '{"format": 7, "runs": []}',
            "format 7 is a later signvote's; this one reads up to 3: install a later",
        ),
        (
            '{"format": 2, "runs": []}',
            "format 2 is an earlier signvote's; this one reads from 3 on: run it again",
        ),
        ('{"format": 3, "runs": 3}', "'runs' is no list"),
    ],
)
def test_a_results_file_that_is_none(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"results.json.*{why}.*; choose another --out, or remove it"):
        compare([small()], tmp_path)


# ---- committed studies ---------------------------------------------------------------------------


def _with_rule_of_today(run: dict[str, Any]) -> dict[str, Any]:
    rule = run["config"]["rule"]
    return run | {"config": run["config"] | {"rule": FORMER.get(rule, rule)}}


@pytest.mark.filterwarnings("ignore:the rule:FutureWarning")
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_study_holds_every_run_of_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made by release 0.1.0 name its rules, and those of studies/ways.py its ways."""
    monkeypatch.setattr(config_module, "YARDSTICKS", (*config_module.YARDSTICKS, *WAYS))
    results = read(path.with_suffix("") / COMPRESSED)
    done = {identity_of(_with_rule_of_today(run)) for run in results["runs"] if run["status"] == "done"}
    assert {identity(config) for config in read_study(path).values()} <= done
    assert f" {path.relative_to(ROOT)}" in results["command"]


# ---- the paper -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the rule:FutureWarning")
@pytest.mark.parametrize(("name", "curves"), [("fig1-mnist", 4), ("fig1-cifar10", 5)])
def test_the_papers_studies(name: str, curves: int) -> None:
    runs = list(read_study(PAPER / f"{name}.toml").values())
    assert len(runs) == curves * 4 * 3
    assert {(c.rounds, c.evaluate_every, c.workers, sum(c.batch_sizes)) for c in runs} == {
        (3000, 100, 15, 960)
    }
    authors = [c for c in runs if c.recipe == "paper"]
    assert {(c.step, c.momentum, c.schedule, c.zeros) for c in authors} == {
        (1e-3, 0.0, "constant", "abstain")
    }
    tuned = {"weighted"} if name == "fig1-mnist" else {"majority", "weighted"}
    assert {c.rule for c in runs if c.recipe == "tuned"} == tuned
    assert all(c.options == ({"zero_is_symbol": True} if c.rule == "it-signsgd" else {}) for c in runs)


def level(rule: str, mode: int, seed: int, accuracy: float, best: float = 0.0) -> dict[str, Any]:
    run = made_up_run(rule, mode, seed)
    run["evaluations"] = {"round": [0, 10, 20], "accuracy": [0.1, best, accuracy], "loss": [2.3, 1.0, 1.0]}
    return run


def test_claims_are_paired_by_seed_and_answered() -> None:
    plain = {1: (0.98, 0.99), 2: (0.95, 0.96), 3: (0.93, 0.90), 4: (0.85, 0.80)}
    ahead = {1: (0.001, -0.001), 2: (0.01, 0.02), 3: (0.02, 0.04), 4: (0.05, -0.6)}
    runs = [level("majority", m, s, plain[m][s]) for m in plain for s in (0, 1)]
    runs += [level("it-signsgd", m, s, plain[m][s] + ahead[m][s], best=0.97) for m in plain for s in (0, 1)]
    runs += [
        level("it-signsgd", 4, 7, 0.5),
        made_up_run("weighted", None),
    ]  # a seed without its pair, no mode
    found = experiments_of(results_of(*runs))[:-1]
    last = leads(found, "it-signsgd", "last")
    assert [lead.mode for lead in last] == [1, 2, 3, 4]
    assert [lead.by_seed for lead in last] == [pytest.approx(ahead[m]) for m in plain]
    assert verdicts(last) == {"a": "only in mode 2, mode 3", "b": "no", "c": "yes"}
    best = leads(found, "it-signsgd", "best")
    assert verdicts(best)["b"] == "yes"
    other_step = experiments_of(
        results_of(*(made_up_run(rule, step=s) for rule, s in (("majority", 1.0), ("weighted", 2.0))))
    )
    assert leads(other_step, "weighted", "last") == [], "a lead is under the same conditions"
    text = report(results_of(*runs))
    assert "| mode 2 | +1.50 ± 1.00, ahead in 2 of 2 |" in text
    assert "last evaluation: (a) only in mode 2, mode 3; (b) no; (c) yes." in text
    assert (
        "| majority, tuned recipe | mode 1, mode 2, mode 3, mode 4 | 72,812 | 72,812 | 2,328,104 | 31.97"
        in text
    )


def test_verdicts() -> None:
    def of(*values: float, first: int = 1) -> dict[str, str]:
        return verdicts([Lead(mode=first + i, by_seed=(v, v)) for i, v in enumerate(values)])

    assert of(0.0, 0.01, 0.02, 0.03) == {"a": "yes", "b": "yes", "c": "yes"}
    assert of(0.05, -0.01, -0.02) == {"a": "no", "b": "no", "c": "no"}
    assert of(0.0) == {"a": "not tried", "b": "not tried", "c": "yes"}
    assert of(0.1, first=4) == {"a": "yes", "b": "not tried", "c": "not tried"}


def test_the_claims_are_a_command(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results_of(made_up_run("majority"), made_up_run("pooled"))))
    line = [sys.executable, "-m", "paper.claims"]
    run = subprocess.run([*line, str(path)], capture_output=True, text=True, cwd=PAPER.parent, check=True)
    assert "Lead of pooled over majority in points" in run.stdout
    wrong = subprocess.run(line, capture_output=True, text=True, cwd=PAPER.parent)
    assert wrong.returncode == 1
    assert "usage: python -m paper.claims RESULTS.json" in wrong.stderr


def test_results_from_before_a_setting_existed_are_completed(tmp_path: Path) -> None:
    """So that the same run of another seed is shown beside them."""
    config = Config(task="mnist-10k", model="mlp", rule="weighted").as_dict()
    older = {k: v for k, v in config.items() if k not in ("decay", "feedback", "top")}
    strange = {"task": "mnist-10k", "rule": "no rule of ours", "batch_sizes": [4], "seed": 0}
    runs = [made_up_run("majority") | {"config": c} for c in (older, strange)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"format": FORMAT, "command": "", "runs": runs}))
    assert [run["config"] for run in read(path)["runs"]] == [config, strange]
