from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from signvote.kernels import Backend, reference
from signvote.tasks import Task, load_task

common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", common, derandomize=True, max_examples=40)  # the same ones every time
settings.register_profile("soak", common, max_examples=2000)  # others every time
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

BACKENDS: dict[str, Backend] = {"reference": reference}
if find_spec("numba"):  # a machine with nothing but PyTorch can still run the tests of its GPU
    from signvote.kernels import cpu

    BACKENDS["cpu"] = cpu


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def digits() -> Task:
    return load_task("mnist-10k", model="mlp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go first, so that no core waits for the last of them.

    They are not traced for coverage, which would slow them down further.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")
