"""The names of torch that it does not export explicitly, or does not document: all in one place.

`tests/test_ddp_alone.py` looks for each of them, and says which one a version of torch lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import Store  # type: ignore[attr-defined]

NAMES = (
    "distributed.GradBucket",
    "distributed.Store",
    "distributed.ProcessGroup.get_group_store",
    "autograd.Variable._execution_engine.queue_callback",
)


def store_of(group: dist.ProcessGroup) -> Store:
    """The store by which the ranks of a group found each other; in an old torch that of all ranks."""
    if not hasattr(group, "get_group_store"):
        return dist.distributed_c10d._get_default_store()
    return group.get_group_store()


def after_backward(act: Callable[[], None]) -> None:
    """For a hook of DDP: call a function when the backward pass ends, after DDP has written the gradients."""
    engine = torch.autograd.Variable._execution_engine

    def later() -> None:
        engine.queue_callback(act)

    engine.queue_callback(later)  # DDP's own callback is queued between the two
