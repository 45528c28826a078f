"""Checkpoints of sharded models, by `torch.distributed.checkpoint`: they can be loaded in another mesh.

FOLDER/votes.safetensors         the trust in all workers, written by the first rank
FOLDER/*.distcp, .metadata       model, momentum of each worker, masters: each rank writes its shards
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from signvote.checkpoint import State
from signvote.checkpoint import load as load_file
from signvote.checkpoint import save as save_file
from signvote.engines.ddp.optimizer import MASTER, MOMENTUM, Vote
from signvote.engines.ddp.poll import Poll
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
    error: OSError | None = None
    if poll.team.everyone.rank == 0:
        error = _write_votes(folder, poll.server.state_dict())
    if _any_rank(poll, error is not None):
        raise StateError(
            f"the first rank could not write to {folder}: it holds a checkpoint already, or is not writable; give"
            " each checkpoint a new folder"
        ) from error
    dcp.save({MODEL: get_model_state_dict(model), **_tensors(optimizer)}, checkpoint_id=folder)  # type: ignore[attr-defined]


def _write_votes(folder: Path, state: State) -> OSError | None:
    """Write the state of the votes into a new folder; an error is returned, so that all ranks can raise one."""
    try:
        if (folder / METADATA).exists():
            raise FileExistsError(folder / METADATA)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(folder / VOTES, state)
    except OSError as error:
        return error
    return None


def _any_rank(poll: Poll, mine: bool) -> bool:
    """Whether something is true on any rank. Every rank calls this."""
    poll.team.connect()
    group = poll.team.everyone
    by_rank = group.all_gather(torch.tensor([int(mine)], device=group.device))
    return bool(by_rank.any())


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Vote) -> None:
    """Resume from a checkpoint of any mesh. Every rank calls this. A worker that is not in it starts without momentum.

    Args:
        folder: that `save_sharded` wrote.
        model: is overwritten.
        optimizer: of its parameters, made as for the checkpoint.

    """
    folder = Path(folder)
    known = _checked(folder)
    loaded = get_model_state_dict(model)
    _check_model(folder, known, loaded)
    optimizer.poll.resume(load_file(folder / VOTES))
    tensors = {
        name: {key: tensor for key, tensor in entries.items() if f"{name}.{key}" in known}
        for name, entries in _tensors(optimizer).items()
    }
    dcp.load({MODEL: loaded, **tensors}, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_model_state_dict(model, loaded)  # all else was loaded in place
    optimizer.forget_time()


def _checked(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name; raise if it is not complete."""
    for name in (METADATA, VOTES):
        if not (folder / name).exists():
            raise StateError(f"{folder} holds no complete checkpoint: {name} is missing")
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()  # type: ignore[attr-defined]
        entries = list(metadata.storage_data.values())
    except Exception as error:  # of pickle, which may raise anything
        raise StateError(f"{folder / METADATA} is damaged ({type(error).__name__})") from error
    for entry in entries:
        path = folder / entry.relative_path
        wanted = entry.offset + entry.length
        if not path.is_file() or path.stat().st_size < wanted:
            raise StateError(f"{path} is missing or cut short: {wanted} bytes or more were saved")
    return dict(metadata.state_dict_metadata)


def _check_model(folder: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise if the checkpoint is of another model."""
    for name, value in wanted.items():
        saved = known.get(f"{MODEL}.{name}")
        if saved is None:
            raise StateError(f"{folder} is of another model: it does not hold {name}")
        if isinstance(value, Tensor) and tuple(saved.size) != tuple(value.shape):
            raise StateError(
                f"{folder} is of another model: {name} has shape {tuple(saved.size)}, and this model's has"
                f" {tuple(value.shape)}"
            )


def _tensors(optimizer: Vote) -> dict[str, dict[str, Tensor]]:
    """The momentum of this worker and the masters: shards, in the memory in which they are used."""
    found: dict[str, dict[str, Tensor]] = {MOMENTUM: {}, MASTER: {}}
    for name, state in optimizer.named_state():
        if MOMENTUM in state:
            found[MOMENTUM][f"{optimizer.worker_id}.{name}"] = state[MOMENTUM]
        if MASTER in state:
            found[MASTER][name] = state[MASTER]
    return found
