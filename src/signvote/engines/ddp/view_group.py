"""A process group of gloo for one view. It finds the members through their registers, and needs no other process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.engines.ddp.account import plain
from signvote.engines.ddp.members import Clock, Person
from signvote.engines.ddp.membership import POLL, Membership
from signvote.engines.ddp.registers import UNREACHABLE, ask
from signvote.engines.ddp.torch_names import Store
from signvote.errors import EngineError

Gloo: Any = dist.ProcessGroupGloo


class Lost(EngineError):
    """An exchange failed: a member is gone, the view is over, or a message is damaged. The round is tried again."""


class Meeting(Store):
    """Where the members of a view leave their addresses for gloo: each in its own registers.

    Args:
        membership: of this worker.

    """

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self._membership = membership
        self._view = membership.view
        self._found: dict[str, bytes] = {}

    def _key(self, key: str) -> str:
        return f"group/{self._view.epoch}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Leave something for the others."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._found[key] = data
        self._membership.registers.put(self._key(key), data.hex())

    def get(self, key: str) -> bytes:
        """What a member has left; waits for it."""
        self.wait([key])
        return self._found[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until members have left something."""
        clock = Clock()
        while missing := [key for key in keys if key not in self._found]:
            self._look(missing)
            if clock.seconds > self._membership.settings.timeout:
                raise RuntimeError(f"waited in vain for a member of view {self._view.epoch}")
            time.sleep(POLL / 10)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether members have left all of this."""
        return all(key in self._found for key in keys)

    def _look(self, missing: Sequence[str]) -> None:
        """Ask every other member, and stop waiting for one that is gone, or in a later view."""
        for worker, person in self._view.members.items():
            if worker == self._membership.worker:
                continue
            values = self._ask(worker, person, missing)
            for key, value in zip(missing, values, strict=True):
                if value is not None:
                    self._found[key] = bytes.fromhex(value)

    def _ask(self, worker: int, person: Person, missing: Sequence[str]) -> list[str | None]:
        keys = [self._key(key) for key in missing]
        request = {"read": ["boot", "view", *keys]}
        seconds = self._membership.settings.answer
        try:
            boot, view, *values = ask(person.address, request, seconds)
        except UNREACHABLE as error:
            raise RuntimeError(f"worker {worker} gives no answer ({error})") from error
        is_ahead = view is not None and view["epoch"] > self._view.epoch
        if boot != person.boot or is_ahead:
            raise RuntimeError(f"worker {worker} is in view {self._view.epoch} no more")
        return list(values)


class ViewGroup:
    """The members of a view: the face of a ProcessGroup, but what fails is `Lost`.

    Args:
        membership: of this worker; its view is the group's.

    """

    device = torch.device("cpu")

    def __init__(self, membership: Membership) -> None:
        view = membership.view
        self.epoch = view.epoch
        self.ranks = view.workers  # their names
        self.rank = view.workers.index(membership.worker)
        self.world = len(view.workers)
        self.stage = ""
        options = Gloo._Options()
        options._timeout = timedelta(seconds=membership.settings.timeout)
        options._devices = [Gloo.create_device(hostname=membership.me.host)]
        self._meeting = Meeting(membership)  # gloo does not keep it alive
        self._group: Any = None
        with self._named():
            self._group = Gloo(self._meeting, self.rank, self.world, options)

    def connect(self) -> None:
        """It is connected."""

    def end(self) -> None:
        """Close all connections, so that nobody waits for this worker in this view."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def all_gather(self, mine: Tensor) -> Tensor:
        """The tensors of all members, stacked by rank."""
        gathered = torch.empty(self.world, *mine.shape, dtype=mine.dtype)
        with self._named() as group:
            group.allgather([list(gathered.unbind(0))], [mine]).wait()
        return gathered

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send row r to rank r; receive row r from rank r."""
        with self._named() as group:
            group.alltoall_base(received, sent, [], []).wait()

    def swap(self, letters: Sequence[bytes]) -> list[bytes]:
        """Send letter r to rank r; return the letters of all ranks. Their lengths travel first."""
        going = [len(letter) for letter in letters]
        lengths = torch.tensor(going)
        coming = torch.empty_like(lengths)
        self.all_to_all(coming, lengths)
        sizes = coming.tolist()
        content = bytearray(b"".join(letters))
        buffer = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)
        sent = buffer[: len(content)]
        received = sent.new_empty(sum(sizes))
        with self._named() as group:
            group.alltoall_base(received, sent, sizes, going).wait()
        arrived = torch.split(received, sizes)
        return [letter.numpy().tobytes() for letter in arrived]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor with that of one member, given by its rank."""
        with self._named() as group:
            group.broadcast(tensor, source).wait()

    @contextmanager
    def _named(self) -> Iterator[Any]:
        try:
            yield self._group
        except (RuntimeError, AttributeError) as error:
            self.end()
            raise Lost(plain(str(error))) from error
