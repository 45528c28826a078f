"""A round of a model that memory holds only in part: how much memory and time, beside copying the same bytes?

    nice python -m benchmarks.billion                                        # a minute: 20 million, 4 workers
    nice python -m benchmarks.billion --coordinates 1_000_000_000 --workers 16

Gradient, parameters, ballots and decision are files that are mapped into memory. One worker packs its gradient and
writes its ballot. The other ballots are its ballot with a quarter of the signs inverted. The server reads them in
place, decides by the default rule and writes the decision, which the worker applies to its parameters.

For each part the table has its seconds, those of copying the same bytes through a small buffer, the most memory that it
adds to the process, without the pages of mapped files, which the system drops and reads again as it likes, and the
bytes copied. The files need 8 bytes a coordinate, and a bit for each ballot. Writes benchmarks/scale/billion.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from signvote import Layout, Server, Worker
from signvote.checkpoint import save
from signvote.core.ballot import parse

OUT = Path(__file__).parent / "scale" / "billion.json"
RANGE = 2**22  # coordinates that are written, or bytes that are copied, at a time
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part of the round took."""

    part: str
    seconds: float
    copy_seconds: float
    bytes_moved: int
    anonymous_bytes: int


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


class Peak:
    """The most anonymous memory that is added inside a `with` block, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, anonymous())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.added = max(self.most, anonymous()) - self.before


def measured(name: str, work: Callable[[], object], copy: Callable[[], int]) -> Part:
    """Time a part, and a copy after it, when the files are as warm as they were for the part."""
    copy()
    with Peak() as peak:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    start = time.perf_counter()
    moved = copy()
    copy_seconds = time.perf_counter() - start
    part = Part(
        part=name,
        seconds=seconds,
        copy_seconds=copy_seconds,
        bytes_moved=moved,
        anonymous_bytes=peak.added,
    )
    row = (f"{seconds:.2f}", f"{copy_seconds:.2f}", f"{peak.added / MIB:.0f}", f"{moved / MIB:.0f}")
    print(f"| {name} | {' | '.join(row)} |", flush=True)
    return part


def vector(path: Path, n: int, *, random: bool) -> Tensor:
    """A float32 vector in a file, mapped."""
    mapped: Tensor = torch.from_file(str(path), shared=True, size=n, dtype=torch.float32)
    if random:
        generator = torch.Generator().manual_seed(0)
        for first in range(0, n, RANGE):
            mapped[first : first + RANGE].uniform_(-1, 1, generator=generator)
    return mapped


def in_place(path: Path) -> memoryview:
    """The bytes of a file, mapped."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def copied(*sources: Tensor | Path, back: bool = False) -> int:
    """Copy vectors and files through a buffer, range by range, and `back` to where they were; the bytes moved."""
    moved = 0
    for source in sources:
        for part in _parts(source):
            buffer = part.clone()
            if back:
                part.copy_(buffer)
            moved += part.nbytes * (2 if back else 1)
    return moved


def _parts(source: Tensor | Path) -> Iterator[Tensor]:
    if isinstance(source, Path):
        size = source.stat().st_size
        source = torch.from_file(str(source), shared=False, size=size, dtype=torch.uint8)
    yield from torch.split(source, RANGE)


def write_others(ballot: Path, layout: Layout, workers: int) -> list[Path]:
    """The ballots of all workers. Those of others are the first worker's, with noise."""
    paths = [ballot.with_name(f"ballot-{m}") for m in range(workers)]
    first = parse(in_place(ballot), layout=layout, run=0)
    random = np.random.default_rng(0)
    for m in range(1, workers):
        signs = first.signs.copy()
        for start in range(0, len(signs) - 1, RANGE):  # the last byte may be filled in part
            some = signs[start : min(start + RANGE, len(signs) - 1)]
            noise = random.integers(0, 256, (2, len(some)), np.uint8)
            some ^= noise[0] & noise[1]
        with paths[m].open("wb") as file:
            file.writelines(replace(first, worker=m, signs=signs).buffers())
    return paths


def measure(n: int, workers: int, folder: Path) -> list[Part]:
    """One round."""
    x = vector(folder / "parameters", n, random=False)
    gradient = vector(folder / "gradient", n, random=True)
    x.grad = gradient
    worker = Worker({"x": x}, worker_id=0)
    ballot = folder / "ballot-0"
    decided = folder / "decision"

    def pack() -> None:
        ballot.write_bytes(worker.ballot(round=1))

    parts = [measured("pack and write a ballot", pack, lambda: copied(gradient))]
    paths = write_others(ballot, worker.layout, workers)
    server = Server(worker.layout)

    def vote() -> None:
        ballots = {m: in_place(path) for m, path in enumerate(paths)}
        decided.write_bytes(server.decide(1, ballots))

    parts.append(measured("vote and write the decision", vote, lambda: copied(*paths)))
    parts.append(
        measured("apply", lambda: worker.apply(in_place(decided), step=1e-3), lambda: copied(x, back=True))
    )
    trust = folder / "trust"
    save(trust, server.state_dict())
    print(f"\nThe checkpoint of trust has {trust.stat().st_size:,} bytes.")
    assert server.report.voters == tuple(range(workers))
    return parts


def warm_up() -> None:
    """A round of a small model, so that nothing is compiled while the clock runs."""
    x = torch.zeros(2**16)
    x.grad = torch.ones(2**16)
    worker = Worker({"x": x}, worker_id=0)
    decision = Server(worker.layout).decide(1, {0: worker.ballot(round=1)})
    worker.apply(decision, step=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--coordinates", type=int, default=20_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, help="where the files go; default: the system's temporary folder"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    print(f"N = {options.coordinates:,}, M = {options.workers}, {torch.get_num_threads()} threads\n")
    print("| part | seconds | of a copy | MiB of its own | MiB moved |\n|---|---|---|---|---|")
    warm_up()
    with TemporaryDirectory(dir=options.folder) as folder:
        parts = measure(options.coordinates, options.workers, Path(folder))
    report = {
        "coordinates": options.coordinates,
        "workers": options.workers,
        "threads": torch.get_num_threads(),
        "parts": [asdict(part) for part in parts],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
