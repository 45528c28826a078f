"""Who takes part: the settings of a worker that may lose others, and the views that they agree on.

A view has a number and its members. View 0 has none; all peers together make view 1. View e + 1 is decided by more than
half of the members of view e (`agreement.py`), so there is one at most, and no two halves ever continue. It has the
members of view e that have stopped voting in it, and those that knocked: late ones, and ones that came back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from signvote.core.bits import check_number
from signvote.engines.ddp.registers import TOLD, Address
from signvote.errors import ConfigError

KNOCK = f"{TOLD}knock/"
Peers = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Members:
    """For `Vote(members=...)`: the workers continue without one that dies, hangs or loses its link.

    >>> members = Members(peers=["10.0.0.1:29400", "10.0.0.2:29400", "10.0.0.3:29400"], worker_id=2)
    >>> members.address
    '10.0.0.3:29400'
    """

    peers: Peers  # the workers that start together, HOST:PORT by worker id: all of them make the first view
    worker_id: int  # of this worker; a late one may have a number that is not among the peers
    address: str = ""  # where the others reach this worker; "": as it is among the peers
    timeout: float = 60.0  # seconds to wait for a worker: longer than the longest step
    answer: float = 5.0  # seconds in which a machine must answer a short question
    patience: float = 600.0  # seconds to look for a majority, or to wait to be let in, before an error
    save: str | Path | None = (
        None  # a file on this machine for this worker's momentum; None: a restart loses it
    )
    save_every: int = 10  # rounds

    def __post_init__(self) -> None:
        check_number("worker_id", self.worker_id)
        if not self.by_worker:
            raise ConfigError("peers is empty; give the addresses of the workers that start together")
        for name in ("timeout", "answer", "patience", "save_every"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.address:
            if self.worker_id not in self.by_worker:
                raise ConfigError(
                    f"worker {self.worker_id} is not among the peers; give its own address=HOST:PORT"
                )
            object.__setattr__(self, "address", self.by_worker[self.worker_id])
        for each in (*self.by_worker.values(), self.address):
            parsed(each)

    @property
    def by_worker(self) -> dict[int, str]:
        """The peers by worker id."""
        pairs = self.peers.items() if isinstance(self.peers, Mapping) else enumerate(self.peers)
        return dict(sorted(pairs))


def parsed(address: str) -> Address:
    """HOST:PORT as a pair."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address; write HOST:PORT, as in 10.0.0.1:29400")
    return host.strip("[]"), int(port)


class Person(NamedTuple):
    """One process of a worker. A worker that starts again is another one: its registers are new."""

    host: str
    port: int
    boot: str  # a random number

    @property
    def address(self) -> Address:
        """Where its registers are."""
        return self.host, self.port

    @classmethod
    def new(cls, address: str) -> Person:
        """This process."""
        return cls(*parsed(address), secrets.token_hex(8))


@dataclass(frozen=True)
class View:
    """The members of an epoch, sorted by worker id: the place in this order is the rank."""

    epoch: int = 0
    members: dict[int, Person] = field(default_factory=dict)

    def has(self, worker: int, person: Person) -> bool:
        """Whether this very process is a member."""
        return self.members.get(worker) == person

    @property
    def workers(self) -> list[int]:
        """Worker ids by rank."""
        return list(self.members)

    def to_json(self) -> dict[str, Any]:
        """As `of` reads it."""
        people = {str(worker): list(person) for worker, person in self.members.items()}
        return {"epoch": self.epoch, "members": people}

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> View:
        """What another worker published; None: nothing yet."""
        if content is None:
            return cls()
        people = {int(worker): Person(*each) for worker, each in content["members"].items()}
        return cls(int(content["epoch"]), dict(sorted(people.items())))


class Seen(NamedTuple):
    """What a worker shows to the others."""

    boot: str
    view: View
    ready: Mapping[str, Any] | None  # for which epoch it is ready, and who knocked at its door
    founding: Any
    facts: Mapping[str, str]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Seen:
        """From the values of KEYS."""
        boot, view, ready, founding, facts = values
        return cls(str(boot), View.of(view), ready, founding, facts or {})


KEYS = ("boot", "view", "ready", "founding", "facts")


class Clock:
    """How long something takes; replaced where nothing may depend on time."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self.began
