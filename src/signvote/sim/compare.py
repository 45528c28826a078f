"""A grid of runs: each in a folder of its own, so it can stop and go on; on the CPU one process per core."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

from signvote.errors import ConfigError, StateError
from signvote.results import Result, Results, identity, identity_of, read, results_file, results_of, write
from signvote.settings import SETTINGS, unusual
from signvote.sim.config import Config
from signvote.sim.loop import interruptible, train
from signvote.sim.machine import Machine
from signvote.sim.run import Run
from signvote.sim.tracking import Tracker
from signvote.tasks import Task, load_task

Watch = Callable[[int, int, float], None]  # number of the run, rounds done, accuracy
SECONDS_BETWEEN_NEWS = 0.2


def compare(
    configs: list[Config],
    out: Path,
    *,
    names: Sequence[str] | None = None,
    command: str = "",
    data_dir: Path | None = None,
    machine: Machine | None = None,
    jobs: int | None = None,
    watch: Watch = lambda number, round, accuracy: None,
    trackers: Sequence[Callable[[Path], Tracker]] = (),
) -> Results:
    """Run all that is not done yet and return the results of all; Ctrl-C keeps what there is.

    A run is done if its folder says so, or `out/results.json`, which is written whenever a run ends.
    Runs that this file holds and nobody asks for now stay in it. If `out` holds `results.json.gz`, that is the file.

    Args:
        configs: the runs; each gets the folder `out/runs/NAME`.
        out: where everything goes.
        names: of the runs; None: `name_of` each.
        command: what the user typed, for the record.
        data_dir: where data files are.
        machine: what to compute on; None: the CPU.
        jobs: processes at a time; None: one per core on the CPU, one on a GPU.
        watch: told of progress.
        trackers: each is called with the folder of a run, in its process, and gives a Tracker, as TensorBoard does.

    """
    machine = machine or Machine()
    folders = [out / "runs" / name for name in names or map(name_of, configs)]
    path = results_file(out)
    earlier = _earlier(path)
    known = {identity_of(run): run for run in earlier["runs"] if run["status"] == "done"}
    finished = [known.get(identity(c)) or done(c, f) for c, f in zip(configs, folders, strict=True)]
    for i, result in enumerate(finished):
        if result is not None:
            watch(i, result["rounds_done"], result["evaluations"]["accuracy"][-1])
    todo = in_order([i for i, result in enumerate(finished) if result is None], configs)

    def keep(i: int, result: Result | None) -> None:
        finished[i] = result
        write(path, _together(finished, earlier, command))

    if todo:
        for task, model in dict.fromkeys((configs[i].task, configs[i].model) for i in todo):
            load_task(task, data_dir, model)  # what is missing is better said at once
        with _pool(min(jobs or _jobs_on(machine), len(todo))) as (pool, news, stop):
            rest = (data_dir, machine, trackers)
            futures = {i: pool.submit(_one, i, configs[i], folders[i], *rest) for i in todo}
            with interruptible() as stopped:
                _follow(futures, news, watch, keep, stopped)
                if stopped.is_set():
                    stop.set()
            for i, future in futures.items():
                finished[i] = future.result()
    return _together(finished, earlier, command)


def name_of(config: Config) -> str:
    """A folder's name: task, rule, recipe, batches, seed, and between them what is not as usual."""
    named = {
        name: value for name, value in unusual(config.as_dict()).items() if SETTINGS[name].metadata["in_name"]
    }
    between = [_part(name, value) for name, value in named.items()]
    batches = f"mode{config.mode}" if config.mode else "batches"
    parts = (config.task, config.rule, config.recipe, batches, *between, f"seed{config.seed}")
    return "-".join(parts)


def names_of(configs: list[Config]) -> list[str]:
    """`name_of` each; those that would share a name get the settings in which they differ as well."""
    names = [name_of(config) for config in configs]
    return [_told_apart(name, config, [c for n, c in zip(names, configs, strict=True) if n == name])
            for name, config in zip(names, configs, strict=True)]  # fmt: skip


def in_order(numbers: list[int], configs: list[Config]) -> list[int]:
    """Runs of the same model and batch sizes one after the other: a GPU keeps its graphs for them."""
    kinds = [(c.task, c.model or "", c.batch_sizes) for c in configs]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    return sorted(numbers, key=lambda i: (first[kinds[i]], i))


