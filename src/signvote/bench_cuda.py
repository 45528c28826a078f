"""Speed of the kernels on a GPU: their bandwidth as a share of that of a copy of the same number of bytes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from signvote import __version__
from signvote.atomic import write_atomically
from signvote.bench import ROUNDS, check_sizes
from signvote.core.counters import CoordinateTrust
from signvote.core.vote import MAX_LLR, empty_decision
from signvote.errors import ConfigError
from signvote.kernels import Coin, CoordinateWeights, Planes, backend, words_for

TARGET = 0.7  # of the bandwidth of a copy
CACHE = 2**28  # bytes to write between two runs, more than any cache holds
BLOCK = 512  # bytes; an unaligned copy is slower, and would make the kernels look better
WARM_UP = 3  # runs
CALLS = 16  # per timed run, one after the other, so that the launch of the graph hardly counts


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured kernel."""

    kernel: str
    coordinates: int
    workers: int
    seconds: float
    bytes_moved: int  # every input read once, every output written once
    of_copy: float  # its bandwidth / that of a copy of as many bytes, timed in turns; the faster of graph and stream
    target: float


@dataclass(frozen=True)
class Case:
    """A call, and the bytes that it has to move."""

    bytes_moved: int
    work: Callable[[], object]


def kernels(n: int, workers: tuple[int, ...], repeats: int, out: Path) -> list[Timing]:
    """Time all kernels, print the table and write the JSON."""
    check_sizes(out, coordinates=(n,), workers=workers, repeats=(repeats,))
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device here; leave --device out to time the CPU")
    timings: list[Timing] = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("timing", total=len(workers))
        for m in workers:
            progress.update(bar, description=f"N = {n:,}, M = {m}")
            timings += _time_case(n, m, repeats)
            progress.advance(bar)
    _print(timings)
    machine = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    versions = {"signvote": __version__, "torch": torch.__version__, "triton": version("triton")}
    report = {"machine": machine, "versions": versions, "timings": [asdict(t) for t in timings]}
    write_atomically(out, json.dumps(report, indent=1).encode())
    Console().print(f"Written to {out}.")
    return timings


def _time_case(n: int, m: int, repeats: int) -> list[Timing]:
    timings = []
    for name, case in _cases(n, m).items():
        copy = _copy(case.bytes_moved)
        seconds, *copies = _median([_captured(case.work), _captured(copy), _in_turn(copy)], repeats)
        timings.append(
            Timing(
                kernel=name,
                coordinates=n,
                workers=m,
                seconds=seconds,
                bytes_moved=case.bytes_moved,
                of_copy=min(copies) / seconds,
                target=TARGET,
            )
        )
    return timings


def _copy(bytes_moved: int) -> Callable[[], object]:
    """A copy of whole aligned blocks that reads half of these bytes and writes the other half."""
    words = BLOCK // 8 * -(-bytes_moved // (2 * BLOCK))
    source, target = (torch.empty(words, dtype=torch.int64, device="cuda") for _ in range(2))
    return partial(target.copy_, source)


def _median(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of a call of each on the device. They run in turns, each with empty caches."""
    flush = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    runs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for turn in range(WARM_UP + repeats):
        for work, its_runs in zip(works, runs, strict=True):
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            if turn >= WARM_UP:
                its_runs.append((start, stop))
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) / 1000 / CALLS for a, b in its_runs) for its_runs in runs]


def _in_turn(work: Callable[[], object]) -> Callable[[], object]:
    """A function that makes CALLS calls, one after the other."""

    def run() -> None:
        for _ in range(CALLS):
            work()

    return run


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """The replay of CALLS calls as a graph, so that the host adds no time. A first call compiles the kernel."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(work)()
    return graph.replay


def _cases(n: int, m: int) -> dict[str, Case]:
    """The kernels as the rules call them, with decisions and counters."""
    generator = torch.Generator("cuda").manual_seed(0)
    kernel = backend("cuda")
    coin = Coin(1)
    plane = 8 * words_for(n)  # bytes
    x = torch.randn(n, generator=generator, device="cuda")
    shape = m, words_for(n)
    signs = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device="cuda")
    votes = Planes(signs, None)
    decision = Planes(signs[0], None)
    out = empty_decision(n, coin, "cuda")
    learned = torch.randint(50, 10_240, (m,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    ones = torch.ones(m, dtype=torch.int32)
    trust = _trust(n, m)
    learned = learned.cuda()  # a graph cannot wait for the host, where equal weights stay
    return {
        "pack": Case(4 * n + plane, lambda: kernel.sign_planes(x, coin)),
        "pack, abstaining": Case(4 * n + 2 * plane, lambda: kernel.sign_planes(x, None)),
        "majority": Case((m + 1) * plane, lambda: kernel.vote_(out, votes, ones, coin, (0, n))),
        "weighted": Case((m + 1) * plane, lambda: kernel.vote_(out, votes, learned, coin, (0, n))),
        "it-signsgd": Case(
            (m + 1) * plane + 2 * trust.counters.nbytes,
            lambda: kernel.vote_by_coordinate_(out, votes, trust, coin, n),
        ),
        "pairwise agreement": Case(m * plane, lambda: kernel.disagreements(votes, n)),
        "step": Case(8 * n + plane, lambda: kernel.step_(x, decision, 0, 1e-3)),
    }


def _trust(n: int, m: int) -> CoordinateWeights:
    """Weights after 2 ROUNDS rounds, of which half are still to come, because timing adds to the counters."""
    one = CoordinateTrust(1, warmup=0, max_llr=MAX_LLR)
    one.admit(range(m))
    one._rounds.update(dict.fromkeys(range(m), 2 * ROUNDS))
    few = torch.distributions.Binomial(2 * ROUNDS, torch.tensor(0.45)).sample((64, m, 64))  # type: ignore[no-untyped-call]
    times = -(-words_for(n) // 64)
    counters: Tensor = few.to(torch.int16).cuda().repeat(times, 1, 1)[: words_for(n)].view(torch.uint16)
    made = one.weights(range(m), 0, 1)
    there = {name: getattr(made, name).cuda() for name in ("slots", "tables", "table_of", "sizes")}
    return made._replace(counters=counters, **there)


def _print(timings: list[Timing]) -> None:
    table = Table(title=f"Bandwidth, N = {timings[0].coordinates:,}", caption="of a copy of as many bytes")
    for heading in ("kernel", "M", "microseconds", "GB/s", "of a copy", "target"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for t in timings:
        speed = f"{t.bytes_moved / t.seconds / 1e9:,.0f}"
        table.add_row(
            t.kernel, str(t.workers), f"{t.seconds * 1e6:,.1f}", speed, f"{t.of_copy:.2f}", f"{t.target:g}"
        )
    Console().print(table)
