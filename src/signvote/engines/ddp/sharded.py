"""Checkpoints of sharded models, by `torch.distributed.checkpoint`: they can be loaded in another mesh.

FOLDER/votes.safetensors         the trust in all workers, written by the first rank
FOLDER/*.distcp, .metadata       model, momentum of each worker, masters: each rank writes its shards
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from signvote.checkpoint import load as load_file
from signvote.checkpoint import save as save_file
from signvote.engines.ddp.optimizer import MASTER, MOMENTUM, Vote
from signvote.errors import StateError

VOTES = "votes.safetensors"
METADATA = ".metadata"  # which torch writes last
MODEL = "model"


def save_sharded(folder: str | Path, model: nn.Module, optimizer: Vote) -> None:
    """Write a checkpoint of a model that FSDP2 shards. Every rank calls this after the same step.

    Args:
        folder: a new folder that all ranks can access.
        model: the sharded model.
        optimizer: of its parameters.

    """
    folder = Path(folder)
    poll = optimizer.poll
    poll.check_parameters(f"the checkpoint of round {poll.round}")
    if poll.team.everyone.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(folder / VOTES, poll.server.state_dict())
    dcp.save({MODEL: get_model_state_dict(model), **_tensors(optimizer)}, checkpoint_id=folder)  # type: ignore[attr-defined]


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Vote) -> None:
    """Resume from a checkpoint of any mesh. Every rank calls this. A worker that is not in it starts without momentum.

    Args:
        folder: that `save_sharded` wrote.
        model: is overwritten.
        optimizer: of its parameters, made as for the checkpoint.

    """
    folder = Path(folder)
    if not (folder / METADATA).exists():
        raise StateError(f"{folder} holds no complete checkpoint: {METADATA} is missing")
    optimizer.poll.resume(load_file(folder / VOTES))
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata  # type: ignore[attr-defined]
    tensors = {
        name: {key: tensor for key, tensor in entries.items() if f"{name}.{key}" in known}
        for name, entries in _tensors(optimizer).items()
    }
    loaded = get_model_state_dict(model)
    dcp.load({MODEL: loaded, **tensors}, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_model_state_dict(model, loaded)  # all else was loaded in place
    optimizer.forget_time()


def _tensors(optimizer: Vote) -> dict[str, dict[str, Tensor]]:
    """The momentum of this worker and the masters: shards, in the memory in which they are used."""
    found: dict[str, dict[str, Tensor]] = {MOMENTUM: {}, MASTER: {}}
    for name, state in optimizer.named_state():
        if MOMENTUM in state:
            found[MOMENTUM][f"{optimizer.worker_id}.{name}"] = state[MOMENTUM]
        if MASTER in state:
            found[MASTER][name] = state[MASTER]
    return found
