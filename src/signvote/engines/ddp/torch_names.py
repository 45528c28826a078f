"""The names of torch.distributed that it does not export explicitly, or does not document: all in one place.

`tests/test_ddp_alone.py` looks for each of them, and says which one a version of torch lacks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import Store  # type: ignore[attr-defined]

NAMES = ("GradBucket", "Store", "ProcessGroup.get_group_store")


def store_of(group: dist.ProcessGroup) -> Store:
    """The store by which the ranks of a group found each other; in an old torch that of all ranks."""
    if not hasattr(group, "get_group_store"):
        return dist.distributed_c10d._get_default_store()
    return group.get_group_store()
