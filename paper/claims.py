"""What the runs of a study say about the paper's claims: `python -m paper.claims paper/fig1-mnist/results.json.gz`.

(a) weighted voting beats plain voting where batch sizes differ      yes: ahead in every seed of modes 2 to 4
(b) the more they differ, the larger the lead                        yes: the mean lead grows from mode 2 to 4
(c) they are equal where batch sizes do not                          yes: in mode 1 within 0.2 points, or the spread
(d) 32 times fewer bits than float32                                 from the bytes of the messages

A lead is paired: the difference of two runs of the same seed, which see the same batches. Both the last
accuracy of a run and its best are looked at, because with a constant step the last one is partly luck.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean

from signvote.report.groups import Group, groups, measured, spread_of, unique
from signvote.results import Results, read
from signvote.settings import conditions

PLAIN = "majority"
EQUAL = 0.002  # accuracies so close are called equal
MEASURES = ("last", "best")


@dataclass(frozen=True, kw_only=True)
class Lead:
    """By how much a rule is ahead of plain voting, in each seed that both have."""

    mode: int
    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.by_seed)

    @property
    def is_ahead(self) -> bool:
        """In every seed."""
        return min(self.by_seed) > 0

    @property
    def is_none(self) -> bool:
        """Equal, as far as one can tell."""
        return abs(self.mean) <= max(EQUAL, spread_of(self.by_seed) or 0.0)

    def __str__(self) -> str:
        ahead = sum(d > 0 for d in self.by_seed)
        return f"{_points(self.by_seed, '+')}, ahead in {ahead} of {len(self.by_seed)}"


def report(results: Results) -> str:
    """Accuracies, leads and bytes as Markdown tables, and what they say about each claim."""
    found = [group for group in groups(results) if group.config.get("mode") and not group.interrupted]
    parts = [
        _compared([g for g in found if g.panel == panel], panel) for panel in unique(g.panel for g in found)
    ]
    return "\n\n".join([*parts, _bytes(found)]) + "\n"


def accuracies(group: Group, measure: str) -> dict[int, float]:
    """The last or the best accuracy of each seed."""
    found = {}
    for run in group.runs:
        values = [a for a in measured(run, "accuracy").values() if math.isfinite(a)]
        found[int(run["config"]["seed"])] = values[-1] if measure == "last" else max(values)
    return found


def leads(members: list[Group], rule: str, measure: str) -> list[Lead]:
    """Of a rule over plain voting, by mode; only under the same conditions and for seeds that both have."""
    plain = [group for group in members if group.rule == PLAIN]
    ruled = sorted((group for group in members if group.rule == rule), key=lambda group: group.config["mode"])
    found = []
    for group, other in product(ruled, plain):
        if conditions(group.config) != conditions(other.config):
            continue
        mine = accuracies(group, measure)
        its = accuracies(other, measure)
        by_seed = tuple(mine[seed] - its[seed] for seed in sorted(mine.keys() & its.keys()))
        if by_seed:
            found.append(Lead(mode=group.config["mode"], by_seed=by_seed))
    return found


def verdicts(found: list[Lead]) -> dict[str, str]:
    """Claims (a), (b) and (c), each answered with yes, no, in some modes, or that it was not tried."""
    unequal = [lead for lead in found if lead.mode > 1]
    equal = [lead for lead in found if lead.mode == 1]
    ahead = [f"mode {lead.mode}" for lead in unequal if lead.is_ahead]
    grows = all(a.mean < b.mean for a, b in pairwise(unequal))
    return {
        "a": "not tried" if not unequal else "yes" if len(ahead) == len(unequal) else
             f"only in {', '.join(ahead)}" if ahead else "no",
        "b": "not tried" if len(unequal) < 2 else "yes" if grows else "no",
        "c": "not tried" if not equal else "yes" if equal[0].is_none else "no",
    }  # fmt: skip


def _compared(members: list[Group], panel: str) -> str:
    rules = unique(group.rule for group in members)
    modes = sorted({group.config["mode"] for group in members})
    by_rule = {(g.rule, g.config["mode"]): g for g in members}
    lines = [[f"mode {mode}", *(_accuracy(by_rule.get((rule, mode))) for rule in rules)] for mode in modes]
    text = f"## {panel}\n\nAccuracy in %, last and best evaluation:\n\n{table(['batches', *rules], lines)}"
    rivals = [rule for rule in rules if rule != PLAIN and leads(members, rule, "last")]
    return "\n\n".join([text, *(_led(members, rule, measure) for rule in rivals for measure in MEASURES)])


def _led(members: list[Group], rule: str, measure: str) -> str:
    found = leads(members, rule, measure)
    lines = [[f"mode {lead.mode}", str(lead)] for lead in found]
    said = "; ".join(f"({claim}) {answer}" for claim, answer in verdicts(found).items())
    title = f"Lead of {rule} over {PLAIN} in points, {measure} evaluation: {said}."
    return f"{title}\n\n{table(['batches', 'lead'], lines)}"


def _accuracy(group: Group | None) -> str:
    if group is None:
        return ""
    return " / ".join(_points(list(accuracies(group, measure).values())) for measure in MEASURES)


def _bytes(found: list[Group]) -> str:
    """(d): bytes of a vote up and of the decision down; one line for all modes that sent the same."""
    same: dict[tuple[str, ...], list[str]] = {}
    for group in found:
        up, down = group.bytes_per_worker("bytes_up"), group.bytes_per_worker("bytes_down")
        plain = group.float32_bytes()
        if up and down:
            sizes = (f"{up:,.0f}", f"{down:,.0f}", f"{plain:,}", f"{plain / up:.2f}", f"{plain / down:.2f}")
            same.setdefault((group.name(recipe=True), *sizes), []).append(group.batches)
    heads = ["rule", "batches", "bytes up", "bytes down", "4 N", "times fewer up", "down"]
    lines = [[name, ", ".join(modes), *sizes] for (name, *sizes), modes in same.items()]
    return f"## Bytes\n\n{table(heads, lines)}"


def _points(values: Sequence[float], sign: str = "") -> str:
    """Mean and spread in percent or points."""
    spread = spread_of(values)
    return f"{100 * fmean(values):{sign}.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def table(heads: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """In Markdown; the first column is words, the others numbers."""
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main() -> None:
    """Print the report of a results file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m paper.claims RESULTS.json")
    sys.stdout.write(report(read(sys.argv[1])))


if __name__ == "__main__":
    main()
