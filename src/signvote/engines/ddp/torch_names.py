"""The parts of torch.distributed that its documentation does not show, all in one place.

`tests/test_ddp_alone.py` looks for each of them, and names the one that a version of torch lacks.
"""

from __future__ import annotations

import torch.distributed as dist

NAMES = ("GradBucket", "ProcessGroup.get_group_store")  # in torch.distributed; `hooks.py` uses the first


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store by which the ranks of a group found each other; for an old torch that of all ranks."""
    if not hasattr(group, "get_group_store"):
        return dist.distributed_c10d._get_default_store()
    return group.get_group_store()
