"""The part of the page about the weights of the workers: which votes count, how much, and why.

Rules may scale all weights of a round by one factor, which changes no vote. So the page shows a worker's share:
its weight divided by the sum of all weights of the round. It is negative if the server inverts its votes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from signvote.metrics import percent
from signvote.report.experiments import Experiment
from signvote.report.labels import attackers_of, unique
from signvote.report.measures import number
from signvote.results import Result

ALIKE = 1.5  # a ratio of weights too small to mention
MOST_ROWS = 24  # workers shown; of more, those with the largest and the smallest shares
MOST_COLUMNS = 60  # rounds shown; of more, every second, third ...
WHY = {
    "weighted": "the weight is the root of the declared batch size, less for a worker that is overruled too often."
    " Without declared sizes, p is the fraction of a worker's votes that differ from the decision.",
    "pooled": "p is the fraction of a worker's votes that differ from the decision.",
    "it-signsgd": "p is estimated for each coordinate separately. The page shows the mean over the coordinates.",
    "agreement": "p is estimated from how often workers agree with each other, not with the decision.",
    "robust": "workers that push together share their votes, and workers that contradict the others have none.",
    "known-batch": "the weight is proportional to the square root of the declared batch size. Nothing is learned.",
    "mean": "the weight is the declared batch size. Overruled counts corrections, not gradients.",
}


@dataclass(frozen=True, kw_only=True)
class WorkerTrust:
    """The weight that a run gave to one worker."""

    id: int
    batch_size: int
    shares: list[float]  # of the weight, by round, -1 to 1
    overruled: float | None = (
        None  # fraction of its votes that one round's decision overruled; no estimate of p
    )
    overruled_in: int | None = None  # that round: the last evaluated one in which it voted
    attacks: bool = False  # at least in some rounds
    missed: frozenset[int] = frozenset()  # indexes of the evaluated rounds in which it did not vote

    @property
    def share(self) -> float:
        """The share of the last round."""
        return self.shares[-1]

    @property
    def largest(self) -> float:
        """The largest magnitude of its shares."""
        return max(map(abs, self.shares))

    @property
    def name(self) -> str:
        """The worker's name in a sentence."""
        return f"worker {self.id} (batch {self.batch_size})"


def workers_of(run: Result) -> list[WorkerTrust]:
    """The workers by batch size, smallest first; empty if all have the same weight in every round."""
    trust = run.get("trust", {})
    by_round = [_shares(weights) for weights in trust.get("weight", ())]
    differences = [max(shares) - min(shares) for shares in by_round]
    if all(difference < 1e-9 for difference in differences):
        return []
    sizes = run["config"]["batch_sizes"]
    attackers = attackers_of(run["config"])
    overruled_by_round = trust.get("overruled", ())
    workers = []
    for i, id in enumerate(trust["workers"]):
        overruled, round = _last_overruled(trust, i)
        worker = WorkerTrust(
            id=int(id),
            batch_size=int(sizes[id]),
            shares=[shares[i] for shares in by_round],
            overruled=overruled,
            overruled_in=round,
            attacks=int(id) in attackers,
            missed=frozenset(t for t, row in enumerate(overruled_by_round) if row[i] is None),
        )
        workers.append(worker)
    return sorted(workers, key=lambda worker: (worker.batch_size, worker.id))


def sentence(workers: list[WorkerTrust]) -> str:
    """The largest weights at the end, in words.

    >>> a = WorkerTrust(id=0, batch_size=4, shares=[0.1])
    >>> b = WorkerTrust(id=1, batch_size=904, shares=[0.9], overruled=0.18, overruled_in=50)
    >>> sentence([a, b])
    'Largest weight: worker 1 (batch 904), overruled in 18.0 % of its votes in round 50, with 90.0 % of all weight. ...'
    """
    top = max(workers, key=lambda worker: worker.share)
    if not any(worker.share for worker in workers):
        return "Every weight is 0: no vote counts."
    voting = [worker.share for worker in workers if worker.share]
    if min(voting) > 0 and top.share < ALIKE * min(voting) and len(voting) > 1:
        silent = [worker.id for worker in workers if not worker.share]
        low = percent(min(voting))
        high = percent(top.share)
        return _similar(silent, f"{low} to {high}" if high != low else high)
    return _largest_weight(top, workers) + _inverted(workers)


