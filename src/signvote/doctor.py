"""What is installed, which kernels run here and how fast, what is missing: `signvote doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from signvote import bench
from signvote.kernels import backend_name, has_triton
from signvote.sim.machine import versions
from signvote.tasks.download import OFFICIAL, verify
from signvote.tasks.files import data_folder

EXTRAS = {  # package -> what it is for, what brings it
    "tensorboard": ("train --tensorboard", "signvote[tensorboard]"),
    "flwr": ("federated training over Flower", "signvote[flower]"),
    "ray": ("Flower's simulation on one machine", "signvote[flower]"),
}
SPELT = {"cpu": "numba", "cuda": "Triton", "reference": "plain torch"}
QUICK = {"cpu": 2_000_000, "reference": 50_000}  # coordinates that are timed in seconds
WORKERS = 15


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the answer."""

    what: str
    text: str
    good: bool | None = True  # None: just so; False: missing, and the text says what to do


def findings(data_dir: Path | None = None) -> Iterator[Finding]:
    """All of them, in the order of what one needs first."""
    yield Finding(what="versions", text=", ".join(f"{name} {v}" for name, v in versions().items()))
    yield from _kernels()
    yield from _gpu()
    yield from map(_extra, EXTRAS)
    folder = data_folder(data_dir)
    yield from (_data(name, folder) for name in OFFICIAL)
    backends = [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)]
    yield Finding(what="torch.distributed", text=", ".join(backends) or "none", good=bool(backends))


def _kernels() -> Iterator[Finding]:
    forced = os.environ.get("SIGNVOTE_KERNELS")
    why = f", as SIGNVOTE_KERNELS={forced} says" if forced else ""
    kind = backend_name("cpu")
    yield Finding(what="kernels on the CPU", text=SPELT[kind] + why)
    threads = torch.get_num_threads()
    try:
        timings = bench.time_case(QUICK[kind], WORKERS, threads=1, repeats=3, textbook=False)
    finally:
        torch.set_num_threads(threads)
    speeds = ", ".join(f"{t.kernel} {t.copies:.2f}" for t in timings if t.kernel in bench.TARGETS)
    size = f"{QUICK[kind]:,} coordinates, {WORKERS} workers, one thread"
    yield Finding(what="speed", text=f"{speeds} (copies of the float32 vector; {size}; lower is better)")


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(what="GPU", text=f"none that this PyTorch, {torch.__version__}, can use", good=None)
        return
    for i in range(torch.cuda.device_count()):
        missing = "" if has_triton() else "; pip install triton for faster ones"
        label = f"cuda:{i}, {torch.cuda.get_device_name(i)}"
        yield Finding(
            what=label, text=f"kernels in {SPELT[backend_name(f'cuda:{i}')]}{missing}", good=has_triton()
        )


def _extra(package: str) -> Finding:
    purpose, extra = EXTRAS[package]
    try:
        return Finding(what=package, text=f"{version(package)}, for {purpose}")
    except PackageNotFoundError:
        return Finding(what=package, text=f"needed for {purpose}: pip install '{extra}'", good=False)


def _data(name: str, folder: Path) -> Finding:
    states = verify(name, folder)
    if not states:
        return Finding(what=name, text="comes with signvote")
    wrong = {file: state for file, state in states.items() if state != "ok"}
    if not wrong:
        return Finding(
            what=name,
            text=f"{len(states)} files in {folder}, sizes right, and checksums where they are published",
        )
    file, state = next(iter(wrong.items()))
    also = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return Finding(what=name, text=f"{file} {state}{also}: signvote data {name}, or --data-dir", good=False)


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_available() and bool(getattr(dist, f"is_{name}_available")())
