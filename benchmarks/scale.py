"""Memory and processor time of server, relay and worker at three sizes: is docs/scale.md right?

    nice python -m benchmarks.scale                 # two minutes on one core, 1 GB of memory
    nice python -m benchmarks.scale --predicted     # sizes that no constant was fitted to

Dense ballots of random signs, the default rule, one thread, a fresh process for each case, two rounds. A server is
given the ballots one by one; a relay has a part of them, and its root this relay alone. Processor seconds, of the
second round, are divided by those of copying the bytes of the ballots (root: of the tally; worker: of the gradient) in
the same run. Memory is the peak of the process above what it held before: once as it is, and once with glibc's
MALLOC_MMAP_THRESHOLD_=131072, which gives freed blocks back. Bytes are checked by tests/test_scale.py.
Writes benchmarks/scale/sizes.json, or predicted.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests import scale

from signvote import Layout, Server, Worker
from signvote.core.ballot import Ballot
from signvote.core.header import Kind
from signvote.core.messages import Weights
from signvote.core.relay import Relay
from signvote.core.root import Root

OUT = Path(__file__).parent / "scale"


class Size(NamedTuple):
    """Of a round."""

    workers: int
    n: int  # coordinates
    below: int  # workers of the relay
    batches: int = 3  # different batch sizes that workers declare, from 4


SIZES = (Size(16, 1_000_000, 4), Size(64, 4_000_000, 16), Size(128, 16_000_000, 32))
PREDICTED = (
    Size(32, 2_000_000, 8),
    Size(100, 8_000_000, 25),
    Size(64, 4_000_000, 48),
    Size(48, 3_000_000, 12, 901),
)
COPIED = 2**28  # bytes
RETURNS = "MALLOC_MMAP_THRESHOLD_"  # of glibc, read as a process starts


def copying(size: int) -> float:
    """Processor seconds to copy so many bytes, at the speed of a copy that no cache holds."""
    source, target = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    fastest = min(seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return fastest * size / COPIED


def seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def status(name: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes of memory at most during some work, above those before it."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def ballots(layout: Layout, workers: int, batches: int, round: int) -> Iterator[tuple[int, bytes]]:
    """Made one by one, as if they arrived."""
    random = np.random.default_rng(round)
    common = random.integers(0, 256, scale.packed(layout.size), np.uint8)
    for m in range(workers):
        noise = random.integers(0, 256, (2, len(common)), np.uint8)
        signs = common ^ (noise[0] & noise[1])  # a quarter of the votes is against the others
        batch_size = 4 + 37 * m % batches
        ballot = Ballot(
            layout=layout, worker=m, round=round, run=0, kind=Kind.DENSE, signs=signs, batch_size=batch_size
        )
        yield m, ballot.to_bytes()


class Clock:
    """Adds up the processor seconds of some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        """What a call returns."""
        start = time.process_time()
        found = work(*args)
        self.seconds += time.process_time() - start
        return found


def a_server(of: Size, layout: Layout) -> dict[str, float]:
    """One server with all ballots."""
    server = Server(layout)

    def decide(round: int) -> Clock:
        clock = Clock()
        opened = clock(server.open, round)
        for m, message in ballots(layout, of.workers, of.batches, round):
            clock(opened.add, m, message)
        clock(opened.close)
        clock(server.settle)
        return clock

    clocks: list[Clock] = []
    peak = peak_of(lambda: clocks.extend((decide(1), decide(2))))
    size = of.workers * scale.packed(layout.size)
    given = dict(ballots(layout, of.workers, of.batches, 3))
    together = seconds(lambda: server.decide(3, given))
    one = copying(size)
    return {"copies": clocks[1].seconds / one, "copies together": together / one, "peak": peak}


def a_relay(of: Size, layout: Layout) -> dict[str, float]:
    """One relay; the root has this one alone."""
    relay, server = Relay(Server(layout)), Server(layout)

    def decide(round: int) -> tuple[Clock, Clock, int]:
        below, above = Clock(), Clock()
        branch = relay.open(round)
        for m, message in ballots(layout, of.below, of.batches, round):
            below(branch.add, m, message)
        root = above(Root, server, round)
        (weights,) = above(root.weigh, [below(branch.roll)])
        below(branch.weigh, weights)
        partial = below(branch.partial)
        verdict = above(root.decide, [partial])
        below(branch.decide, verdict)
        above(root.learn, [below(branch.evidence)])
        known = Weights.from_bytes(weights, root._topic, 1).weights
        assert known is not None
        return below, above, scale.planes(known[:, 0].tolist())

    found: list[tuple[Clock, Clock, int]] = []
    peak = peak_of(lambda: found.extend((decide(1), decide(2))))
    below, above, digits = found[1]
    size = of.below * scale.packed(layout.size)
    return {
        "copies": below.seconds / copying(size),
        "copies of the root": above.seconds / copying(digits * scale.packed(layout.size)),
        "peak": peak,
        "planes": digits,
    }


def a_worker(of: Size, layout: Layout) -> dict[str, float]:
    """One worker with momentum: its ballot, and the step by a decision."""
    n = layout.size
    parameters = {"w": torch.zeros(n)}
    parameters["w"].grad = torch.randn(n)
    worker = Worker(parameters, 0, momentum=0.9)
    server = Server(worker.layout)
    clock, clock_of_step = Clock(), Clock()

    def step(round: int) -> None:
        clock.seconds = clock_of_step.seconds = 0.0
        decision = server.decide(round, {0: clock(worker.ballot, round)})
        clock_of_step(worker.apply, decision, 1e-3)

    def two_steps() -> None:
        step(1)
        step(2)

    peak = peak_of(two_steps)
    one = copying(4 * n)
    return {"copies": clock.seconds / one, "copies of the step": clock_of_step.seconds / one, "peak": peak}


CASES = {"server": a_server, "relay": a_relay, "worker": a_worker}


def measured(case: str, of: Size) -> dict[str, float]:
    """One case, after what is needed is compiled and loaded."""
    torch.set_num_threads(1)
    tiny = Size(4, 1000, 1)
    CASES[case](tiny, Layout([("w", (tiny.n,))]))
    return CASES[case](of, Layout([("w", (of.n,))]))


def apart(case: str, of: Size) -> dict[str, float]:
    """One case, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measured, case, of).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--predicted", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    found = []
    for of in PREDICTED if options.predicted else SIZES:
        row: dict[str, Any] = of._asdict()
        for case in CASES:
            row[case] = apart(case, of)
            os.environ[RETURNS] = "131072"
            row[case]["peak if freed blocks are returned"] = apart(case, of)["peak"]
            del os.environ[RETURNS]
        found.append(row)
        print(json.dumps(row), flush=True)
    OUT.mkdir(exist_ok=True)
    name = "predicted.json" if options.predicted else "sizes.json"
    (OUT / name).write_text(json.dumps(found, indent=1))
    for line in scale.measurements(found):
        print(line)


if __name__ == "__main__":
    main()