def section(experiments: list[Experiment]) -> str:
    """HTML: a strip per worker, for the first seed of each experiment whose workers have different weights."""
    shown = []
    equal = []
    for experiment in experiments:
        workers = workers_of(experiment.runs[0])
        if workers:
            shown.append((experiment, workers))
        else:
            equal.append(experiment)
    largest = max((worker.largest for _, workers in shown for worker in workers), default=1.0)
    blocks = [_block(experiment, workers, largest) for experiment, workers in shown]
    note = _equal_weights(equal, {experiment.rule for experiment, _ in shown})
    reasons = _reasons(experiments)
    strips = "".join(blocks)
    return f'{reasons}<div class="strips">{strips}</div>{note}'


def _equal_weights(equal: list[Experiment], unequal_rules: set[str]) -> str:
    """A sentence about the experiments without strips; a rule that has strips elsewhere is named with its batches."""
    names = [each.label if each.rule in unequal_rules else each.rule for each in equal]
    if not names:
        return ""
    return f"<p>All workers have the same weight in: {escape('; '.join(unique(names)))}.</p>"


def _shares(weights: Sequence[float | None]) -> list[float]:
    """Each weight divided by the sum of their magnitudes. A weight that is not a number counts as 0."""
    numbers = [number(weight) for weight in weights]
    known = [weight if math.isfinite(weight) else 0.0 for weight in numbers]
    total = sum(map(abs, known)) or 1.0
    return [weight / total for weight in known]


def _last_overruled(trust: dict[str, Any], i: int) -> tuple[float | None, int | None]:
    """The last known one of a worker, and its round: there is none for a round that it missed."""
    for row, round in zip(reversed(trust.get("overruled", ())), reversed(trust["round"]), strict=False):
        if row[i] is not None:
            return number(row[i]), int(round)
    return None, None


def _reasons(experiments: list[Experiment]) -> str:
    text = ""
    for rule in unique(experiment.rule for experiment in experiments):
        if rule in WHY:
            text += f"<li><b>{rule}</b>: {WHY[rule]}</li>"
    return f"<ul>{text}</ul>"


def _similar(silent: list[int], each: str) -> str:
    """A sentence about workers of which some have no weight and all others about the same."""
    if not silent:
        return f"All weights are similar: each worker has {each} of all weight."
    ids = ", ".join(map(str, sorted(silent)))
    some = f"Worker {ids} has" if len(silent) == 1 else f"Workers {ids} have"
    return f"{some} weight 0. Each of the others has {each} of all weight."


def _largest_weight(top: WorkerTrust, workers: list[WorkerTrust]) -> str:
    others = [worker.share for worker in workers if worker is not top]
    overruled = ""
    if top.overruled is not None:
        overruled = f", overruled in {percent(top.overruled)} of its votes in round {top.overruled_in},"
    majority = ""
    if top.share > 0.5 and len(others) > 1:
        majority = ", more than all others together"
    share = percent(top.share)
    middle = percent(median(others))
    return (
        f"Largest weight: {top.name}{overruled} with {share} of all weight{majority}."
        f" The median of the others is {middle}."
    )


def _inverted(workers: list[WorkerTrust]) -> str:
    """A sentence about the workers whose votes the server inverts; empty if there are none."""
    ids = sorted(worker.id for worker in workers if worker.share < 0)
    if not ids:
        return ""
    names = ", ".join(map(str, ids))
    if len(ids) == 1:
        who = f"worker {names} is"
        whose = "its"
    else:
        who = f"workers {names} are"
        whose = "their"
    return (
        f" The server estimates that {who} wrong more often than right (p > 1/2), and inverts {whose} votes."
    )


