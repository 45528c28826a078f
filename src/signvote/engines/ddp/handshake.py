"""Before the first round: every rank must train the same model by the same settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.server import Server
from signvote.engines.ddp.drift import digest
from signvote.engines.ddp.process_group import Group
from signvote.engines.ddp.team import Team
from signvote.engines.ddp.torch_names import local_of
from signvote.errors import ConfigError, EngineError

SETTINGS = (
    "rule",
    "options of the rule",
    "encoding",
    "run",
    "min_voters",
    "chunk",
    "check_every",
    "outer step",
)  # which all ranks must share
PARAMETERS = "parameters"
ADVICE = ": start all ranks from one seed or checkpoint, or let DistributedDataParallel copy them"


class Handshake:
    """Compares the ranks once, and keeps their worker ids.

    Args:
        worker_id: of this rank.
        settings: a text for each of SETTINGS.

    """

    def __init__(self, worker_id: int, settings: Mapping[str, str]) -> None:
        self.worker_id = worker_id
        self.settings = [settings[name] for name in SETTINGS]
        self.ids: list[int] = []  # worker ids, by rank among the voters; empty before the handshake
        self.members: list[Member] = []  # of everyone, by rank

    @property
    def by_worker(self) -> list[int]:
        """Ranks of voters sorted by worker id, as a server sorts its ballots."""
        ranks = range(len(self.ids))
        return sorted(ranks, key=self.ids.__getitem__)

    def run(
        self,
        team: Team,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        round: int,
    ) -> None:
        """Exchange digests; all ranks raise the same error if one differs."""
        team.connect()
        mine = {
            "layout of the model": _number(layout.digest),
            **{
                f"settings: {what}": _number(text.encode())
                for what, text in zip(SETTINGS, self.settings, strict=True)
            },
            "round": round,
            PARAMETERS: digest(local_of(p) for p in parameters.values()),
        }
        group = team.everyone
        identity = (self.worker_id - 2**63, team.shard)
        sent = torch.tensor([*identity, *mine.values()], device=group.device)
        received: list[list[int]] = group.all_gather(sent).tolist()
        members = [Member(worker + 2**63, shard) for worker, shard, *_ in received]
        columns = zip(*(numbers[len(identity) :] for numbers in received), strict=True)
        for what, column in zip(mine, columns, strict=True):
            _compare(what, column, members, group)
        self.ids = _worker_ids(members, team)
        self.members = members


class Member(NamedTuple):
    """One rank."""

    worker: int
    shard: int


def _compare(what: str, column: Sequence[int], members: Sequence[Member], group: Group) -> None:
    """Raise if ranks differ in something. Parameters are compared with those of the same shard."""
    alike: dict[int, list[int]] = {}  # ranks that must be equal
    for r, member in enumerate(members):
        shard = member.shard if what == PARAMETERS else 0
        alike.setdefault(shard, []).append(r)
    for first, *others in alike.values():
        differing = [r for r in others if column[r] != column[first]]
        if differing:
            ranks = ", ".join(str(group.ranks[r]) for r in differing)
            advice = ADVICE if what == PARAMETERS else ""
            raise EngineError(f"rank {ranks} differs from rank {group.ranks[first]} in the {what}{advice}")


def _worker_ids(members: Sequence[Member], team: Team) -> list[int]:
    """The worker ids of the voters, by rank among them."""
    by_rank = dict(zip(team.everyone.ranks, members, strict=True))
    shards = [by_rank[rank].shard for rank in team.voters.ranks]
    if len(set(shards)) > 1:
        raise EngineError(
            f'the ranks of Vote\'s group hold different shards, {shards}; use group=mesh["replicate"].get_group()'
        )
    ids = [by_rank[rank].worker for rank in team.voters.ranks]
    if len(set(ids)) < len(ids):
        raise EngineError(f"worker ids by rank are {ids}; they must differ")
    workers = {member.worker for member in members}
    if len(workers) > len(ids):
        raise EngineError(f"the ranks of a worker have different worker ids: {sorted(workers)}")
    return ids


def settings_of(
    server: Server,
    encoding: Encoding,
    *,
    chunk: int,
    check_every: int,
    steps: str = "",
) -> dict[str, str]:
    """A text for each of SETTINGS. Made before the rule owns its coordinates, which differ by rank."""
    return {
        "rule": server.rule.name,
        "options of the rule": described(server.rule),
        "encoding": json.dumps(asdict(encoding)),
        "run": str(server.run),
        "min_voters": str(server.min_voters),
        "chunk": str(chunk),
        "check_every": str(check_every),
        "outer step": steps,
    }


def check_model(model: nn.Module) -> None:
    """Raise for a model that cannot be trained this way, before training starts."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("FullyShardedDataParallel", "DataParallel"):
            raise ConfigError(f"{kind} is not supported: every rank must hold the whole model")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(f"the model lies on {len(devices)} devices; one per rank is supported")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ConfigError(
            "the hook of DDP does not support FSDP and tensor parallelism; with FSDP2 use the optimizer signvote.Vote"
        )
    if isinstance(model, DistributedDataParallel) and getattr(model, "mixed_precision", None) is not None:
        raise ConfigError(
            "DDP's own mixed_precision is not supported; use torch.autocast and VoteState(scaler=...)"
        )


def described(value: object, depth: int = 12) -> str:
    """The numbers, texts and flags that make up an object, such as a rule: equal options give equal texts.

    >>> from signvote.core.rules import make_rule
    >>> layout = Layout([("w", (4,))])
    >>> one, other = (make_rule("weighted", layout, forgetting=f) for f in (0.9, 0.8))
    >>> described(one) == described(other)
    False
    """
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    name = type(value).__name__
    if isinstance(value, Layout | Tensor) or depth == 0:
        return name
    if isinstance(value, Mapping):
        entries = []
        for key, its in value.items():
            its_name = described(key, depth - 1)
            entries.append(f"{its_name}: {described(its, depth - 1)}")
        return f"{name}({', '.join(sorted(entries))})"
    if isinstance(value, list | tuple):
        items = [described(each, depth - 1) for each in value]
        return f"{name}({', '.join(items)})"
    inside = getattr(value, "__dict__", None)
    return name + described(inside, depth - 1) if inside else name


def _number(content: bytes) -> int:
    """A digest of 64 bits."""
    hashed = hashlib.blake2b(content, digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)
