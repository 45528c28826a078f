"""The speed of the kernels: each time relative to a copy of the float32 vector in the same run."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

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

TARGETS = {
    "pack": 1.0,
    "majority": 0.7,
    "weighted": 1.2,
    "it-signsgd": 10.0,
}  # at M = 15, one thread
ROUNDS = 3000  # rounds in the counters of the it-signsgd case
WARM_UP_SECONDS = 0.3
TEXTBOOK_COORDINATES = 1_000_000  # textbook code needs 8 bytes per vote and more, so only a part is timed

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured kernel."""

    kernel: str
    coordinates: int
    workers: int
    threads: int
    seconds: float
    copies: float  # seconds divided by those of a copy of the float32 vector, measured in turns
    textbook_copies: float | None  # the same for textbook code in torch
    target: float | None


class Case(NamedTuple):
    """The size of one measurement."""

    coordinates: int
    workers: int
    threads: int

    def __str__(self) -> str:
        return f"N = {self.coordinates:,}, M = {self.workers}, {self.threads} threads"


def kernels(
    n: int,
    workers: tuple[int, ...],
    threads: tuple[int, ...],
    repeats: int,
    out: Path,
) -> list[Timing]:
    """Time all kernels, print the tables and write the JSON."""
    threads = threads or tuple(sorted({1, os.cpu_count() or 1}))
    check_sizes(
        out,
        coordinates=(n,),
        workers=workers,
        threads=threads,
        repeats=(repeats,),
    )
    cases = [Case(n, m, t) for t in threads for m in workers]
    for part in (16, 4):
        if n >= 100 * part:
            cases.append(Case(n // part, workers[0], 1))
    timings = _time_cases(cases, repeats)
    _print_times(timings, n)
    _print_growth(timings)
    _write(timings, out)
    Console().print(f"Written to {out}.")
    return timings


def check_sizes(out: Path, **sizes: tuple[int, ...]) -> None:
    """Raise unless all sizes are 1 or more and the folder of the output exists."""
    for name, values in sizes.items():
        if not values or min(values) < 1:
            given = ", ".join(map(str, values))
            raise ConfigError(f"{name} is {given}; it must be 1 or more")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder to write {out.name} into")


def _time_cases(cases: list[Case], repeats: int) -> list[Timing]:
    before = torch.get_num_threads()
    timings: list[Timing] = []
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("timing", total=len(cases))
            for case in cases:
                progress.update(bar, description=str(case))
                timings += time_case(*case, repeats)
                progress.advance(bar)
    finally:
        torch.set_num_threads(before)
    return timings


def time_case(
    n: int,
    m: int,
    threads: int,
    repeats: int,
    *,
    textbook: bool = True,
) -> list[Timing]:
    """Every kernel at one size. With one thread, textbook code is timed too."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator)
    target = torch.empty_like(x)
    shape = (m, words_for(n))
    signs = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    ours = _ours(x, signs)
    slow_ones = {}
    if textbook and threads == 1:
        slow_ones = _textbook(x[:TEXTBOOK_COORDINATES], m)
    targets = TARGETS if (m, threads) == (15, 1) else {}
    timings = []
    for name, work in ours.items():
        seconds, copy = _fastest([work, lambda: target.copy_(x)], repeats)
        slow_copies = None
        if name in slow_ones:
            slow_copies = _textbook_seconds(slow_ones[name], n) / copy
        timing = Timing(
            kernel=name,
            coordinates=n,
            workers=m,
            threads=threads,
            seconds=seconds,
            copies=seconds / copy,
            textbook_copies=slow_copies,
            target=targets.get(name),
        )
        timings.append(timing)
    return timings


def _fastest(works: list[Work], repeats: int) -> list[float]:
    """Seconds of the fastest run of each work, measured in turns after a warm-up; of one thread, its processor's."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time
    warm = time.perf_counter() + WARM_UP_SECONDS
    for work in works:
        work()
    while time.perf_counter() < warm:
        works[0]()
    fastest = [math.inf] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            time.sleep(0.01)  # torch's threads spin for a while after their own work
            start = clock()
            work()
            seconds = clock() - start
            fastest[i] = min(fastest[i], seconds)
    return fastest


def _textbook_seconds(work: Work, n: int) -> float:
    """Seconds of textbook code for n coordinates, of which at most TEXTBOOK_COORDINATES are timed."""
    (seconds,) = _fastest([work], 2)
    timed = min(n, TEXTBOOK_COORDINATES)
    return seconds / timed * n


def _ours(x: Tensor, signs: Tensor) -> dict[str, Work]:
    """The kernels as the rules call them, with decisions and counts."""
    n = x.numel()
    m = len(signs)
    kernel = backend("cpu")
    coin = Coin(1)
    votes = Votes(
        workers=tuple(range(m)),
        planes=Planes(signs, None),
        n=n,
        batch_sizes=(1,) * m,
    )
    layout = Layout([("x", (n,))])
    out = empty_decision(n, coin)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(50, 10_240, (m,), generator=generator, dtype=torch.int32)
    majority = Majority(layout)
    paper = _experienced(layout, votes.workers)
    counters = paper.trust.counters.view(torch.int16)
    decision = Planes(signs[0], None)
    return {
        "pack": lambda: kernel.sign_planes(x, coin),
        "pack, abstaining": lambda: kernel.sign_planes(x, None),
        "majority": lambda: majority.vote(out, votes, coin),
        "weighted": lambda: kernel.vote_(out, votes.planes, weights, coin, (0, n)),
        "it-signsgd": lambda: paper.learn(paper.vote(out, votes, coin)),
        "it-signsgd, counters read and written": lambda: counters.add_(0),
        "pairwise agreement": lambda: kernel.disagreements(votes.planes, n),
        "step": lambda: kernel.step_(x, decision, 0, 1e-3),
    }


def _experienced(layout: Layout, workers: tuple[int, ...]) -> ItSignSGD:
    """A rule with the counters of ROUNDS rounds."""
    rule = ItSignSGD(layout)
    trust = rule.trust
    trust.admit(workers)
    _fill_(trust.counters, 0.45)
    rounds = dict.fromkeys(workers, ROUNDS)
    trust._rounds.update(rounds)
    trust._seen.update(rounds)
    return rule


def _fill_(counters: Tensor, p: float) -> None:
    """Set counters to typical values after ROUNDS rounds with crossover p."""
    binomial = torch.distributions.Binomial(2 * ROUNDS, torch.tensor(p))
    few = binomial.sample((64, *counters.shape[1:]))  # type: ignore[no-untyped-call]
    for start in range(0, counters.shape[0], 64):
        part = counters[start : start + 64]
        part.copy_(few[: part.shape[0]])


def _textbook(x: Tensor, m: int) -> dict[str, Work]:
    """The same work written directly from the paper, with floats."""
    n = x.numel()
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(m, n, generator=generator)
    y = torch.sign(noise)
    weights = torch.rand(m)
    count = torch.full((m, n), 0.45 * ROUNDS)
    powers = 2 ** torch.arange(8, dtype=torch.uint8)

    def pack() -> Tensor:
        whole_bytes = x[: n // 8 * 8]
        bits = (whole_bytes > 0).view(-1, 8)
        return (bits * powers).sum(1, dtype=torch.uint8)

    def majority() -> Tensor:
        return torch.sign(y.sum(0))

    def weighted() -> Tensor:
        tally = (weights[:, None] * y).sum(0)
        decision = torch.sign(tally)
        return (y != decision).sum(1)

    def per_coordinate() -> None:
        p = count / ROUNDS
        llr = torch.log((1 - p) / p)
        llr = llr.clamp(-10, 10)
        tally = (llr * y).sum(0)
        decision = torch.sign(tally)
        count.add_(y != decision)
        count.clamp_(1, ROUNDS - 1)

    return {
        "pack": pack,
        "majority": majority,
        "weighted": weighted,
        "it-signsgd": per_coordinate,
        "pairwise agreement": lambda: y @ y.T,
        "step": lambda: x.sub_(y[0], alpha=1e-3),
    }


def _print_times(timings: list[Timing], n: int) -> None:
    table = Table(title=f"Time in copies of the float32 vector, N = {n:,}", caption="lower is better")
    for heading in ("kernel", "M", "threads", "ns per coordinate", "copies", "target", "textbook torch"):
        _add_column(table, heading)
    for timing in timings:
        if timing.coordinates == n:
            table.add_row(
                timing.kernel,
                str(timing.workers),
                str(timing.threads),
                _nanoseconds(timing),
                f"{timing.copies:.2f}",
                _number_or_nothing(timing.target),
                _number_or_nothing(timing.textbook_copies),
            )
    Console().print(table)


def _print_growth(timings: list[Timing]) -> None:
    """Print how times grow with N: a row for each kernel, with one thread and the first number of workers."""
    workers = timings[0].workers
    rows: dict[str, dict[int, str]] = {}
    for timing in timings:
        if timing.threads == 1 and timing.workers == workers:
            row = rows.setdefault(timing.kernel, {})
            row.setdefault(timing.coordinates, _nanoseconds(timing))
    sizes = sorted({timing.coordinates for timing in timings})
    if len(sizes) < 2:
        return
    table = Table(title="Nanoseconds per coordinate as N grows (one thread)")
    _add_column(table, "kernel")
    for size in sizes:
        _add_column(table, f"N = {size:,}")
    for kernel, row in rows.items():
        times = [row[size] for size in sizes if size in row]
        table.add_row(kernel, *times)
    Console().print(table)


def _add_column(table: Table, heading: str) -> None:
    table.add_column(heading, justify="left" if heading == "kernel" else "right")


def _nanoseconds(timing: Timing) -> str:
    per_coordinate = timing.seconds / timing.coordinates * 1e9
    return f"{per_coordinate:.3f}"


def _number_or_nothing(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _write(timings: list[Timing], out: Path) -> None:
    report = {
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {
            "signvote": __version__,
            "torch": torch.__version__,
            "numba": version("numba"),
        },
        "timings": [asdict(timing) for timing in timings],
    }
    text = json.dumps(report, indent=1)
    write_atomically(out, text.encode())


def _processor() -> str:
    """The name of the processor, if the system shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
