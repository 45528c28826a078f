"""Who is believed, and why: the part of the page about the weights of the workers.

Rules may scale all weights of a round by one factor, which changes no vote. So what is shown is a
worker's say: its weight as a share of all weights of the round, negative where it is read as the opposite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from signvote.report.groups import Group, Run, number, unique

ALIKE = 1.5  # a ratio of weights not worth telling
MOST_ROWS = 24  # workers shown; of more, the most and the least believed
MOST_COLUMNS = 60  # rounds shown; of more, every second, third ...
WHY = {
    "pooled": "p is the share of all votes of a worker that the decision overruled.",
    "it-signsgd": "p is counted for every coordinate on its own; shown is the mean over the coordinates.",
    "agreement": "p comes from how workers agree with each other; the decision is not looked at.",
    "robust": "p as in pooled, but only workers that agree with the others may be believed.",
    "known-batch": "the weight follows the square root of the declared batch size; nothing is learnt.",
}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a run tells about one worker."""

    id: int
    batch_size: int
    says: list[float]  # by round, -1 to 1
    overruled: float | None = None  # share of its votes that differed from the decision, when last seen

    @property
    def say(self) -> float:
        """The last one."""
        return self.says[-1]

    @property
    def name(self) -> str:
        """As people call it."""
        return f"worker {self.id} (batch {self.batch_size})"


def workers_of(run: Run) -> list[Worker]:
    """The workers by batch size, the smallest first; none where all count the same in every round."""
    trust = run.get("trust", {})
    says = [_says(weights) for weights in trust.get("weight", ())]
    if all(max(row) - min(row) < 1e-9 for row in says):
        return []
    sizes = run["config"]["batch_sizes"]
    found = [
        Worker(
            id=int(id), batch_size=int(sizes[id]), says=[row[i] for row in says], overruled=_last(trust, i)
        )
        for i, id in enumerate(trust["workers"])
    ]
    return sorted(found, key=lambda worker: (worker.batch_size, worker.id))


def sentence(workers: list[Worker]) -> str:
    """Who is believed at the end, in words.

    >>> a = Worker(id=0, batch_size=4, says=[0.1])
    >>> b = Worker(id=1, batch_size=904, says=[0.9], overruled=0.18)
    >>> sentence([a, b])
    'Most believed: worker 1 (batch 904), overruled in 18.0 % of its votes; its say is 90.0 % of all. ...'
    """
    top = max(workers, key=lambda worker: worker.say)
    lowest = min(worker.say for worker in workers)
    if top.say == lowest == 0:
        return "No worker is believed: every weight is 0."
    if lowest > 0 and top.say < ALIKE * lowest:
        return f"All are believed about alike: each has {_percent(lowest)} to {_percent(top.say)} of all say."
    return " ".join((_most_believed(top, workers), *_opposed(workers)))


def section(found: list[Group]) -> str:
    """HTML: for each group that tells workers apart a strip per worker, of its first seed."""
    by_group = [(group, workers_of(group.runs[0])) for group in found]
    blocks = [_block(group, workers) for group, workers in by_group if workers]
    same = unique(group.rule for group, workers in by_group if not workers)
    note = f"<p>Nothing is learnt about the workers in: {escape(', '.join(same))}.</p>" if same else ""
    return f'{_reasons(found)}<div class="strips">{"".join(blocks)}</div>{note}'


def _says(weights: list[float | None]) -> list[float]:
    """Each weight over the sum of their sizes; what is no number counts nothing."""
    known = [w if math.isfinite(w) else 0.0 for w in map(number, weights)]
    total = sum(map(abs, known)) or 1.0
    return [w / total for w in known]


def _last(trust: dict[str, Any], i: int) -> float | None:
    """The last share known: a worker that missed a round has none there."""
    known = [number(row[i]) for row in trust.get("overruled", ()) if row[i] is not None]
    return known[-1] if known else None


def _reasons(found: list[Group]) -> str:
    rules = unique(group.rule for group in found)
    items = (f"<li><b>{rule}</b>: {WHY[rule]}</li>" for rule in rules if rule in WHY)
    return f"<ul>{''.join(items)}</ul>"


def _most_believed(top: Worker, workers: list[Worker]) -> str:
    others = [worker.say for worker in workers if worker is not top]
    overruled = "" if top.overruled is None else f", overruled in {_percent(top.overruled)} of its votes"
    alone = ", more than all others together" if top.say > 0.5 and len(others) > 1 else ""
    return (
        f"Most believed: {top.name}{overruled}; its say is {_percent(top.say)} of all{alone}."
        f" The median of the others: {_percent(median(others))}."
    )


def _opposed(workers: list[Worker]) -> list[str]:
    ids = [str(i) for i in sorted(worker.id for worker in workers if worker.say < 0)]
    if not ids:
        return []
    subject = f"Worker {ids[0]} is" if len(ids) == 1 else f"Workers {', '.join(ids)} are"
    return [f"{subject} taken to be wrong more often than right (p > 1/2): the server reads the opposite."]


def _block(group: Group, workers: list[Worker]) -> str:
    config, rounds = group.runs[0]["config"], [int(r) for r in group.runs[0]["trust"]["round"]]
    columns = range(len(rounds) - 1, -1, -math.ceil(len(rounds) / MOST_COLUMNS))[::-1]  # with the last round
    largest = max(abs(say) for worker in workers for say in worker.says)
    rows = "".join(_strip(worker, rounds, columns, largest) for worker in _shown(workers))
    between = len(workers) - MOST_ROWS
    note = f"<p>{between} workers between these are not shown.</p>" if between > 0 else ""
    return (
        f"<article><h3>{escape(group.label)} <small>{escape(group.panel)}, "
        f"seed {escape(str(config['seed']))}</small></h3><p>{escape(sentence(workers))}</p>"
        '<div class="strip head"><span>worker</span>'
        f'<span class="rounds"><span>round {rounds[columns[0]]}</span><span>{rounds[-1]}</span></span>'
        f"<span>say</span><span>overruled</span></div>{rows}{note}</article>"
    )


def _shown(workers: list[Worker]) -> list[Worker]:
    """All, or of many the least and the most believed."""
    ranked, half = sorted(workers, key=lambda worker: worker.say), MOST_ROWS // 2
    kept = {worker.id for worker in ranked[:half] + ranked[-half:]}
    return workers if len(workers) <= MOST_ROWS else [worker for worker in workers if worker.id in kept]


def _strip(worker: Worker, rounds: list[int], columns: range, largest: float) -> str:
    cells = "".join(
        f'<rect x="{x}" width="1" height="1" class="{"opposed" if worker.says[i] < 0 else "believed"}"'
        f' fill-opacity="{abs(worker.says[i]) / largest:.3f}"><title>'
        f"{escape(worker.name)}, round {rounds[i]}: {_percent(worker.says[i])} of all say</title></rect>"
        for x, i in enumerate(columns)
    )
    overruled = "" if worker.overruled is None else _percent(worker.overruled)
    return (
        f'<div class="strip"><span>{worker.id} <small>batch {worker.batch_size}</small></span>'
        f'<svg viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="say of {escape(worker.name)} over time">{cells}</svg>'
        f"<span>{_percent(worker.say)}</span><span>{overruled}</span></div>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