def done(config: Config, folder: Path) -> Result | None:
    """The finished result in a folder; None if there is none; an error if it is of another run."""
    path = folder / "result.json"
    if not path.exists():
        return None
    (result,) = read(path)["runs"]
    mine, its = config.as_dict(), result["config"]
    for name in mine:
        if mine[name] != its[name]:
            raise ConfigError(
                f"{folder} holds another run: {name} is {its[name]!r} there and {mine[name]!r} here;"
                " choose another --out, or remove that folder"
            )
    return result if result["status"] == "done" else None


def _jobs_on(machine: Machine) -> int:
    return 1 if machine.on_gpu else os.cpu_count() or 1


def _part(name: str, value: Any) -> str:
    """A setting in a folder's name, in characters that every file system takes."""
    if isinstance(value, dict):
        return "-".join(_part(key, value[key]) for key in sorted(value))
    text = "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{name}={re.sub(r'[^0-9A-Za-z.+=]+', '_', text)}"


def _told_apart(name: str, config: Config, namesakes: list[Config]) -> str:
    mine = config.as_dict()
    differing = [k for k in mine if any(other.as_dict()[k] != mine[k] for other in namesakes)]
    return "-".join([name, *(_part(k, mine[k]) for k in differing)])


def _earlier(path: Path) -> Results:
    """What a results file holds; nothing if there is none."""
    if not path.exists():
        return results_of([])
    try:
        return read(path)
    except StateError as error:
        raise ConfigError(f"{error}; choose another --out, or remove it") from None


def _together(finished: Sequence[Result | None], earlier: Results, command: str) -> Results:
    """What was asked for, then what else was there; the commands of both."""
    mine = [result for result in finished if result is not None]
    asked = {identity_of(result) for result in mine}
    others = [run for run in earlier["runs"] if identity_of(run) not in asked]
    lines = [*earlier.get("command", "").splitlines(), command] if others else [command]
    return results_of([*mine, *others], "\n".join(dict.fromkeys(lines)))


# ---- in the process of a run ---------------------------------------------------------------------

_workshop: dict[Any, Any] = {}  # what consecutive runs of a process share: captured graphs
_task: Callable[..., Task] = lru_cache(maxsize=1)(load_task)
_parent: dict[str, Any] = {}  # "news": a queue to the process that waits; "stop": an event that it sets


def _begin(news: Any, stop: Any) -> None:
    """Prepare a process of the pool: it leaves Ctrl-C to its parent and ends when its parent is killed."""
    _parent.update(news=news, stop=stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one(
    number: int,
    config: Config,
    folder: Path,
    data_dir: Path | None,
    machine: Machine,
    trackers: Sequence[Callable[[Path], Tracker]],
) -> Result | None:
    """One run, in a process of the pool; None if it was stopped before it began."""
    news, stop = _parent["news"], _parent["stop"]
    if stop.is_set():
        return None
    last = 0.0

    def watch(run: Run) -> bool:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_NEWS:
            last = time.monotonic()
            news.put((number, run.round, run.history["evaluations"]["accuracy"][-1]))
        return bool(stop.is_set())

    task = _task(config.task, data_dir, config.model)
    made = [make(folder) for make in trackers]
    return train(
        config, task, folder, resume=True, watch=watch, machine=machine, workshop=_workshop, trackers=made
    )


# ---- in the process that waits -------------------------------------------------------------------


def _follow(
    futures: dict[int, Future[Any]],
    news: Any,
    watch: Watch,
    keep: Callable[[int, Result | None], None],
    stopped: Event,
) -> None:
    """Pass news on and keep results until all have ended, or Ctrl-C; a run that failed ends it at once."""
    waiting = dict(futures)
    while waiting and not stopped.is_set():
        with suppress(queue.Empty):
            number, round, accuracy = news.get(timeout=0.1)
            if number in waiting:  # what comes after the result is old
                watch(number, round, accuracy)
        for i in [i for i, future in waiting.items() if future.done()]:
            result = waiting.pop(i).result()
            keep(i, result)
            if result is not None:
                watch(i, result["rounds_done"], result["evaluations"]["accuracy"][-1])


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Any, Any]]:
    """Processes with a queue for news and an event to stop; where it can be, forked from one that has torch."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    news = context.Queue()
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(news, stop))
    try:
        yield pool, news, stop
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        news.close()
