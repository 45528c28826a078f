"""The tables of docs/rules.md and docs/security.md, from results: `python -m studies.tables STUDY RESULTS.json`.

STUDY says which: attacks, labels, options or rules. Only finished runs count; a cell is the mean of its
seeds and, if there are several, their spread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from paper.claims import table as markdown

from signvote.results import read, unpack

Run = dict[str, Any]
Key = Callable[[Run], Hashable | None]
FEW = ("majority", "it-signsgd", "pooled", "known-batch", "agreement", "robust", "oracle", "median", "sgd")


def setting(name: str) -> Key:
    """A setting of the configuration; none as 'none'."""
    return lambda run: run["config"].get(name) or "none"


def variant(run: Run) -> str:
    """The rule and its options."""
    options = run["config"]["options"]
    shown = {k: v for k, v in options.items() if k != "zero_is_symbol"}
    return str(run["config"]["rule"]) + "".join(f", {k} {v}" for k, v in shown.items())


def last(run: Run) -> float:
    """Accuracy in %."""
    return 100 * float(run["evaluations"]["accuracy"][-1])


def attackers(run: Run) -> int:
    """How many attack."""
    attack = run["config"]["attack"]
    return int(attack.split(":")[1]) if attack else 0


def attack_name(run: Run) -> str:
    """Their attack."""
    attack = run["config"]["attack"]
    return attack.split(":")[0] if attack else "clean"


def shown(values: Sequence[float], digits: int = 1) -> str:
    """Mean and spread."""
    if not values:
        return ""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def pivot(
    runs: Iterable[Run], row: Key, column: Key, value: Callable[[Run], float] = last
) -> dict[Any, dict[Any, list[float]]]:
    """Values of runs by row and column."""
    table: dict[Any, dict[Any, list[float]]] = {}
    for run in runs:
        table.setdefault(row(run), {}).setdefault(column(run), []).append(value(run))
    return table


# ---- attacks ---------------------------------------------------------------------------------------


def attacks(runs: list[Run]) -> str:
    """Accuracy by number of attackers, rule and attack, with the worst; then the targets of `robust`."""
    equal = [r for r in runs if r["config"]["mode"] == 1 and r["config"]["rounds"] == 500]
    clean = pivot((r for r in equal if not attackers(r)), variant, attack_name)
    names = list(dict.fromkeys(attack_name(r) for r in equal if attackers(r)))
    lines = []
    for f in sorted({attackers(r) for r in equal} - {0}):
        found = pivot((r for r in equal if attackers(r) == f), variant, attack_name)
        for rule in sorted(found, key=FEW.index):
            worst = min((fmean(v) for v in found[rule].values()), default=math.nan)
            cells = [shown(found[rule].get(name, [])) for name in names]
            lines.append([f, rule, shown(clean[rule]["clean"]), *cells, f"**{worst:.1f}**"])
    whole = markdown(["attackers", "rule", "clean", *names, "worst"], lines)
    unequal = pivot((r for r in runs if r["config"]["mode"] in (2, 3, 4) and _is_plain(r)), variant, _where)
    columns = list(dict.fromkeys(c for row in unequal.values() for c in row))
    rest = [[rule, *(shown(unequal[rule].get(c, [])) for c in columns)] for rule in unequal]
    return "\n\n".join([whole, markdown(["rule", *columns], rest), targets(runs)])


def _is_plain(run: Run) -> bool:
    return bool(run["config"]["evaluate_every"] == 100)


def _where(run: Run) -> str:
    attack = run["config"]["attack"]
    return f"mode {run['config']['mode']}" + (f", {attack}" if attack else "")


def targets(runs: list[Run]) -> str:
    """What `robust` should reach, and what it did."""

    def accuracy(attack: str | None, mode: int | None = 1, rule: str = "robust") -> list[float]:
        wanted = {"attack": attack, "mode": mode, "rule": rule, "evaluate_every": 100}
        return [last(r) for r in runs if wanted.items() <= r["config"].items()]

    clean, alone = accuracy(None), accuracy(None, None)
    lines: list[list[object]] = []
    for attack, allowed, beside, name in (
        ("invert:7", 0.5, clean, "clean"), ("anti:5", 2.0, clean, "clean"), ("alie:3", 3.0, clean, "clean"),
        ("clones:3", 1.0, alone, "the 12 honest alone"), ("mimic:3", 1.0, alone, "the 12 honest alone"),
    ):  # fmt: skip
        found = accuracy(attack)
        if found and beside:
            lost = fmean(beside) - fmean(found)
            lines.append([f"{attack}: at most {allowed} below {name}", f"{lost:.2f}", _said(lost <= allowed)])
    for mode in (1, 2, 3, 4):
        pooled, robust = accuracy(None, mode, "pooled"), accuracy(None, mode)
        if pooled and robust:
            lost = fmean(pooled) - fmean(robust)
            what = f"mode {mode}, no attack: at most 0.3 below pooled"
            lines.append([what, f"{lost:.2f}", _said(lost <= 0.3)])
    for run in runs:
        if run["config"]["evaluate_every"] == 5:
            rounds = _rounds_in_power(run)
            what = f"three sleepers, seed {run['config']['seed']}: out of power within 25 rounds"
            lines.append([what, rounds, _said(rounds <= 25)])
        if run["config"]["attack"] == "random:15":
            share = _largest_share(run)
            what = f"15 coins, {run['config']['rule']}, seed {run['config']['seed']}: share at most 0.15"
            lines.append([what, f"{share:.3f}", _said(share <= 0.15)])
    return markdown(["target", "measured", "reached"], lines)


def _said(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _rounds_in_power(run: Run, start: int = 200) -> int:
    """Rounds after the start until the three strong workers last have half of the weight."""
    rounds, weights = run["trust"]["round"], run["trust"]["weight"]
    ruled = [t for t, w in zip(rounds, weights, strict=True) if t >= start and 2 * sum(w[-3:]) >= sum(w)]
    return int(max(ruled)) - start + 5 if ruled else 0


def _largest_share(run: Run) -> float:
    sizes = [abs(w) for w in run["trust"]["weight"][-1]]
    return float(max(sizes) / max(sum(sizes), 1e-9))


# ---- rules -----------------------------------------------------------------------------------------


def rules(runs: list[Run]) -> str:
    """Accuracy and sign error by recipe, rule and mode; weights learnt beside sqrt(B)."""
    parts = []
    for recipe in dict.fromkeys(r["config"]["recipe"] for r in runs):
        mine = [r for r in runs if r["config"]["recipe"] == recipe]
        modes = sorted({r["config"]["mode"] for r in mine})
        for title, value, digits, members in (
            ("accuracy", last, 2, mine),
            ("sign error", _sign_error, 3, [r for r in mine if r["sign_error"]]),
            ("weight of a strong worker / a weak one", _ratio, 1, [r for r in mine if _has_ratio(r)]),
        ):
            table = pivot(members, variant, setting("mode"), value)
            lines = [[rule, *(shown(row.get(m, []), digits) for m in modes)] for rule, row in table.items()]
            if lines and title.startswith("weight"):
                lines.append(["sqrt(B) ratio", *(f"{_root(m, mine):.1f}" for m in modes)])
            if lines:
                heads = [title, *(f"mode {m}" for m in modes)]
                parts.append(f"{recipe} recipe\n\n{markdown(heads, lines)}")
    return "\n\n".join(parts)


def _sign_error(run: Run) -> float:
    return float(run["sign_error"]["error"][-1])


def _has_ratio(run: Run) -> bool:
    return run["config"]["mode"] > 1 and bool(run["trust"])


def _ratio(run: Run) -> float:
    sizes, weights = run["config"]["batch_sizes"], run["trust"]["weight"][-1]
    strong = [w for w, b in zip(weights, sizes, strict=True) if b == max(sizes)]
    weak = [w for w, b in zip(weights, sizes, strict=True) if b == min(sizes)]
    return float(fmean(strong) / fmean(weak)) if fmean(weak) else math.inf


def _root(mode: int, runs: list[Run]) -> float:
    sizes = next(r["config"]["batch_sizes"] for r in runs if r["config"]["mode"] == mode)
    return math.sqrt(max(sizes) / min(sizes))


# ---- labels ----------------------------------------------------------------------------------------


def labels(runs: list[Run]) -> str:
    """Accuracy, and that of the worst label, by rule and mode."""
    modes = sorted({r["config"]["mode"] for r in runs})
    whole, worst = (pivot(runs, variant, setting("mode"), v) for v in (last, _worst_label))
    heads = ["rule", *(f"mode {m}{what}" for m in modes for what in ("", ", worst label"))]
    lines = [[rule, *(shown(t[rule].get(m, [])) for m in modes for t in (whole, worst))] for rule in whole]
    return markdown(heads, lines)


def _worst_label(run: Run) -> float:
    return 100 * float(min(run["accuracy_by_class"]))


# ---- options ---------------------------------------------------------------------------------------


def options(runs: list[Run]) -> str:
    """Accuracy by option and mode, beside the bytes of a worker in the whole run, both ways."""
    modes = sorted({r["config"]["mode"] for r in runs})
    table, sent = (pivot(runs, _changed, setting("mode"), v) for v in (last, _megabytes))
    lines = [[o, *(shown(row.get(m, [])) for m in modes), shown([fmean(v) for v in sent[o].values()][:1], 2)]
             for o, row in table.items()]  # fmt: skip
    return markdown(["option", *(f"mode {m}" for m in modes), "MB a worker"], lines)


def _changed(run: Run) -> str:
    usual = {"momentum": 0.9, "decay": 0.0, "feedback": False, "top": None, "rounds": 500}
    found = {k: run["config"][k] for k, v in usual.items() if run["config"][k] != v}
    return ", ".join(k if v is True else f"{k} {v}" for k, v in found.items()) or "default"


def _megabytes(run: Run) -> float:
    each = sum(sum(unpack(run[way])) for way in ("bytes_up", "bytes_down")) / run["config"]["workers"]
    return float(each / 1e6)


TABLES = {table.__name__: table for table in (attacks, rules, labels, options)}


def main() -> None:
    """Print the tables of a results file."""
    if len(sys.argv) != 3 or sys.argv[1] not in TABLES:
        sys.exit(f"usage: python -m studies.tables {{{','.join(TABLES)}}} RESULTS.json")
    runs = [r for r in read(sys.argv[2])["runs"] if r["status"] == "done"]
    sys.stdout.write(TABLES[sys.argv[1]](runs) + "\n")


if __name__ == "__main__":
    main()
