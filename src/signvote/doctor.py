"""`signvote doctor`: installed versions, the kernels and their speed, missing packages and data."""

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

EXTRAS = {  # package -> its purpose, the extra that installs it
    "tensorboard": ("train --tensorboard", "signvote[tensorboard]"),
    "wandb": ("train --wandb", "signvote[wandb]"),
    "mlflow-skinny": ("train --mlflow", "signvote[mlflow]"),
    "flwr": ("federated training over Flower", "signvote[flower]"),
    "ray": ("Flower's simulation on one machine", "signvote[flower]"),
}
BACKENDS = {
    "cpu": "numba",
    "cuda": "Triton",
    "reference": "plain torch",
}
QUICK = {"cpu": 2_000_000, "reference": 50_000}  # coordinates that take seconds to time
WORKERS = 15


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the output."""

    what: str
    text: str
    good: bool | None = True  # None: neutral; False: missing, and the text gives the remedy


def findings(data_dir: Path | None = None) -> Iterator[Finding]:
    """All findings, the most needed first."""
    installed = [f"{name} {number}" for name, number in versions().items()]
    yield Finding(what="versions", text=", ".join(installed))
    yield from _kernels()
    yield from _gpus()
    for package in EXTRAS:
        yield _extra(package)
    folder = data_folder(data_dir)
    for name in OFFICIAL:
        yield _data(name, folder)
    yield _distributed()


def _kernels() -> Iterator[Finding]:
    forced = os.environ.get("SIGNVOTE_KERNELS")
    why = f", as SIGNVOTE_KERNELS={forced} says" if forced else ""
    kind = backend_name("cpu")
    yield Finding(what="kernels on the CPU", text=BACKENDS[kind] + why)
    yield _speed(kind)


def _speed(kind: str) -> Finding:
    threads = torch.get_num_threads()
    try:
        timings = bench.time_case(
            QUICK[kind],
            WORKERS,
            threads=1,
            repeats=3,
            textbook=False,
        )
    finally:
        torch.set_num_threads(threads)
    targeted = [timing for timing in timings if timing.kernel in bench.TARGETS]
    speeds = [f"{timing.kernel} {timing.copies:.2f}" for timing in targeted]
    size = f"{QUICK[kind]:,} coordinates, {WORKERS} workers, one thread"
    unit = f"copies of the float32 vector; {size}; lower is better"
    return Finding(what="speed", text=f"{', '.join(speeds)} ({unit})")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(what="GPU", text=f"none that this PyTorch, {torch.__version__}, can use", good=None)
        return
    missing = "" if has_triton() else "; pip install triton for faster ones"
    for i in range(torch.cuda.device_count()):
        kind = backend_name(f"cuda:{i}")
        yield Finding(
            what=f"cuda:{i}, {torch.cuda.get_device_name(i)}",
            text=f"kernels in {BACKENDS[kind]}{missing}",
            good=has_triton(),
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
        return Finding(what=name, text="needs no download")
    wrong = [f"{file} {state}" for file, state in states.items() if state != "ok"]
    if not wrong:
        return Finding(
            what=name,
            text=f"{len(states)} files in {folder} with the right sizes, and checksums where published",
        )
    also = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return Finding(
        what=name,
        text=f"{wrong[0]}{also}: signvote data {name}, or --data-dir",
        good=False,
    )


def _distributed() -> Finding:
    backends = [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)]
    return Finding(
        what="torch.distributed",
        text=", ".join(backends) or "none",
        good=bool(backends),
    )


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    if not dist.is_available():
        return False
    is_available = getattr(dist, f"is_{name}_available")
    return bool(is_available())
