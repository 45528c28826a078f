"""Every test and doctest starts with the same seed.

Doctests are collected from every module but those that only some machines can import, or that do things then.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = ["tests/warm.py", "tests/flower_apps/*.py"]
if not find_spec("triton"):
    collect_ignore_glob += ["src/signvote/kernels/cuda*.py", "src/signvote/sim/joint/*_cuda.py"]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed PyTorch; put its number of threads back."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
