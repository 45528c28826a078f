"""What the runs of a study show about the paper's claims: `python -m paper.claims paper/fig1-mnist/results.json.gz`.

(a) weighted voting beats plain voting if batch sizes differ      yes: ahead in every seed of modes 2 to 4
(b) the more they differ, the larger the lead                     yes: the mean lead grows from mode 2 to 4
(c) both are equal if batch sizes are equal                       yes: in mode 1 within 0.2 points, or the spread
(d) 32 times fewer bits than float32                              from the bytes of the messages

A lead is paired: it is the difference of two runs of the same seed, which use the same batches. The tables show
both the last and the best accuracy of a run, because with a constant step the last one is partly luck.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean

from signvote.metrics import ACCURACY
from signvote.report.experiments import Experiment, experiments_of
from signvote.report.labels import unique
from signvote.report.measures import finite, mean_text, spread_of
from signvote.results import Results, read
from signvote.settings import conditions

PLAIN = "majority"
EQUAL = 0.002  # accuracies this close are called equal
MEASURES = ("last", "best")
BYTES_HEADS = ("rule", "batches", "bytes up", "bytes down", "4 N", "times fewer up", "down")


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The lead of a rule over plain voting, in each seed that both have."""

    mode: int
    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.by_seed)

    @property
    def is_ahead(self) -> bool:
        """Whether the rule is ahead in every seed."""
        return min(self.by_seed) > 0

    @property
    def is_none(self) -> bool:
        """Whether the two are equal, as far as the seeds can show."""
        spread = spread_of(self.by_seed) or 0.0
        return abs(self.mean) <= max(EQUAL, spread)

    def __str__(self) -> str:
        ahead = sum(lead > 0 for lead in self.by_seed)
        return f"{_points(self.by_seed, '+')}, ahead in {ahead} of {len(self.by_seed)}"


def report(results: Results) -> str:
    """Accuracies, leads and bytes as Markdown tables, with the verdict on each claim."""
    experiments = [found for found in experiments_of(results) if _is_used(found)]
    parts = []
    for panel in unique(experiment.panel for experiment in experiments):
        members = [experiment for experiment in experiments if experiment.panel == panel]
        parts.append(_comparison(members, panel))
    parts.append(_bytes(experiments))
    return "\n\n".join(parts) + "\n"


def accuracies(experiment: Experiment, measure: str) -> dict[int, float]:
    """The last or the best accuracy of each seed."""
    by_seed = {}
    for run in experiment.runs:
        seed = int(run["config"]["seed"])
        values = finite(run, ACCURACY.name)
        by_seed[seed] = values[-1] if measure == "last" else max(values)
    return by_seed


def leads(members: list[Experiment], rule: str, measure: str) -> list[Lead]:
    """The leads of a rule over plain voting, by mode: under the same conditions, for the seeds that both have."""
    plain = [member for member in members if member.rule == PLAIN]
    ruled = [member for member in members if member.rule == rule]
    ruled.sort(key=_mode)
    found = []
    for experiment, other in product(ruled, plain):
        if conditions(experiment.settings) != conditions(other.settings):
            continue
        mine = accuracies(experiment, measure)
        its = accuracies(other, measure)
        shared_seeds = sorted(mine.keys() & its.keys())
        by_seed = tuple(mine[seed] - its[seed] for seed in shared_seeds)
        if by_seed:
            found.append(Lead(mode=_mode(experiment), by_seed=by_seed))
    return found


def verdicts(found: list[Lead]) -> dict[str, str]:
    """Claims (a), (b) and (c), each answered with yes, no, in some modes, or not tried."""
    unequal = [lead for lead in found if lead.mode > 1]
    equal = [lead for lead in found if lead.mode == 1]
    grows = all(a.mean < b.mean for a, b in pairwise(unequal))
    return {
        "a": _where_ahead(unequal),
        "b": _yes(grows) if len(unequal) > 1 else "not tried",
        "c": _yes(equal[0].is_none) if equal else "not tried",
    }


def table(heads: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown. The first column holds words, the others numbers."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [heads, rule, *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _is_used(experiment: Experiment) -> bool:
    """Whether it follows a batch mode and is finished."""
    return bool(experiment.settings.get("mode")) and experiment.is_done


def _mode(experiment: Experiment) -> int:
    return int(experiment.settings["mode"])


def _where_ahead(unequal: list[Lead]) -> str:
    """The answer to claim (a)."""
    if not unequal:
        return "not tried"
    ahead = [f"mode {lead.mode}" for lead in unequal if lead.is_ahead]
    if len(ahead) == len(unequal):
        return "yes"
    if not ahead:
        return "no"
    return f"only in {', '.join(ahead)}"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _comparison(members: list[Experiment], panel: str) -> str:
    """The accuracies of a panel, then the leads of each rule."""
    rules = unique(member.rule for member in members)
    by_rule = {(member.rule, _mode(member)): member for member in members}
    lines = []
    for mode in sorted({_mode(member) for member in members}):
        cells = [_accuracy(by_rule.get((rule, mode))) for rule in rules]
        lines.append([f"mode {mode}", *cells])
    heads = ["batches", *rules]
    parts = [f"## {panel}", "Accuracy in %, last and best evaluation:", table(heads, lines)]
    for rule in rules:
        if rule != PLAIN and leads(members, rule, "last"):
            parts += [_leads_of(members, rule, measure) for measure in MEASURES]
    return "\n\n".join(parts)


def _leads_of(members: list[Experiment], rule: str, measure: str) -> str:
    found = leads(members, rule, measure)
    lines = [[f"mode {lead.mode}", lead] for lead in found]
    answers = [f"({claim}) {answer}" for claim, answer in verdicts(found).items()]
    title = f"Lead of {rule} over {PLAIN} in points, {measure} evaluation: {'; '.join(answers)}."
    return f"{title}\n\n{table(['batches', 'lead'], lines)}"


def _accuracy(experiment: Experiment | None) -> str:
    if experiment is None:
        return ""
    texts = []
    for measure in MEASURES:
        by_seed = accuracies(experiment, measure)
        texts.append(_points(list(by_seed.values())))
    return " / ".join(texts)


def _bytes(experiments: list[Experiment]) -> str:
    """Claim (d): bytes of a vote up and of the decision down. Modes that sent the same share a line."""
    batches_by_line: dict[tuple[str, ...], list[str]] = {}
    for experiment in experiments:
        sizes = _sizes(experiment)
        if sizes:
            key = (experiment.name(recipe=True), *sizes)
            batches_by_line.setdefault(key, []).append(experiment.batches)
    lines = []
    for (name, *sizes), batches in batches_by_line.items():
        lines.append([name, ", ".join(batches), *sizes])
    return f"## Bytes\n\n{table(BYTES_HEADS, lines)}"


def _sizes(experiment: Experiment) -> list[str]:
    """The cells of a line about bytes; none if no round was run."""
    up = experiment.bytes_per_worker("bytes_up")
    down = experiment.bytes_per_worker("bytes_down")
    plain = experiment.float32_bytes()
    if not up or not down:
        return []
    return [
        f"{up:,.0f}",
        f"{down:,.0f}",
        f"{plain:,}",
        f"{plain / up:.2f}",
        f"{plain / down:.2f}",
    ]


def _points(values: Sequence[float], sign: str = "") -> str:
    """Mean and spread in percent or points."""
    return mean_text(ACCURACY, fmean(values), spread_of(values), sign)


def main() -> None:
    """Print the report of a results file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m paper.claims RESULTS.json")
    results = read(sys.argv[1])
    sys.stdout.write(report(results))


if __name__ == "__main__":
    main()
