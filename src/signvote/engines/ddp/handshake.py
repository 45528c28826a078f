"""Before the first round: every rank must train the same model by the same settings."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.layout import Layout
from signvote.engines.ddp.meeting import Meeting
from signvote.errors import ConfigError, EngineError

SAME = {"layout of the model": (1, 3), "settings": (3, 5), "parameters": (5, 6), "round": (6, 7)}


class Handshake:
    """Compares the ranks once, and knows their worker ids from then on.

    Args:
        worker_id: of this rank.
        settings: a text that all ranks must share.

    """

    def __init__(self, worker_id: int, settings: str) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self.ids: list[int] = []  # worker ids by rank; empty before the handshake

    @property
    def in_order(self) -> list[int]:
        """Ranks by worker id, as a server sorts its ballots."""
        return sorted(range(len(self.ids)), key=self.ids.__getitem__)

    def run(self, meeting: Meeting, layout: Layout, parameters: Mapping[str, Tensor], round: int) -> None:
        """Exchange digests; all ranks raise the same error if one differs."""
        mine = [
            self.worker_id - 2**63,
            *_two(layout.digest),
            *_two(hashlib.blake2b(self.settings.encode(), digest_size=16).digest()),
            _checksum(parameters),
            round,
        ]
        told: list[list[int]] = meeting.all_gather(torch.tensor(mine, device=meeting.device)).tolist()
        for what, (start, stop) in SAME.items():
            differing = [r for r, its in enumerate(told) if its[start:stop] != told[0][start:stop]]
            if differing:
                ranks = ", ".join(str(meeting.ranks[r]) for r in differing)
                raise EngineError(f"rank {ranks} differs from rank {meeting.ranks[0]} in the {what}")
        ids = [its[0] + 2**63 for its in told]
        if len(set(ids)) < len(ids):
            raise EngineError(f"worker ids by rank are {ids}; they must differ")
        self.ids = ids


def check_model(model: nn.Module) -> None:
    """Raise for what cannot be trained this way, before training starts."""
    for module in model.modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DataParallel"):
            raise ConfigError(
                f"{type(module).__name__} is not supported: every rank must hold the whole model"
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(f"the model lies on {len(devices)} devices; one per rank is supported")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ConfigError(
            "FSDP and tensor parallelism are not supported: every rank must hold the whole model"
        )
    if isinstance(model, DistributedDataParallel) and getattr(model, "mixed_precision", None) is not None:
        raise ConfigError(
            "DDP's own mixed_precision is not supported; use torch.autocast and VoteState(scaler=...)"
        )


def _checksum(parameters: Mapping[str, Tensor]) -> int:
    crc = 0
    for parameter in parameters.values():
        raw = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw.data, crc)
    return crc


def _two(digest: bytes) -> list[int]:
    """16 bytes as two numbers."""
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
