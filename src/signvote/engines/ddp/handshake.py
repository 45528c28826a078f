"""Before the first round: every rank must train the same model by the same settings."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.layout import Layout
from signvote.engines.ddp.process_group import ProcessGroup
from signvote.errors import ConfigError, EngineError

SAME = {
    "layout of the model": slice(1, 3),
    "settings": slice(3, 5),
    "parameters": slice(5, 6),
    "round": slice(6, 7),
}  # where each digest is in the numbers that a rank sends; a worker id comes first


class Handshake:
    """Compares the ranks once, and keeps their worker ids.

    Args:
        worker_id: of this rank.
        settings: a text that all ranks must share.

    """

    def __init__(self, worker_id: int, settings: str) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self.ids: list[int] = []  # worker ids by rank; empty before the handshake

    @property
    def by_worker(self) -> list[int]:
        """Ranks sorted by worker id, as a server sorts its ballots."""
        ranks = range(len(self.ids))
        return sorted(ranks, key=self.ids.__getitem__)

    def run(
        self,
        group: ProcessGroup,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        round: int,
    ) -> None:
        """Exchange digests; all ranks raise the same error if one differs."""
        settings = hashlib.blake2b(self.settings.encode(), digest_size=16)
        mine = [
            self.worker_id - 2**63,
            *_two_numbers(layout.digest),
            *_two_numbers(settings.digest()),
            _checksum(parameters),
            round,
        ]
        sent = torch.tensor(mine, device=group.device)
        received: list[list[int]] = group.all_gather(sent).tolist()
        for what, at in SAME.items():
            wanted = received[0][at]
            differing = [r for r, numbers in enumerate(received) if numbers[at] != wanted]
            if differing:
                ranks = ", ".join(str(group.ranks[r]) for r in differing)
                raise EngineError(f"rank {ranks} differs from rank {group.ranks[0]} in the {what}")
        ids = [numbers[0] + 2**63 for numbers in received]
        if len(set(ids)) < len(ids):
            raise EngineError(f"worker ids by rank are {ids}; they must differ")
        self.ids = ids


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
            "FSDP and tensor parallelism are not supported: every rank must hold the whole model"
        )
    if isinstance(model, DistributedDataParallel) and getattr(model, "mixed_precision", None) is not None:
        raise ConfigError(
            "DDP's own mixed_precision is not supported; use torch.autocast and VoteState(scaler=...)"
        )


def _checksum(parameters: Mapping[str, Tensor]) -> int:
    crc = 0
    for parameter in parameters.values():
        flat = parameter.detach().cpu().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy()
        crc = zlib.crc32(raw.data, crc)
    return crc


def _two_numbers(digest: bytes) -> list[int]:
    """16 bytes as two signed numbers of 64 bits."""
    halves = (digest[:8], digest[8:])
    return [int.from_bytes(half, "little", signed=True) for half in halves]