def _block(experiment: Experiment, workers: list[WorkerTrust], largest: float) -> str:
    run = experiment.runs[0]
    seed = run["config"]["seed"]
    label = escape(experiment.label + experiment.mark)
    small = escape(f"{experiment.panel}, seed {seed}")
    words = escape(sentence(workers))
    rounds = [int(t) for t in run["trust"]["round"]]
    columns = _columns(len(rounds))
    body = ""
    for worker in _shown(workers):
        body += _strip(worker, rounds, columns, largest)
    body += _hidden(workers)
    first = rounds[columns[0]]
    return (
        f"<article><h3>{label} <small>{small}</small></h3><p>{words}</p>"
        '<div class="strip head"><span>worker</span>'
        f'<span class="rounds"><span>round {first}</span><span>{rounds[-1]}</span></span>'
        f"<span>weight</span><span>overruled<br>in {rounds[-1]}</span></div>{body}"
        '<output class="told"></output></article>'
    )


def _columns(rounds: int) -> range:
    """The indexes of the rounds to show: evenly spaced, with the last one."""
    every = math.ceil(rounds / MOST_COLUMNS)
    last = rounds - 1
    first = last % every
    return range(first, rounds, every)


def _shown(workers: list[WorkerTrust]) -> list[WorkerTrust]:
    """All; of many, those with the smallest and the largest shares."""
    if len(workers) <= MOST_ROWS:
        return workers
    ranked = sorted(workers, key=lambda worker: worker.share)
    half = MOST_ROWS // 2
    extremes = ranked[:half] + ranked[-half:]
    kept = {worker.id for worker in extremes}
    return [worker for worker in workers if worker.id in kept]


def _hidden(workers: list[WorkerTrust]) -> str:
    hidden = len(workers) - MOST_ROWS
    if hidden <= 0:
        return ""
    return f"<p>{hidden} workers with weights between these are not shown.</p>"


def _strip(worker: WorkerTrust, rounds: list[int], columns: range, largest: float) -> str:
    cells = ""
    for x, i in enumerate(columns):
        share = worker.shares[i]
        title = f"{worker.name}, round {rounds[i]}: {percent(share)} of all weight"
        cells += _cell(x, share / largest, title, missed=i in worker.missed)
    name = escape(worker.name)
    weight = percent(worker.share)
    return (
        f'<div class="strip"><span>{worker.id} <small>batch {worker.batch_size}</small>{_marks(worker)}</span>'
        f'<svg viewBox="0 0 {len(columns)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="weight of {name} over time">{cells}</svg>'
        f"<span>{weight}</span><span>{_overruled(worker, rounds[-1])}</span></div>"
    )


def _marks(worker: WorkerTrust) -> str:
    """What is special about a worker, after its name."""
    return ' <em class="attacks">attacks</em>' if worker.attacks else ""


def _overruled(worker: WorkerTrust, last: int) -> str:
    """The share of its votes that were overruled. It names the round if that is not the last evaluated one."""
    if worker.overruled is None:
        return "never voted"
    other = "" if worker.overruled_in == last else f"<br><small>in {worker.overruled_in}</small>"
    return percent(worker.overruled) + other


def _cell(x: int, strength: float, title: str, *, missed: bool) -> str:
    """A rectangle of the strip; `strength` is -1 to 1. A line through it shows a round without a vote."""
    kind = "inverted" if strength < 0 else "trusted"
    opacity = f"{abs(strength):.3f}"
    line = f'<rect x="{x}" y="0.42" width="1" height="0.16" class="missed"/>' if missed else ""
    if missed:
        title += ", did not vote"
    return (
        f'<rect x="{x}" width="1" height="1" class="{kind}" fill-opacity="{opacity}">'
        f"<title>{escape(title)}</title></rect>{line}"
    )
