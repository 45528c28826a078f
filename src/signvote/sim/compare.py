"""A grid of runs, on all cores: each in a process and a folder of its own, so it can stop and go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from signvote.errors import ConfigError
from signvote.sim.config import Config
from signvote.sim.run import FORMAT, Run, interruptible, train
from signvote.tasks import load_task

Watch = Callable[[int, int, float], None]  # number of the run, rounds done, accuracy
SECONDS_BETWEEN_NEWS = 0.2


def compare(
    configs: list[Config],
    out: Path,
    *,
    command: str = "",
    data_dir: Path | None = None,
    jobs: int | None = None,
    watch: Watch = lambda number, round, accuracy: None,
) -> dict[str, Any]:
    """Run all that is not done yet and return the results of all; Ctrl-C keeps what there is.

    Args:
        configs: the runs; each gets the folder `out/runs/NAME`.
        out: where everything goes.
        command: what the user typed, for the record.
        data_dir: where data files are.
        jobs: processes at a time; None: one per core.
        watch: told of progress.

    """
    folders = [out / "runs" / name_of(config) for config in configs]
    finished = [done(config, folder) for config, folder in zip(configs, folders, strict=True)]
    todo = [i for i, result in enumerate(finished) if result is None]
    for i, result in enumerate(finished):
        if result is not None:
            watch(i, result["rounds_done"], result["evaluations"]["accuracy"][-1])
    if todo:
        with _pool(min(jobs or os.cpu_count() or 1, len(todo))) as (pool, news, stop):
            futures = {i: pool.submit(_one, i, configs[i], folders[i], data_dir, news, stop) for i in todo}
            with interruptible() as stopped:
                _follow(list(futures.values()), news, watch, stopped)
                if stopped.is_set():
                    stop.set()
            for i, future in futures.items():
                finished[i] = future.result()
    return {"format": FORMAT, "command": command, "runs": [r for r in finished if r is not None]}


def name_of(config: Config) -> str:
    """A folder's name that tells the runs of one grid apart."""
    batches = f"mode{config.mode}" if config.mode else "batches"
    return f"{config.task}-{config.rule}-{config.recipe}-{batches}-seed{config.seed}"


def done(config: Config, folder: Path) -> dict[str, Any] | None:
    """The finished result in a folder; None if there is none; an error if it is of another run."""
    path = folder / "result.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    mine, its = config.as_dict(), result["config"]
    for name in mine:
        if mine[name] != its.get(name):
            raise ConfigError(
                f"{folder} holds another run: {name} is {its.get(name)!r} there and {mine[name]!r} here;"
                " choose another --out, or remove that folder"
            )
    return result if result["status"] == "done" else None


def _one(
    number: int, config: Config, folder: Path, data_dir: Path | None, news: Any, stop: Any
) -> dict[str, Any] | None:
    """One run, in a process of its own; None if it was stopped before it began."""
    if stop.is_set():
        return None
    last = 0.0

    def watch(run: Run) -> bool:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_NEWS or run.round == config.rounds:
            last = time.monotonic()
            news.put((number, run.round, run.history["evaluations"]["accuracy"][-1]))
        return bool(stop.is_set())

    return train(config, load_task(config.task, data_dir, config.model), folder, resume=True, watch=watch)


def _follow(futures: list[Future[Any]], news: Any, watch: Watch, stopped: Event) -> None:
    """Pass news on until all runs have ended, or Ctrl-C; a run that failed ends it at once."""
    while not stopped.is_set():
        ended = all(future.done() for future in futures)
        try:
            while True:
                watch(*news.get(timeout=0.0 if ended else 0.1))
        except queue.Empty:
            pass
        for future in futures:
            if future.done():
                future.result()
        if ended:
            return


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Any, Any]]:
    """Fresh processes with a queue for news and an event to stop; they leave Ctrl-C to us."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        news, stop = manager.Queue(), manager.Event()
        pool = ProcessPoolExecutor(processes, context, initializer=_be_deaf)
        try:
            yield pool, news, stop
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _be_deaf() -> None:
    """Leave Ctrl-C to the parent, which tells the runs to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
