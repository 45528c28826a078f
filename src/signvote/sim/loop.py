"""The loop around a run: checkpoints, Ctrl-C, the result's file."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from signvote import checkpoint
from signvote.errors import StateError
from signvote.results import write
from signvote.sim.config import Config
from signvote.sim.machine import Machine
from signvote.sim.run import Run
from signvote.sim.setup import Workshop
from signvote.sim.tracking import Telling, Tracker
from signvote.sim.trained import CHECKPOINT, RESULT, Trained, check_folder
from signvote.tasks import Task

SECONDS_BETWEEN_CHECKPOINTS = 30.0


def train(
    config: Config,
    task: Task,
    out: Path | str,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    resume: bool = False,
    watch: Callable[[Run], bool | None] = lambda run: None,
    machine: Machine | None = None,
    workshop: Workshop | None = None,
    trackers: Sequence[Tracker] = (),
) -> Trained:
    """Run to the end, or to Ctrl-C: either leaves `result.json` and `checkpoint.safetensors` in `out`.

    Returns the content of `result.json`; its attribute `model` is the trained model.
    The checkpoint has its parameters, too.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> from signvote.tasks import load_task
    >>> task = load_task("mnist-10k", model="mlp")
    >>> with TemporaryDirectory() as folder:
    ...     trained = train(Config(task="mnist-10k", model="mlp", rounds=2), task, folder)
    ...     saved = checkpoint.load(f"{folder}/checkpoint.safetensors")["model"]
    >>> trained["status"], trained.model(torch.zeros(1, 1, 28, 28)).shape
    ('done', torch.Size([1, 10]))
    >>> model = task.model()
    >>> model.load_state_dict(saved)
    <All keys matched successfully>

    Args:
        config: the run.
        task: the result of `load_task(config.task)`, or your own task.
        out: a folder, created if necessary. One that holds another run is refused.
        model: instead of the task's: a model, of which a copy is trained, or a function that makes one.
        resume: resume from the checkpoint in `out`, if there is one.
        watch: called after every round; the run stops if it returns True.
        machine: the machine to compute on; default: the CPU.
        workshop: see Run.
        trackers: called at every evaluation.

    """
    out = Path(out)
    check_folder(out, resume=resume)
    if model is not None:
        task = replace(task, model=model)
    path = out / CHECKPOINT
    machine = machine or Machine()
    with machine.ready():
        run = Run(config, task, machine, workshop)
        out.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            _resume(run, path)
        telling = Telling(run, trackers)
        saved = time.monotonic()
        with interruptible() as stopped:
            while run.round < config.rounds and not stopped.is_set():
                run.step()
                if telling.tell():
                    write(out / RESULT, run.result("interrupted"))  # for those who watch, and if it is killed
                if watch(run):
                    stopped.set()
                if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                    checkpoint.save(path, run.state_dict())
                    saved = time.monotonic()
            checkpoint.save(path, run.state_dict())
            result = run.result("done" if run.round == config.rounds else "interrupted")
            write(out / RESULT, result)
            telling.finish(result)
        return Trained(result, run.model)


def _resume(run: Run, path: Path) -> None:
    state = checkpoint.load(path)
    try:
        run.load_state_dict(state)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that every round is completed; a second Ctrl-C raises."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
