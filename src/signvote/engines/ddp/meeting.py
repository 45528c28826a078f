"""Collectives whose errors say what is known of every rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.errors import ConfigError, EngineError

GRACE = 5.0  # seconds that the other ranks have to report themselves alive


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
        except RuntimeError as error:  # of torch.distributed, which seldom names a rank
            raise EngineError(self._account(_plain(str(error)))) from error

    def _account(self, error: str) -> str:
        """Describe a failed exchange by what is known: the error, the ranks alive, the ranks not heard from.

        Every rank that is alive gets an error too, and reports it in the store. A rank that has not reported
        is not called dead: it may still be computing.
        """
        failed = f"{self.stage} failed on rank {self.ranks[self.rank]}: {error}"
        try:
            reports = self._reports(error)
        except RuntimeError:
            return f"{failed}. The store cannot be reached: the process that keeps it is gone"
        silent = [r for r in range(self.world) if r not in reports]
        others = "; ".join(
            f"rank {self.ranks[r]} is alive and reports: {text}"
            for r, text in reports.items()
            if r != self.rank
        )
        parts = [failed, others]
        if silent:
            names = ", ".join(str(self.ranks[r]) for r in silent)
            parts.append(f"no report from rank {names}: dead, cut off, or still computing")
        return ". ".join(part for part in parts if part)

    def _reports(self, error: str) -> dict[int, str]:
        """Report this rank's error, and wait a while for the reports of the others: rank -> its error."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store
        keys = [f"signvote/{attempt}/{self.stage}/{r}" for r in range(self.world)]
        store = dist.distributed_c10d._get_default_store()
        store.set(keys[self.rank], error)
        deadline = time.monotonic() + min(GRACE, self.timeout)
        reported: list[int] = []
        while len(reported) < self.world:
            reported = [r for r in range(self.world) if store.check([keys[r]])]
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return {r: store.get(keys[r]).decode() for r in reported}


def _plain(error: str) -> str:
    """Gloo's error without its source file and its advice: `Connection closed by peer [10.0.0.7]:29500`."""
    text = re.sub(r"^\[\S+:\d+\] ", "", error.strip())
    return text.partition(". This is typically caused by")[0].rstrip(".")
