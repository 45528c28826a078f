"""Seconds of a simulated round by phase, beside the textbook and beside one ordinary training pass.

    python -m benchmarks.rounds                      # MNIST CNN, the paper's recipe, modes 1 to 4
    python -m benchmarks.rounds --task mnist --rounds 20

One thread. All numbers come from one run; the ratios are what counts. Writes benchmarks/rounds.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.textbook import Textbook
from signvote.sim import Config, Run
from signvote.tasks import Task, load_task


def ours(config: Config, task: Task, rounds: int) -> dict[str, float]:
    """Mean seconds of a round by phase, after two to warm up."""
    run = Run(config, task)
    for _ in range(2):
        run.step()
    before = dict(run.seconds)
    for _ in range(rounds):
        run.step()
    return {k: (v - before[k]) / rounds for k, v in run.seconds.items() if k != "evaluate"}


def textbook(config: Config, task: Task, rounds: int) -> dict[str, float]:
    """The same for the textbook, past its warm-up."""
    book = Textbook(config, task, warmup=0)
    book.round()
    before = dict(book.seconds)
    for _ in range(rounds):
        book.round()
    return {k: (v - before[k]) / rounds for k, v in book.seconds.items()}


def ordinary(task: Task, samples: int, rounds: int) -> float:
    """Seconds of one forward and backward pass over as many samples, the fastest."""
    model = task.model()
    inputs, labels = task.prepare(task.train.inputs[:samples]), task.train.labels[:samples]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model.zero_grad()
        task.loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return min(times)


def measure(task: Task, rounds: int) -> list[dict[str, Any]]:
    """A row for each rule and mode."""
    rows = []
    cases = [(mode, rule) for mode in (1, 2, 3, 4) for rule in ("it-signsgd", "pooled")]
    for mode, rule in track(cases, description="measuring", transient=True):
        recipe = "paper" if rule == "it-signsgd" else "tuned"
        options = {"warmup": 0} if rule == "it-signsgd" else {}
        config = Config(task=task.name, rule=rule, recipe=recipe, mode=mode, rounds=1000, options=options)
        row: dict[str, Any] = {"mode": mode, "rule": rule, "ours": ours(config, task, rounds)}
        row["ordinary pass"] = ordinary(task, sum(config.batch_sizes), rounds)
        if rule == "it-signsgd":
            row["textbook"] = textbook(config, task, max(1, rounds // 3))
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
    headings = ("mode", "rule", "gradients", "encode", "server", "apply", "round", "/ ordinary pass")
    for heading in (*headings, "textbook round", "textbook server"):
        table.add_column(heading, justify="right")
    for row in rows:
        phases = [row["ours"][k] for k in ("gradients", "encode", "server", "apply")]
        book = row.get("textbook")
        slow = (f"{sum(book.values()):.3f}", f"{book['server']:.4f}") if book else ("", "")
        times = (f"{v:.4f}" for v in (*phases, sum(phases)))
        table.add_row(
            str(row["mode"]), row["rule"], *times, f"{sum(phases) / row['ordinary pass']:.2f}", *slow
        )
    Console().print(table)
    options.out.write_text(json.dumps({"rows": rows, "peak_bytes_textbook_included": peak}, indent=1))


if __name__ == "__main__":
    main()
