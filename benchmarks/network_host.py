"""A host of `network.py`: it holds a model for each method, trains them as told, and measures itself and its link."""

from __future__ import annotations

import gc
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.network_hosts import HOSTS
from benchmarks.network_methods import METHODS, Made, Setting
from benchmarks.network_tasks import GOALS, Training

PORT = 29600  # of plain streams
BLOCK = 2**16


class Running:
    """A model in training."""

    def __init__(self, made: Made, training: Training, seed: int) -> None:
        self.made = made
        self.seed = seed
        self.sampler = training.sampler(seed)
        self.step = 0


class Host:
    """One rank."""

    def __init__(self, rank: int, goal: str, data_dir: Path | None) -> None:
        self.rank = rank
        self.training = Training(GOALS[goal], data_dir)
        self.running: dict[str, Running] = {}

    def make(self, method: str, setting: Setting, seed: int) -> None:
        """A fresh model and what a training script adds for the method."""
        self.running.pop(method, None)
        gc.collect()
        model = self.training.model(seed)
        made = METHODS[method](model, self.training.goal, setting, seed)
        self.running[method] = Running(made, self.training, seed)

    def drop(self, method: str) -> None:
        """Forget a model."""
        self.running.pop(method)
        gc.collect()

    def train(self, method: str, count: int) -> dict[str, Any]:
        """Some steps: seconds of each, those in the optimizer, and what went through the interface meanwhile."""
        running = self.running[method]
        dist.barrier()
        before = traffic()
        seconds, stepping = list[float](), list[float]()
        for _ in range(count):
            start = time.perf_counter()
            voting = self._step(running)
            stop = time.perf_counter()
            stepping.append(stop - voting)
            seconds.append(stop - start)
        down, up = (after - was for after, was in zip(traffic(), before, strict=True))
        return {"seconds": seconds, "stepping": stepping, "up": up, "down": down}

    def _step(self, running: Running) -> float:
        """A step; when the optimizer began."""
        made, training = running.made, self.training
        if training.goal.ramp:
            made.scale(min(1.0, (running.step + 1) / training.goal.ramp))
        batch = training.batch(running.sampler, self.rank, running.step, running.seed)
        made.optimizer.zero_grad()
        training.task.loss(made.module, batch).backward()  # type: ignore[no-untyped-call]
        voting = time.perf_counter()
        made.optimizer.step()
        running.step += 1
        return voting

    def measure(self, method: str) -> float:
        """The metric on the test data; the first rank's alone."""
        return 0.0 if self.rank else self.training.measure(self.running[method].made.inside)

    def every(self, method: str) -> int:
        """Steps between two rounds of a method."""
        return self.running[method].made.every

    # ---- the link alone --------------------------------------------------------------------------

    def stream(self, seconds: float) -> dict[str, float]:
        """Send to the next host and receive from the one before, as fast as TCP can: bytes a second, up and down.

        The first half second does not count: the buffers fill.
        """
        with socket.create_server(("", PORT)) as server:
            dist.barrier()
            target = socket.create_connection((f"10.77.0.{(self.rank + 1) % HOSTS + 1}", PORT))
            source, _ = server.accept()
        ended = threading.Event()
        threads = [
            threading.Thread(target=_send, args=(target, ended)),
            threading.Thread(target=_receive, args=(source,)),
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begun, before = time.perf_counter(), traffic()
        time.sleep(seconds)
        took = time.perf_counter() - begun
        down, up = ((after - was) / took for after, was in zip(traffic(), before, strict=True))
        dist.barrier()
        ended.set()
        for thread in threads:
            thread.join()
        target.close()
        source.close()
        return {"up": up, "down": down}


def _send(target: socket.socket, ended: threading.Event) -> None:
    block = bytes(BLOCK)
    while not ended.is_set():
        target.sendall(block)
    target.shutdown(socket.SHUT_WR)


def _receive(source: socket.socket) -> None:
    while source.recv(BLOCK):
        pass


def traffic() -> tuple[int, int]:
    """Bytes that came in and went out through eth0, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()
    return int(counts[0]), int(counts[8])
