"""Processes that start quickly, and signals to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

import torch.multiprocessing as mp

from soak import memory


def start(work: Callable[..., Any], *args: Any) -> BaseProcess:
    """A process that runs a function; it is forked from one that has loaded everything."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    process: BaseProcess = context.Process(target=work, args=args, daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """As by `kill -9`."""
    process.kill()
    process.join()


def stop_for(pid: int | None, seconds: float) -> None:
    """Stop a process, as a machine does that swaps, sleeps or is moved; then let it continue."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def measured(work: Callable[..., Any], *args: Any) -> list[memory.Sample]:
    """What a function puts into the queue that is its last argument, as it runs in a process of its own."""
    samples: Any = mp.get_context("forkserver").Queue()
    process = start(work, *args, samples)
    found: list[memory.Sample] = []
    while process.is_alive() or not samples.empty():
        try:
            found.append(samples.get(timeout=0.5))
        except Empty:
            continue
    assert process.exitcode == 0
    return found
