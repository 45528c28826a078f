"""Every test and doctest starts with the same seed.

Doctests are collected from every module but those that only some machines can import, or that do things then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

LARGE = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "numba", "hypothesis", "matplotlib.figure")


def load_large() -> None:
    """Import large packages where they are installed; tracing their lines for coverage would take as long again."""
    trace = sys.gettrace()
    sys.settrace(None)
    for name in LARGE:
        if find_spec(name.partition(".")[0]):
            import_module(name)
    sys.settrace(trace)


load_large()

collect_ignore_glob = ["tests/warm.py", "tests/flower_apps/*.py"]
if not find_spec("triton"):
    collect_ignore_glob += ["src/signvote/kernels/cuda*.py", "src/signvote/sim/joint/*_cuda.py"]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed PyTorch; put its number of threads back."""
    import torch

    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
