"""A grid of runs: each in a folder of its own, so it can be resumed; on the CPU one process per core."""

from __future__ import annotations

import hashlib
import json
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
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from threading import Event, Thread
from typing import Any

from signvote.errors import ConfigError, StateError
from signvote.metrics import metrics_of
from signvote.results import Result, Results, add, identity, identity_of, read, results_file, results_of
from signvote.settings import SETTINGS, unusual
from signvote.sim.config import Config
from signvote.sim.loop import interruptible, train
from signvote.sim.machine import Machine
from signvote.sim.run import Run
from signvote.sim.tracking import Tracker
from signvote.tasks import Task, load_task

Watch = Callable[[int, int, str], None]  # number of the run, rounds done, its first metric as text
SECONDS_BETWEEN_NEWS = 0.2
LONGEST_NAME = 255  # bytes that file systems accept
DIGEST_LENGTH = 16


def compare(
    configs: list[Config],
    out: Path | str,
    *,
    names: Sequence[str] | None = None,
    command: str = "",
    data_dir: Path | str | None = None,
    machine: Machine | None = None,
    jobs: int | None = None,
    watch: Watch = lambda number, round, reading: None,
    trackers: Sequence[Callable[[Path], Tracker]] = (),
) -> Results:
    """Run all that is not done yet and return the results of all; Ctrl-C keeps what there is.

    A run is done if its folder says so, or `out/results.json`, which is written whenever a run ends.
    Runs that this file holds and nobody asks for now stay in it, also those that another comparison adds meanwhile.
    If `out` holds `results.json.gz`, that is the file.

    Args:
        configs: the runs; each gets the folder `out/runs/NAME`.
        out: where everything goes.
        names: of the runs; None: `name_of` each.
        command: the user's command line, for the record.
        data_dir: the folder of the data files.
        machine: the machine to compute on; None: the CPU.
        jobs: processes at a time; None: one per core on the CPU, one on a GPU.
        watch: called with the progress of each run.
        trackers: each is called with the folder of a run, in its process, and returns a Tracker, as TensorBoard does.

    """
    out = Path(out)
    machine = machine or Machine()
    folders = [out / "runs" / name for name in names or map(name_of, configs)]
    path = results_file(out)
    earlier = _earlier(path)
    known = {identity_of(run): run for run in earlier["runs"] if run["status"] == "done"}
    out.mkdir(parents=True, exist_ok=True)
    finished = [
        known.get(identity(config)) or done(config, folder)
        for config, folder in zip(configs, folders, strict=True)
    ]
    for i, result in enumerate(finished):
        _watch_result(watch, i, result)
    missing = [i for i, result in enumerate(finished) if result is None]
    todo = in_order(missing, configs)

    def keep(i: int, result: Result | None) -> Results:
        finished[i] = result
        return kept()

    def kept() -> Results:
        return add(path, [result for result in finished if result is not None], command)

    if todo:
        for task, model, options in dict.fromkeys(_task_of(configs[i]) for i in todo):
            load_task(task, data_dir, model, json.loads(options))  # raises at once if data are missing
        processes = min(jobs or _jobs_on(machine), len(todo))
        with interruptible() as stopped, _pool(processes) as (pool, news, stop):
            futures = {}
            for i in todo:
                if not stopped.is_set():
                    work = i, configs[i], folders[i]
                    futures[i] = pool.submit(_one, *work, data_dir, machine, trackers)
            _follow(futures, news, watch, keep, stopped)
            if stopped.is_set():
                stop.set()
            for i, future in futures.items():
                finished[i] = future.result()
    return kept()


def name_of(config: Config) -> str:
    """A folder's name: task, rule, recipe, batches, the settings that differ from the default, seed.

    A name that no file system accepts is cut; a digest of all settings then tells it apart.
    """
    return _short(_full_name(config), config)


def _full_name(config: Config) -> str:
    changed = unusual(config.as_dict())
    between = [_part(name, value) for name, value in changed.items() if SETTINGS[name].metadata["in_name"]]
    parts = [
        re.sub(r"[^0-9A-Za-z.-]+", "_", config.task),
        config.rule,
        config.recipe,
        f"mode{config.mode}" if config.mode else "batches",
        *between,
        f"seed{config.seed}",
    ]
    return "-".join(parts)


def names_of(configs: list[Config]) -> list[str]:
    """The name of each run. Runs that would share a name also get the settings in which they differ."""
    names = [_full_name(config) for config in configs]
    namesakes: dict[str, list[Config]] = {}
    for name, config in zip(names, configs, strict=True):
        namesakes.setdefault(name, []).append(config)
    return [_told_apart(name, config, namesakes[name]) for name, config in zip(names, configs, strict=True)]


def in_order(numbers: list[int], configs: list[Config]) -> list[int]:
    """Put runs of the same model and batch sizes one after the other: a GPU keeps its graphs for them."""
    kinds = [(*_task_of(config), config.batch_sizes) for config in configs]
    first: dict[Any, int] = {}
    for i, kind in enumerate(kinds):
        first.setdefault(kind, i)
    return sorted(numbers, key=lambda i: (first[kinds[i]], i))


