from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from signvote.kernels import Backend, reference
from signvote.tasks import Task, load_task

settings.register_profile(
    "signvote", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("signvote")

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
    """Slow tests go first, so that no core waits for the last of them, and untraced, which would double their time.

    So the quick ones have to cover the core.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")
