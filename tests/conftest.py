from __future__ import annotations

import gc
import multiprocessing
import os
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import Any

import pytest
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


@pytest.fixture(autouse=True, scope="session")
def forks(request: pytest.FixtureRequest) -> None:
    """One process from which ranks and runs are forked: the first that asks would load only what it needs itself."""
    if hasattr(request.config, "workerinput"):
        multiprocessing.set_forkserver_preload(["tests.warm", "signvote.sim.compare"])
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def digits() -> Task:
    return load_task("mnist-10k", model="mlp")


TOGETHER = {
    "ranks": (
        *(
            "test_ddp",
            "test_ddp_drift",
            "test_ddp_faults",
            "test_ddp_models",
            "test_ddp_overlap",
            "test_ddp_saving",
        ),
        *("test_ddp_sizes", "test_optimizer_ranks", "test_sharded", "test_sharded_saving"),
    ),  # ranks are forked from one process, which has loaded what they need; `answers` is asked for once
    "scripts": ("test_scripts", "test_extend", "test_tasks_page", "test_tables"),  # so are they
    "apps": ("test_apps",),
    "flower": ("test_flower_simulation",),
    "metrics": ("test_metrics",),
    "release": ("test_release",),
}  # files whose tests one worker of pytest runs, one after the other
GROUP_OF = {f"tests/{name}.py": group for group, names in TOGETHER.items() for name in names}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test goes to the next worker that is free, in the order below; a group goes to one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return GROUP_OF.get(nodeid.split("::")[0], nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go first, so that no core waits for the last of them.

    They are not traced for coverage, which would slow them down further.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Objects of before stay: the collector need not search them again, nor `Vote`, which searches for modules."""
    gc.collect()
    gc.freeze()
