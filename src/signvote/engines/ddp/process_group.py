"""A process group of our own, whose errors report what is known about every rank; and a world of one without it."""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.engines.ddp.account import account, local_addresses, plain
from signvote.engines.ddp.torch_names import Store, store_of
from signvote.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from signvote.engines.ddp.view_group import ViewGroup  # which needs gloo

GRACE = 5.0  # seconds in which the other ranks can report that they are alive
TURN = 2**16  # bytes that travel to one rank before it is another's turn, at most
SHORTEST = 2**14  # bytes of a turn, at least
AT_ONCE = 0.025  # seconds of a turn, within these bounds


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

    def swap(self, letters: Sequence[bytes]) -> list[bytes]:
        """The only letter stays here."""
        return list(letters)

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
        if ranks is None:
            ranks = range(dist.get_world_size())
        self.ranks = list(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.world = len(self.ranks)
        uses_nccl = device.type == "cuda" and "nccl" in dist.get_backend()
        self.device = device if uses_nccl else torch.device("cpu")  # of all tensors that are sent
        self.stage = "the first round"  # named in errors
        self.turn = (
            0  # bytes to one rank before it is another's turn, the same on all ranks; 0: to all at once
        )
        self._is_all = ranks is None
        self._group: dist.ProcessGroup | None = None
        self._connected: Store | None = None

    def connect(self) -> None:
        """Make the group, if it is not made yet. Every rank of it calls this at the same point."""
        if self._group is None:
            self._group = _new_group(None if self._is_all else self.ranks, self.timeout)
            self._connected = store_of(self._group)
            if self.device.type == "cpu":
                atexit.register(_end, weakref.ref(self._group), weakref.ref(self))
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
            dist.all_gather(rows, sent, group=self._group)  # a ring, in which no two send to one
        return gathered

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send row r to rank r; receive row r from rank r."""
        with self._named():
            if self.turn:
                self._rotate(list(received), list(sent))
            else:
                dist.all_to_all_single(received, sent, group=self._group)

    def swap(self, letters: Sequence[bytes]) -> list[bytes]:
        """Send letter r to rank r; return the letters of all ranks. Their lengths travel first."""
        going = [len(letter) for letter in letters]
        lengths = torch.tensor(going, device=self.device)
        coming = torch.empty_like(lengths)
        self.all_to_all(coming, lengths)
        content = bytearray(b"".join(letters))
        sent = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        sizes = coming.tolist()
        received = sent.new_empty(sum(sizes))
        with self._named():
            if self.turn:
                self._rotate(torch.split(received, sizes), torch.split(sent, going))
            else:
                dist.all_to_all_single(received, sent, sizes, going, group=self._group)
        arrived = torch.split(received.cpu(), sizes)
        return [letter.numpy().tobytes() for letter in arrived]

    def _rotate(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Send to one rank at a time while receiving from one; the ranks change after TURN bytes.

        If several send to one rank over a slow link, packets are lost and sent again. Short turns keep all in step.
        """
        received[self.rank].copy_(sent[self.rank])
        taken = [_pieces(row, self.turn) for row in received]
        given = [_pieces(row, self.turn) for row in sent]
        turns = max(map(len, (*taken, *given)))
        for turn, distance in product(range(turns), range(1, self.world)):
            source = (self.rank - distance) % self.world
            target = (self.rank + distance) % self.world
            flying = []
            if turn < len(taken[source]):
                place = taken[source][turn]
                flying.append(dist.irecv(place, self.ranks[source], self._group))
            if turn < len(given[target]):
                piece = given[target][turn]
                flying.append(dist.isend(piece, self.ranks[target], self._group))
            for work in flying:
                assert work is not None  # this rank is in the group
                work.wait()

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
        found = {}
        for r in range(self.world):
            key = self._key("addresses", r)
            if self._store.check([key]):
                found[r] = json.loads(self._store.get(key))
        return found

    def _key(self, what: str, rank: int) -> str:
        """Where a rank leaves something in the store."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store
        return f"signvote/{attempt}/{what}/{rank}"


Group: TypeAlias = "ProcessGroup | Alone | ViewGroup"


def check_ready() -> None:
    """Raise unless torch.distributed is ready."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not ready; call init_process_group before (see torchrun)")


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """The ranks of a group, None for all."""
    return None if group is None else dist.get_process_group_ranks(group)


def turn_of(seconds: float) -> int:
    """Bytes of a turn on a link that takes so many seconds for TURN bytes: what travels in 25 ms.

    >>> turn_of(0.02), turn_of(0.05), turn_of(0.5)
    (65536, 32768, 16384)
    """
    bytes_at_once = int(TURN * AT_ONCE / max(seconds, 1e-9))
    return max(SHORTEST, min(TURN, bytes_at_once))


def _pieces(row: Tensor, size: int) -> list[Tensor]:
    """The bytes of a row, in pieces of this size; none if it is empty."""
    data = row.view(-1).view(torch.uint8)
    return list(torch.split(data, size)) if len(data) else []


def _end(made: weakref.ref[dist.ProcessGroup], by: weakref.ref[ProcessGroup]) -> None:
    """Drop a group of gloo, which joins its threads, while Python can still serve them.

    A thread of gloo frees the tensors of a collective a moment after the caller has the result, and needs Python for
    that. A process that exits in this moment is aborted (pytorch/pytorch#179291). A group is not dropped before the
    exit: torch would give its name to the next one, and others might still find the old addresses under it.
    """
    owner = by()
    group = made()
    if owner is not None:
        owner._group = None
    if group is not None:
        with suppress(AssertionError, ValueError):  # the script may have destroyed it, or all groups
            dist.destroy_process_group(group)


def _new_group(ranks: list[int] | None, timeout: float) -> dist.ProcessGroup:
    """A new group of these ranks, each of which calls this; None: all ranks."""
    wait = timedelta(seconds=timeout)
    group: dist.ProcessGroup
    if ranks is None:
        group = dist.new_group(timeout=wait)
    else:
        group = dist.new_group(ranks, timeout=wait, use_local_synchronization=True)
    return group
