"""The table at the end, as Markdown. It has no date: the commit, the seed, the minutes and the cores tell what ran."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from soak.driver import Outcome

ROOT = Path(__file__).parent.parent
HEAD = """# The last soak

`python -m soak --minutes {minutes:g} --seed {seed}` wrote this file: commit {commit}, {cores} cores.
[README.md](README.md) explains the scenarios. A fault is survived if the result is bit for bit that of an
undisturbed run, or if the documented error came and the run resumed to that result. Rounds lost were computed twice.
Memory is the slope of the resident memory of the process that grew fastest, after its first third.

| engine | fault | scenario | injected | survived | rounds lost | rounds | KiB per 1,000 rounds |
|---|---|---|---:|---:|---:|---:|---:|
"""


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", ".", ":!soak/RESULT.md"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    name = found.stdout.strip() or "unknown"
    return f"{name} with changes" if changed.stdout.strip() else name


def markdown(outcomes: Sequence[Outcome], *, seed: int, minutes: float) -> str:
    """The whole page."""
    head = HEAD.format(minutes=minutes, seed=seed, commit=commit(), cores=os.cpu_count())
    rows = "\n".join(map(_row, outcomes))
    injected = sum(outcome.injected for outcome in outcomes)
    survived = sum(outcome.survived for outcome in outcomes)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    text = f"{head}{rows}\n\n{survived:,} of {injected:,} faults survived.\n"
    if failures:
        text += "\nTo repeat what failed:\n\n```\n" + "\n".join(failures) + "\n```\n"
    return text


def _row(outcome: Outcome) -> str:
    scenario = outcome.scenario
    cells = [scenario.engine, scenario.fault, f"`{scenario.name}`"]
    if outcome.skipped:
        cells += [f"skipped: {outcome.skipped}", "", "", "", ""]
    else:
        slope = "" if outcome.slope is None else f"{outcome.slope:+.0f}"
        lost = "" if outcome.lost is None else f"{outcome.lost:,}"
        rounds = f"{outcome.rounds:,}" if outcome.rounds else ""
        cells += [f"{outcome.injected:,}", f"{outcome.survived:,}", lost, rounds, slope]
    return f"| {' | '.join(cells)} |"
