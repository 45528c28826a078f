"""How fast the kernels are here: every time as a ratio to copying the float32 vector in the same run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from signvote import __version__
from signvote.atomic import write_atomically
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.layout import Layout
from signvote.core.rules import Majority
from signvote.core.vote import Votes, empty_decision
from signvote.errors import ConfigError
from signvote.kernels import Coin, Planes, backend, words_for

TARGETS = {"pack": 1.0, "majority": 1.2, "pooled": 2.5, "it-signsgd": 20.0}  # at M = 15, one thread
ROUNDS = 3000  # how long the workers of the it-signsgd case have been counted
WARM_UP_SECONDS = 0.3
TEXTBOOK_COORDINATES = 1_000_000  # the textbook way needs 8 bytes per vote and more: time a part


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured kernel."""

    kernel: str
    coordinates: int
    workers: int
    threads: int
    seconds: float
    copies: float  # time / time of copying the float32 vector, measured beside it
    textbook_copies: float | None  # the same for the textbook way in torch
    target: float | None


def kernels(
    n: int, workers: tuple[int, ...], threads: tuple[int, ...], repeats: int, out: Path
) -> list[Timing]:
    """Time all kernels, print the tables and write the JSON."""
    threads = threads or tuple(sorted({1, os.cpu_count() or 1}))
    check_sizes(out, coordinates=(n,), workers=workers, threads=threads, repeats=(repeats,))
    before = torch.get_num_threads()
    cases = [(n, m, t) for t in threads for m in workers]
    cases += [(n // part, workers[0], 1) for part in (16, 4) if n >= 100 * part]
    timings: list[Timing] = []
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("timing", total=len(cases))
            for case in cases:
                progress.update(bar, description="N = {:,}, M = {}, {} threads".format(*case))
                timings += time_case(*case, repeats)
                progress.advance(bar)
    finally:
        torch.set_num_threads(before)
    _print(timings, n)
    machine = {"processor": _processor(), "cores": os.cpu_count()}
    versions = {"signvote": __version__, "torch": torch.__version__, "numba": version("numba")}
    report = {"machine": machine, "versions": versions, "timings": [asdict(t) for t in timings]}
    write_atomically(out, json.dumps(report, indent=1).encode())
    Console().print(f"Written to {out}.")
    return timings


def check_sizes(out: Path, **sizes: tuple[int, ...]) -> None:
    """Raise unless there is something to measure and a folder to write into."""
    for name, values in sizes.items():
        if not values or min(values) < 1:
            raise ConfigError(f"{name} is {', '.join(map(str, values))}; it must be 1 or more")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder to write {out.name} into")


def time_case(n: int, m: int, threads: int, repeats: int, *, textbook: bool = True) -> list[Timing]:
    """Every kernel at one size; the textbook way beside it where one thread is asked for."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator)
    target = torch.empty_like(x)
    small = min(n, TEXTBOOK_COORDINATES)
    signs = torch.randint(-(2**63), 2**63 - 1, (m, words_for(n)), generator=generator)
    ours, slow_ways = _ours(x, signs), _textbook(x[:small], m) if textbook and threads == 1 else {}
    timings = []
    for name, work in ours.items():
        seconds, copy = _fastest([work, lambda: target.copy_(x)], repeats)
        slow = None
        if name in slow_ways:
            slow = _fastest([slow_ways[name]], 2)[0] / small * n / copy
        aim = TARGETS.get(name) if (m, threads) == (15, 1) else None
        timings.append(
            Timing(
                kernel=name,
                coordinates=n,
                workers=m,
                threads=threads,
                seconds=seconds,
                copies=seconds / copy,
                textbook_copies=slow,
                target=aim,
            )
        )
    return timings


def _fastest(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of the fastest run of each, taken in turns once warm."""
    times: list[list[float]] = [[] for _ in works]
    warm = time.perf_counter() + WARM_UP_SECONDS
    for work in works:
        work()
    while time.perf_counter() < warm:
        works[0]()
    for _ in range(repeats):
        for work, its_times in zip(works, times, strict=True):
            time.sleep(0.01)  # torch's threads spin for a while after work of their own
            start = time.perf_counter()
            work()
            its_times.append(time.perf_counter() - start)
    return [min(its_times) for its_times in times]


def _ours(x: Tensor, signs: Tensor) -> dict[str, Callable[[], object]]:
    """The kernels as the rules call them, decisions, counts and all."""
    n, m = x.numel(), signs.shape[0]
    kernel, coin = backend("cpu"), Coin(1)
    votes = Votes(workers=tuple(range(m)), planes=Planes(signs, None), n=n, batch_sizes=(1,) * m)
    layout, out = Layout([("x", (n,))]), empty_decision(n, coin)
    weights = torch.randint(50, 10_240, (m,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    majority, paper = Majority(layout), ItSignSGD(layout)
    trust = paper.trust
    trust.admit(votes.workers)
    _fill_(trust.counters, 0.45)
    for known in (trust._rounds, trust._seen):
        known.update(dict.fromkeys(votes.workers, ROUNDS))
    decision = Planes(signs[0], None)
    return {
        "pack": lambda: kernel.sign_planes(x, coin),
        "pack, abstaining": lambda: kernel.sign_planes(x, None),
        "majority": lambda: majority.vote(out, votes, coin),
        "pooled": lambda: kernel.vote_(out, votes.planes, weights, coin, (0, n)),
        "it-signsgd": lambda: paper.vote(out, votes, coin),
        "pairwise agreement": lambda: kernel.disagreements(votes.planes, n),
        "step": lambda: kernel.step_(x, decision, 0, 1e-3),
    }


def _fill_(counters: Tensor, p: float) -> None:
    """Counters as ROUNDS rounds of crossover p leave them."""
    few = torch.distributions.Binomial(2 * ROUNDS, torch.tensor(p)).sample((64, *counters.shape[1:]))  # type: ignore[no-untyped-call]
    for start in range(0, counters.shape[0], 64):
        part = counters[start : start + 64]
        part.copy_(few[: part.shape[0]])


def _textbook(x: Tensor, m: int) -> dict[str, Callable[[], object]]:
    """The same in the words of the paper, floats and all: what one writes first."""
    y = torch.sign(torch.randn(m, x.numel(), generator=torch.Generator().manual_seed(2)))
    weights, count = torch.rand(m), torch.full((m, x.numel()), 0.45 * ROUNDS)
    powers = 2 ** torch.arange(8, dtype=torch.uint8)

    def pack() -> Tensor:
        return ((x[: x.numel() // 8 * 8] > 0).view(-1, 8) * powers).sum(1, dtype=torch.uint8)

    def pooled() -> Tensor:
        decision = torch.sign((weights[:, None] * y).sum(0))
        return (y != decision).sum(1)

    def per_coordinate() -> None:
        p = count / ROUNDS
        decision = torch.sign((torch.log((1 - p) / p).clamp(-10, 10) * y).sum(0))
        count.add_(y != decision).clamp_(1, ROUNDS - 1)

    return {
        "pack": pack,
        "majority": lambda: torch.sign(y.sum(0)),
        "pooled": pooled,
        "it-signsgd": per_coordinate,
        "pairwise agreement": lambda: y @ y.T,
        "step": lambda: x.sub_(y[0], alpha=1e-3),
    }


def _print(timings: list[Timing], n: int) -> None:
    console = Console()
    table = Table(title=f"Time in copies of the float32 vector, N = {n:,}", caption="lower is better")
    headings = ("kernel", "M", "threads", "ns per coordinate", "copies", "target", "textbook torch")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for t in timings:
        if t.coordinates == n:
            limits = ("" if v is None else f"{v:.4g}" for v in (t.target, t.textbook_copies))
            per = f"{t.seconds / t.coordinates * 1e9:.3f}"
            table.add_row(t.kernel, str(t.workers), str(t.threads), per, f"{t.copies:.2f}", *limits)
    console.print(table)
    sizes = sorted({t.coordinates for t in timings})
    if len(sizes) > 1:
        growth = Table(title="Nanoseconds per coordinate as N grows (one thread)")
        for heading in ("kernel", *(f"N = {size:,}" for size in sizes)):
            growth.add_column(heading, justify="left" if heading == "kernel" else "right")
        one = {
            (t.kernel, t.coordinates): t
            for t in reversed(timings)
            if t.threads == 1 and t.workers == timings[0].workers
        }
        for name in dict.fromkeys(t.kernel for t in timings):
            row = (one[name, size].seconds / size * 1e9 for size in sizes if (name, size) in one)
            growth.add_row(name, *(f"{value:.3f}" for value in row))
        console.print(growth)


def _processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
