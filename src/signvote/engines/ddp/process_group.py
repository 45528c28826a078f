"""A process group of our own, whose errors report what is known about every rank; and a world of one without it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.engines.ddp.account import account, local_addresses, plain
from signvote.engines.ddp.torch_names import Store, store_of
from signvote.errors import ConfigError, EngineError

GRACE = 5.0  # seconds in which the other ranks can report that they are alive


class Alone:
    """A world of one: it has the methods of a ProcessGroup, and moves nothing.

    Args:
        device: the device of the gradients.

    """

    rank = 0
    ranks: Sequence[int] = (0,)
    world = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stage = ""

    def connect(self) -> None:
        """There is nobody to connect to."""

    def all_gather(self, mine: Tensor) -> Tensor:
        """This rank's tensor, as the only row. It stays on its device."""
        return mine[None]

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """The only row stays here."""
        received.copy_(sent)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """The tensor stays as it is."""


class ProcessGroup:
    """The ranks that vote, in a group of their own, so that other collectives cannot come between ours.

    Args:
        ranks: their ranks in the world; None: all.
        device: the device of the gradients.
        timeout: seconds to wait for a rank.

    """

    def __init__(self, ranks: Sequence[int] | None, device: torch.device, timeout: float) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout}; it must be above 0 seconds")
        self.timeout = timeout
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.world = len(self.ranks)
        uses_nccl = device.type == "cuda" and "nccl" in dist.get_backend()
        self.device = device if uses_nccl else torch.device("cpu")  # of all tensors that are sent
        self.stage = "the first round"  # named in errors
        self._is_all = ranks is None
        self._group: dist.ProcessGroup | None = None
        self._connected: Store | None = None

    def connect(self) -> None:
        """Make the group, if it is not made yet. Every rank of it calls this at the same point."""
        if self._group is None:
            self._group = _new_group(None if self._is_all else self.ranks, self.timeout)
            self._connected = store_of(self._group)
            self._store.set(self._key("addresses", self.rank), json.dumps(local_addresses()))

    @property
    def _store(self) -> Store:
        """The store by which the ranks found each other."""
        assert self._connected is not None  # `connect` is called before anything is sent
        return self._connected

    def all_gather(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks, stacked by rank."""
        sent = mine.to(self.device)
        gathered = torch.empty(self.world, *sent.shape, dtype=sent.dtype, device=sent.device)
        rows = list(gathered.unbind(0))
        with self._named():
            dist.all_gather(rows, sent, group=self._group)
        return gathered

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send row r to rank r; receive row r from rank r."""
        with self._named():
            dist.all_to_all_single(received, sent, group=self._group)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor with that of one rank, given by its place in the group."""
        with self._named():
            dist.broadcast(tensor, self.ranks[source], group=self._group)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch.distributed, which seldom names a rank
            raise EngineError(self._account(plain(str(error)))) from error

    def _account(self, error: str) -> str:
        """Describe a failed exchange: the error, the ranks that are alive, the ranks without a report.

        Every rank that is alive gets an error too, and reports it in the store. A rank that has not reported
        is not called dead: it may still be computing.
        """
        failed = f"{self.stage} failed on rank {self.ranks[self.rank]}: {error}"
        try:
            reports = self._reports(error)
        except RuntimeError:
            return f"{failed}. The store cannot be reached: the process that keeps it is gone"
        return account(self.stage, self.rank, reports, self.ranks, self._addresses())

    def _reports(self, error: str) -> dict[int, str]:
        """Report this rank's error, and wait a while for the reports of the others: rank -> its error."""
        keys = [self._key(self.stage, r) for r in range(self.world)]
        self._store.set(keys[self.rank], error)
        deadline = time.monotonic() + min(GRACE, self.timeout)
        reported: list[int] = []
        while len(reported) < self.world:
            reported = [r for r in range(self.world) if self._store.check([keys[r]])]
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return {r: self._store.get(keys[r]).decode() for r in reported}

    def _addresses(self) -> dict[int, list[str]]:
        """The addresses of each rank's machine."""
        keys = {r: self._key("addresses", r) for r in range(self.world)}
        return {r: json.loads(self._store.get(key)) for r, key in keys.items() if self._store.check([key])}

    def _key(self, what: str, rank: int) -> str:
        """Where a rank leaves something in the store."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store
        return f"signvote/{attempt}/{what}/{rank}"


Group = ProcessGroup | Alone


def check_ready() -> None:
    """Raise unless torch.distributed is ready."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not ready; call init_process_group before (see torchrun)")


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """The ranks of a group, None for all."""
    return None if group is None else dist.get_process_group_ranks(group)


def _new_group(ranks: list[int] | None, timeout: float) -> dist.ProcessGroup:
    """A new group of these ranks, each of which calls this; None: all ranks."""
    wait = timedelta(seconds=timeout)
    group: dist.ProcessGroup
    if ranks is None:
        group = dist.new_group(timeout=wait)
    else:
        group = dist.new_group(ranks, timeout=wait, use_local_synchronization=True)
    return group
