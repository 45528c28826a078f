"""Seconds of a simulated round by phase, beside the textbook and beside one ordinary training pass.

    python -m benchmarks.rounds                      # MNIST CNN, the paper's recipe, modes 1 to 4
    python -m benchmarks.rounds --task mnist --rounds 20

One thread, the fastest of some rounds. `pass` is one ordinary forward and backward pass over the samples
of a round, `book` the textbook. All numbers come from one run; the ratios are what counts.
Writes benchmarks/rounds.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.textbook import Textbook

from signvote.sim import Config, Run
from signvote.tasks import Task, load_task


def fastest(step: Callable[[], object], seconds: dict[str, float], rounds: int) -> dict[str, float]:
    """Seconds by phase of the fastest of some rounds, after one to warm up."""
    step()
    best: dict[str, float] = {}
    for _ in range(rounds):
        before = dict(seconds)
        step()
        took = {k: v - before[k] for k, v in seconds.items() if k not in ("evaluate", "total")}
        if not best or sum(took.values()) < sum(best.values()):
            best = took
    return best


def ordinary(task: Task, samples: int, rounds: int) -> float:
    """Seconds of one forward and backward pass over as many samples, the fastest."""
    model = task.model()
    batch = task.batch(task.train, torch.arange(samples))
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return min(times)


def measure(task: Task, rounds: int) -> list[dict[str, Any]]:
    """A row for each rule and mode."""
    rows = []
    cases = [(mode, rule) for mode in (1, 2, 3, 4) for rule in ("it-signsgd", "weighted")]
    for mode, rule in track(cases, description="measuring", transient=True):
        recipe = "paper" if rule == "it-signsgd" else "tuned"
        options = {"warmup": 0} if rule == "it-signsgd" else {}
        config = Config(task=task.name, rule=rule, recipe=recipe, mode=mode, rounds=1000, options=options)
        run = Run(config, task)
        row: dict[str, Any] = {"mode": mode, "rule": rule, "ours": fastest(run.step, run.seconds, rounds)}
        row["ordinary pass"] = ordinary(task, sum(config.batch_sizes), rounds)
        if rule == "it-signsgd":
            book = Textbook(config, task, warmup=0)
            row["textbook"] = fastest(book.round, book.seconds, rounds)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mnist-10k")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(load_task(options.task, options.data_dir), options.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    table = Table(title=f"Seconds per round, {options.task}, one thread")
    headings = ("mode", "rule", "gradients", "encode", "server", "apply", "round", "/ pass")
    for heading in (*headings, "book", "book server"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        phases = [row["ours"][k] for k in ("gradients", "encode", "server", "apply")]
        book = row.get("textbook")
        slow = (f"{sum(book.values()):.3f}", f"{book['server']:.3f}") if book else ("", "")
        times = (f"{v:.3f}" for v in (*phases, sum(phases)))
        table.add_row(
            str(row["mode"]), row["rule"], *times, f"{sum(phases) / row['ordinary pass']:.2f}", *slow
        )
    Console(width=110).print(table)
    options.out.write_text(json.dumps({"rows": rows, "peak_bytes_textbook_included": peak}, indent=1))


if __name__ == "__main__":
    main()