def _task_of(config: Config) -> tuple[str, str | None, str]:
    """Everything that decides about the task and its model, in a form that can be a key."""
    return config.task, config.model, json.dumps(config.task_options, sort_keys=True)


def done(config: Config, folder: Path) -> Result | None:
    """The finished result in a folder; None if there is none, or if it has too few rounds and may be resumed.

    A result of another run is an error.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    (result,) = read(path)["runs"]
    found = result["config"]
    if config.extends(found):
        return None
    for name, wanted in config.as_dict().items():
        if wanted != found[name]:
            raise ConfigError(
                f"{folder} holds another run: {name} is {found[name]!r} there and {wanted!r} here;"
                " choose another --out, or remove that folder"
            )
    return result if result["status"] == "done" else None


def _jobs_on(machine: Machine) -> int:
    if machine.on_gpu:
        return 1
    return os.cpu_count() or 1


def _watch_result(watch: Watch, number: int, result: Result | None) -> None:
    """Report the end of a run, unless it was stopped before it began."""
    if result is not None:
        metric = metrics_of(result)[0]
        value = result["evaluations"][metric.name][-1]
        watch(number, result["rounds_done"], metric.text(value))


def _part(name: str, value: Any) -> str:
    """A setting in a folder's name, in characters that every file system accepts."""
    if isinstance(value, dict):
        return "-".join(_part(key, value[key]) for key in sorted(value))
    items = value if isinstance(value, list | tuple) else [value]
    text = "+".join(map(str, items))
    safe = re.sub(r"[^0-9A-Za-z.+=]+", "_", f"{name}={text}")
    return safe


def _told_apart(name: str, config: Config, namesakes: list[Config]) -> str:
    others = [other.as_dict() for other in namesakes]
    parts = [name]
    for setting, value in config.as_dict().items():
        if any(other[setting] != value for other in others):
            parts.append(_part(setting, value))
    return _short("-".join(parts), config)


def _short(name: str, config: Config) -> str:
    """The name, or its beginning and a digest if it is too long for a folder."""
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(identity(config).encode()).hexdigest()[:DIGEST_LENGTH]
    room = LONGEST_NAME - DIGEST_LENGTH - 1
    start = name.encode()[:room].decode(errors="ignore")
    return f"{start}-{digest}"


def _earlier(path: Path) -> Results:
    """The content of a results file; empty results if there is none."""
    if not path.exists():
        return results_of([])
    try:
        return read(path)
    except StateError as error:
        raise ConfigError(f"{error}; choose another --out, or remove it") from None


# ---- in the process of a run ---------------------------------------------------------------------

_workshop: dict[Any, Any] = {}  # captured graphs, shared by consecutive runs of a process
_parent: dict[str, Any] = {}  # "news": a queue to the waiting process; "stop": an event that it sets


@lru_cache(maxsize=1)
def _task(name: str, model: str | None, options: str, data_dir: Path | str | None) -> Task:
    return load_task(name, data_dir, model, json.loads(options))


def _begin(news: Any, stop: Any) -> None:
    """Prepare a process of the pool: it ignores Ctrl-C, which its parent handles, and ends with its parent."""
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
    data_dir: Path | str | None,
    machine: Machine,
    trackers: Sequence[Callable[[Path], Tracker]],
) -> Result | None:
    """Do one run, in a process of the pool; None if it was stopped before it began."""
    news = _parent["news"]
    stop = _parent["stop"]
    if stop.is_set():
        return None
    last = 0.0

    def watch(run: Run) -> bool:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_NEWS:
            last = time.monotonic()
            news.put((number, run.round, run.reading()))
        return bool(stop.is_set())

    result = train(
        config,
        _task(*_task_of(config), data_dir),
        folder,
        resume=True,
        watch=watch,
        machine=machine,
        workshop=_workshop,
        trackers=[make(folder) for make in trackers],
    )
    return dict(result)  # without the model


# ---- in the waiting process ----------------------------------------------------------------------


def _follow(
    futures: dict[int, Future[Any]],
    news: Any,
    watch: Watch,
    keep: Callable[[int, Result | None], Results],
    stopped: Event,
) -> None:
    """Forward news and keep results until all runs have ended, or until Ctrl-C. A failed run raises at once."""
    waiting = dict(futures)
    while waiting and not stopped.is_set():
        with suppress(queue.Empty):
            number, round, reading = news.get(timeout=0.1)
            if number in waiting:  # news after the result are old
                watch(number, round, reading)
        ended = [i for i, future in waiting.items() if future.done()]
        for i in ended:
            result = waiting.pop(i).result()
            keep(i, result)
            _watch_result(watch, i, result)


@contextmanager
def _deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. Processes that start in it never hear it: their parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _pool(processes: int) -> Iterator[tuple[ProcessPoolExecutor, Any, Any]]:
    """Processes with a queue for news and an event to stop; where possible, forked from one that has torch."""
    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    if method == "forkserver":
        resource_tracker.ensure_running()  # its start ends the block below
        with _deferred():
            forkserver.ensure_running()
    news = context.Queue()
    stop = context.Event()
    pool = ProcessPoolExecutor(
        processes,
        context,
        initializer=_begin,
        initargs=(news, stop),
    )
    try:
        yield pool, news, stop
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        news.close()
