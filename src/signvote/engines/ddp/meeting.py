"""Collectives of our own, which name who did not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from signvote.errors import ConfigError, EngineError

GRACE = 5.0  # seconds that the others have to say that they are alive, too


class Meeting:
    """A group of ranks for us alone, so that nobody else's collectives come between ours.

    Args:
        group: whose ranks; None: all.
        device: where the gradients are.
        timeout: seconds that a rank is waited for.

    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not ready; call init_process_group before (see torchrun)")
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout}; it must be above 0 seconds")
        self.timeout, self.ranks = timeout, dist.get_process_group_ranks(group or dist.group.WORLD)
        wait = timedelta(seconds=timeout)
        if group is None:
            self.group = dist.new_group(timeout=wait)
        else:
            self.group = dist.new_group(self.ranks, timeout=wait, use_local_synchronization=True)
        self.rank, self.world = dist.get_rank(self.group), len(self.ranks)
        over_nccl = device.type == "cuda" and "nccl" in dist.get_backend(self.group)
        self.device = device if over_nccl else torch.device("cpu")  # where what is sent must be
        self.stage = "the first round"  # for errors

    def all_gather(self, mine: Tensor) -> Tensor:
        """What everybody has, stacked by rank."""
        everybody = torch.empty(self.world, *mine.shape, dtype=mine.dtype, device=mine.device)
        with self._named():
            dist.all_gather(list(everybody.unbind(0)), mine, group=self.group)
        return everybody

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Row r goes to rank r; row r comes from rank r."""
        with self._named():
            dist.all_to_all_single(received, sent, group=self.group)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch.distributed; it seldom says who
            raise EngineError(f"{self._missing()} ({error})") from error

    def _missing(self) -> str:
        """Who did not come: whoever is alive gets the same error and says so in the store."""
        try:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store
            name = f"signvote/{attempt}/{self.stage}"
            store = PrefixStore(name, dist.distributed_c10d._get_default_store())
            store.set(str(self.rank), "here")
            deadline = time.monotonic() + min(GRACE, self.timeout)
            while True:
                lost = [r for r in range(self.world) if not store.check([str(r)])]
                if not lost or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:
            return (
                f"in {self.stage} the connection to the others broke: whoever keeps torchrun's store is gone"
            )
        if not lost:
            return f"in {self.stage} a connection broke, though every rank is alive"
        who = ", ".join(str(self.ranks[r]) for r in lost)
        return f"rank {who} did not come to {self.stage} within {self.timeout:g} s, or died in it"
