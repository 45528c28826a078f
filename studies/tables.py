"""The tables of docs/, from results: `python -m studies.tables STUDY RESULTS.json`.

STUDY is attacks, labels, language, local, options or rules. Only finished runs count. A cell is the mean of its seeds
and, if there are several, their standard deviation.

Below a comment with the command, a page has the tables that it prints, and a test compares them:

    <!-- python -m studies.tables language studies/language/results.json.gz -->
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from paper.claims import table as markdown

from signvote.results import Result, read, unpack
from studies.cells import Cells, attack_name, attackers, last, mode_of, pivot, shown, variant
from studies.language import language
from studies.local import local

ORDER = ("majority", "it-signsgd", "pooled", "known-batch", "agreement", "robust", "oracle", "median", "sgd")
USUAL = {
    "momentum": 0.9,
    "decay": 0.0,
    "feedback": False,
    "top": None,
    "rounds": 500,
}
STUDY_EVERY = 100  # rounds between two evaluations in most runs of the study of attacks
SLEEPER_EVERY = 5  # in the runs that time how fast sleepers lose their weight
SLEEPER_START = 200  # round in which they wake up


def _with(runs: Iterable[Result], **wanted: Any) -> list[Result]:
    """The runs that have these settings."""
    return [run for run in runs if wanted.items() <= run["config"].items()]


# ---- attacks ---------------------------------------------------------------------------------------


def attacks(runs: list[Result]) -> str:
    """Accuracy by number of attackers, rule and attack, with the worst; then the targets of `robust`."""
    parts = [_by_attack(runs), _by_mode_and_attack(runs), targets(runs)]
    return "\n\n".join(parts)


def _by_attack(runs: list[Result]) -> str:
    equal = _with(runs, mode=1, rounds=500)
    attacked = [run for run in equal if attackers(run)]
    honest = [run for run in equal if not attackers(run)]
    clean = pivot(honest, variant, attack_name)
    names = list(dict.fromkeys(map(attack_name, attacked)))
    lines = []
    for number in sorted(set(map(attackers, attacked))):
        members = [run for run in attacked if attackers(run) == number]
        cells = pivot(members, variant, attack_name)
        for rule in sorted(cells, key=ORDER.index):
            by_attack = cells[rule]
            worst = min(map(fmean, by_attack.values()), default=math.nan)
            line = [number, rule, shown(clean[rule]["clean"])]
            line += [shown(by_attack.get(name, [])) for name in names]
            line.append(f"**{worst:.1f}**")
            lines.append(line)
    return markdown(["attackers", "rule", "clean", *names, "worst"], lines)


def _by_mode_and_attack(runs: list[Result]) -> str:
    usual = _with(runs, evaluate_every=STUDY_EVERY)
    unequal = [run for run in usual if run["config"]["mode"] in (2, 3, 4)]
    cells = pivot(unequal, variant, _mode_and_attack)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = []
    for rule, row in cells.items():
        texts = [shown(row.get(column, [])) for column in columns]
        lines.append([rule, *texts])
    return markdown(["rule", *columns], lines)


def _mode_and_attack(run: Result) -> str:
    text = f"mode {run['config']['mode']}"
    attack = run["config"]["attack"]
    if attack:
        text += f", {attack}"
    return text


# ---- targets of robust -----------------------------------------------------------------------------


def targets(runs: list[Result]) -> str:
    """Targets for `robust`, the measured values, and whether it reached them."""
    lines = _targets_under_attack(runs) + _targets_without_attack(runs)
    for run in runs:
        if run["config"]["evaluate_every"] == SLEEPER_EVERY:
            lines.append(_sleepers(run))
        if run["config"]["attack"] == "random:15":
            lines.append(_coins(run))
    return markdown(["target", "measured", "reached"], lines)


def _targets_under_attack(runs: list[Result]) -> list[list[str]]:
    clean = _accuracies(runs, attack=None, mode=1, rule="robust")
    honest = _accuracies(runs, attack=None, mode=None, rule="robust")
    allowed_losses = {
        "invert:7": (0.5, "clean", clean),
        "anti:5": (2.0, "clean", clean),
        "alie:3": (3.0, "clean", clean),
        "clones:3": (1.0, "the 12 honest alone", honest),
        "mimic:3": (1.0, "the 12 honest alone", honest),
    }
    lines = []
    for attack, (allowed, name, reference) in allowed_losses.items():
        attacked = _accuracies(runs, attack=attack, mode=1, rule="robust")
        if attacked and reference:
            lost = fmean(reference) - fmean(attacked)
            lines.append(_loss_line(f"{attack}: at most {allowed} below {name}", lost, allowed))
    return lines


def _targets_without_attack(runs: list[Result]) -> list[list[str]]:
    lines = []
    for mode in (1, 2, 3, 4):
        pooled = _accuracies(runs, attack=None, mode=mode, rule="pooled")
        robust = _accuracies(runs, attack=None, mode=mode, rule="robust")
        if pooled and robust:
            lost = fmean(pooled) - fmean(robust)
            lines.append(_loss_line(f"mode {mode}, no attack: at most 0.3 below pooled", lost, 0.3))
    return lines


def _accuracies(runs: list[Result], **wanted: Any) -> list[float]:
    """The last accuracies of the runs that have these settings."""
    found = _with(runs, evaluate_every=STUDY_EVERY, **wanted)
    return [last(run) for run in found]


def _loss_line(target: str, lost: float, allowed: float) -> list[str]:
    return [target, f"{lost:.2f}", _reached(lost <= allowed)]


def _sleepers(run: Result) -> list[str]:
    rounds = _rounds_in_power(run)
    seed = run["config"]["seed"]
    target = f"three sleepers, seed {seed}: out of power within 25 rounds"
    return [target, str(rounds), _reached(rounds <= 25)]


def _coins(run: Result) -> list[str]:
    share = _largest_share(run)
    rule = run["config"]["rule"]
    seed = run["config"]["seed"]
    target = f"15 coins, {rule}, seed {seed}: share at most 0.15"
    return [target, f"{share:.3f}", _reached(share <= 0.15)]


def _reached(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _rounds_in_power(run: Result) -> int:
    """Rounds after the start until the three strong workers have half of the weight for the last time."""
    trust = run["trust"]
    last_round = None
    for t, weights in zip(trust["round"], trust["weight"], strict=True):
        strong = sum(weights[-3:])
        if t >= SLEEPER_START and 2 * strong >= sum(weights):
            last_round = int(t)
    if last_round is None:
        return 0
    return last_round - SLEEPER_START + SLEEPER_EVERY


def _largest_share(run: Result) -> float:
    sizes = [abs(weight) for weight in run["trust"]["weight"][-1]]
    total = max(sum(sizes), 1e-9)
    return float(max(sizes) / total)


# ---- rules -----------------------------------------------------------------------------------------


def rules(runs: list[Result]) -> str:
    """Accuracy and sign error by recipe, rule and mode; learned weights beside sqrt(B)."""
    parts = []
    for recipe in dict.fromkeys(run["config"]["recipe"] for run in runs):
        members = _with(runs, recipe=recipe)
        for text in (_accuracy_table(members), _sign_error_table(members), _weights_table(members)):
            if text:
                parts.append(f"{recipe} recipe\n\n{text}")
    return "\n\n".join(parts)


def _accuracy_table(runs: list[Result]) -> str:
    modes = _modes(runs)
    cells = pivot(runs, variant, mode_of)
    return _mode_table("accuracy", modes, _mode_lines(cells, modes, digits=2))


def _sign_error_table(runs: list[Result]) -> str:
    """Empty if no run measured the sign error."""
    measured = [run for run in runs if run["sign_error"]]
    if not measured:
        return ""
    modes = _modes(runs)
    cells = pivot(measured, variant, mode_of, _sign_error)
    return _mode_table("sign error", modes, _mode_lines(cells, modes, digits=3))


def _weights_table(runs: list[Result]) -> str:
    """Empty if all workers have equal batches, or no run recorded weights."""
    weighted = [run for run in runs if run["config"]["mode"] > 1 and run["trust"]]
    if not weighted:
        return ""
    modes = _modes(runs)
    cells = pivot(weighted, variant, mode_of, _weight_ratio)
    lines = _mode_lines(cells, modes, digits=1)
    roots = [f"{_root_ratio(mode, runs):.1f}" for mode in modes]
    lines.append(["sqrt(B) ratio", *roots])
    return _mode_table("weight of a strong worker / a weak one", modes, lines)


def _modes(runs: list[Result]) -> list[int]:
    return sorted({run["config"]["mode"] for run in runs})


def _mode_lines(cells: Cells, modes: list[int], *, digits: int) -> list[list[str]]:
    """A line per row, with a cell per mode."""
    lines = []
    for name, row in cells.items():
        texts = [shown(row.get(mode, []), digits) for mode in modes]
        lines.append([name, *texts])
    return lines


def _mode_table(title: str, modes: list[int], lines: list[list[str]]) -> str:
    heads = [title, *(f"mode {mode}" for mode in modes)]
    return markdown(heads, lines)


def _sign_error(run: Result) -> float:
    errors = run["sign_error"]["error"]
    return float(errors[-1])


def _weight_ratio(run: Result) -> float:
    """Mean weight of the workers with the largest batch, divided by that of those with the smallest."""
    sizes = run["config"]["batch_sizes"]
    weights = run["trust"]["weight"][-1]
    strong = [weight for weight, size in zip(weights, sizes, strict=True) if size == max(sizes)]
    weak = [weight for weight, size in zip(weights, sizes, strict=True) if size == min(sizes)]
    mean_weak = fmean(weak)
    if not mean_weak:
        return math.inf
    return float(fmean(strong) / mean_weak)


def _root_ratio(mode: int, runs: list[Result]) -> float:
    run = _with(runs, mode=mode)[0]
    sizes = run["config"]["batch_sizes"]
    return math.sqrt(max(sizes) / min(sizes))


# ---- labels ----------------------------------------------------------------------------------------


def labels(runs: list[Result]) -> str:
    """Accuracy over all labels and of the worst label, by rule and mode."""
    modes = _modes(runs)
    whole = pivot(runs, variant, mode_of)
    worst = pivot(runs, variant, mode_of, _worst_label)
    heads = ["rule"]
    for mode in modes:
        heads += [f"mode {mode}", f"mode {mode}, worst label"]
    lines = []
    for rule in whole:
        line = [rule]
        for mode in modes:
            line.append(shown(whole[rule].get(mode, [])))
            line.append(shown(worst[rule].get(mode, [])))
        lines.append(line)
    return markdown(heads, lines)


def _worst_label(run: Result) -> float:
    return 100 * float(min(run["accuracy_by_class"]))


# ---- options ---------------------------------------------------------------------------------------


def options(runs: list[Result]) -> str:
    """Accuracy by option and mode, beside the megabytes of a worker in the whole run, both ways."""
    modes = _modes(runs)
    cells = pivot(runs, _changed, mode_of)
    sent = pivot(runs, _changed, mode_of, _megabytes)
    lines = _mode_lines(cells, modes, digits=1)
    for line in lines:
        by_mode = sent[line[0]]
        megabytes = fmean(next(iter(by_mode.values())))
        line.append(f"{megabytes:.2f}")
    heads = ["option", *(f"mode {mode}" for mode in modes), "MB a worker"]
    return markdown(heads, lines)


def _changed(run: Result) -> str:
    """The options that differ from the usual ones."""
    texts = []
    for key, usual in USUAL.items():
        value = run["config"][key]
        if value != usual:
            texts.append(key if value is True else f"{key} {value}")
    return ", ".join(texts) or "default"


def _megabytes(run: Result) -> float:
    up = sum(unpack(run["bytes_up"]))
    down = sum(unpack(run["bytes_down"]))
    each = (up + down) / run["config"]["workers"]
    return float(each / 1e6)


TABLES = {table.__name__: table for table in (attacks, rules, labels, language, local, options)}


def text_of(study: str, path: Path | str) -> str:
    """The tables of a results file."""
    runs = [run for run in read(path)["runs"] if run["status"] == "done"]
    return TABLES[study](runs)


def main() -> None:
    """Print the tables of a results file."""
    if len(sys.argv) != 3 or sys.argv[1] not in TABLES:
        sys.exit(f"usage: python -m studies.tables {{{','.join(TABLES)}}} RESULTS.json")
    _, study, path = sys.argv
    sys.stdout.write(f"{text_of(study, path)}\n")


if __name__ == "__main__":
    main()
