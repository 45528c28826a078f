"""The arguments of `Vote` that may be wrong or contradict each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from signvote.engines.ddp.balance import Balancer
from signvote.errors import ConfigError


def check_members(worker_id: int | None, group: dist.ProcessGroup | None, balancer: Balancer | None) -> None:
    """Raise for arguments that contradict `members`."""
    if worker_id is not None:
        raise ConfigError("with members, the worker id is that of Members(worker_id=...)")
    if group is not None:
        raise ConfigError("members makes its own groups; leave group out")
    if balancer is not None:
        raise ConfigError("members does not support a balancer")


def check_group(group: dict[str, Any]) -> None:
    """Raise for settings out of range."""
    if not float(group["lr"]) >= 0:
        raise ConfigError(f"lr is {group['lr']}; it must be 0 or more")
    if not 0 <= group["momentum"] < 1:
        raise ConfigError(f"momentum is {group['momentum']}; it must lie in [0, 1)")
    if not group["weight_decay"] >= 0:
        raise ConfigError(f"weight_decay is {group['weight_decay']}; it must be 0 or more")
