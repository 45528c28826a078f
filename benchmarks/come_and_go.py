"""A million workers, of which a thousand vote in each round: do memory and the time of a round stay flat?

    nice python -m benchmarks.come_and_go                    # a quarter of an hour on one core

10,000 rounds of the default rule on 64 coordinates. In each round 100 workers are new and 100 have left for good, so
that a worker votes in 10 rounds. Prints, for each 1,000 rounds, the workers that came by, those that the server knows,
processor seconds a round of the server, and the memory of the process; of what glibc manages of it, how much is in use,
and how much was freed but not given back. With MALLOC_MMAP_THRESHOLD_=131072 in the environment, glibc gives it back.
Writes benchmarks/scale/come_and_go.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
import zlib
from pathlib import Path

import numpy as np

from signvote import Layout, Server
from signvote.core.header import HEADER, MAGIC, VERSION, Kind

OUT = Path(__file__).parent / "scale" / "come_and_go.json"
LAYOUT = Layout([("w", (64,))])
VOTERS, NEW = 1_000, 100


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def managed() -> tuple[float, float]:
    """MiB that this process uses of the memory that glibc manages, and MiB that it has freed and glibc keeps."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Mallinfo
    found = library.mallinfo2()
    return (found.uordblks + found.hblkhd) / 2**20, found.fordblks / 2**20


def message(worker: int, round: int, bits: bytes) -> bytes:
    """A ballot, made in as little time as possible: a fraction of what the server needs to read it."""
    fields = (MAGIC, VERSION, Kind.DENSE, 0, 0, 0, LAYOUT.digest, worker, round, 64, 4 + worker % 3)
    checksum = zlib.crc32(bits, zlib.crc32(HEADER.pack(*fields, 0)))
    return HEADER.pack(*fields, checksum) + bits


def ballots(round: int, random: np.random.Generator) -> dict[int, bytes]:
    """Signs that most workers agree on, and noise."""
    noise = random.integers(0, 2**64, (2, VOTERS), np.uint64)
    packed = (noise[0] & noise[1]).tobytes()  # a quarter of the votes is against the decision
    first = NEW * (round - 1)
    return {first + i: message(first + i, round, packed[8 * i : 8 * i + 8]) for i in range(VOTERS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    server, random = Server(LAYOUT), np.random.default_rng(0)
    rows = []
    seconds = 0.0
    each = options.rounds // 10
    print(
        "| rounds | workers that came by | known | ms a round | MiB | in use | free |\n|---|---|---|---|---|---|---|"
    )
    for t in range(1, options.rounds + 1):
        sent = ballots(t, random)
        start = time.process_time()
        server.decide(t, sent)
        seconds += time.process_time() - start
        if t % each == 0:
            gc.collect()
            known = len(server.rule.trust.workers)  # type: ignore[union-attr]
            came = VOTERS + NEW * (t - 1)
            sizes = (resident(), *managed())
            rows.append((t, came, known, 1000 * seconds / each, *sizes))
            in_mib = " | ".join(f"{size:.0f}" for size in sizes)
            print(f"| {t:,} | {came:,} | {known:,} | {rows[-1][3]:.0f} | {in_mib} |", flush=True)
            seconds = 0.0
    options.out.parent.mkdir(exist_ok=True)
    names = ("rounds", "workers", "known", "milliseconds", "mebibytes", "mebibytes in use", "mebibytes free")
    options.out.write_text(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))


if __name__ == "__main__":
    main()
