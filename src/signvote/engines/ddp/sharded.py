"""Checkpoints of sharded models, by `torch.distributed.checkpoint`: they can be loaded in another mesh.

FOLDER/*.distcp, .metadata       model, momentum of each worker, masters: each rank writes its shards
FOLDER/votes.safetensors         the trust in all workers, and digests of the files; the first rank writes it last
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from signvote.checkpoint import State
from signvote.checkpoint import load as load_file
from signvote.checkpoint import save as save_file
from signvote.engines.ddp.optimizer import Vote
from signvote.engines.ddp.optimizer_state import MASTER, MOMENTUM
from signvote.engines.ddp.process_group import Group
from signvote.errors import StateError

VOTES = "votes.safetensors"
METADATA = ".metadata"
MODEL = "model"
NUMBERS = 4  # of 64 bits, in a digest


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
    everyone = _everyone(optimizer)
    is_taken = (folder / METADATA).exists() or (folder / VOTES).exists()
    if _is_so_anywhere(is_taken, everyone):
        raise StateError(f"{folder} holds a checkpoint already; give each checkpoint a new folder")
    with _one_error(f"{folder} could not be written"):
        dcp.save({MODEL: get_model_state_dict(model), **_tensors(optimizer)}, checkpoint_id=folder)  # type: ignore[attr-defined]
    names = _files(folder)
    state = {
        "server": poll.server.state_dict(),
        "files": names,
        "digests": _digests(folder, names, everyone),
    }
    error = _write(folder / VOTES, state) if everyone.rank == 0 else None
    if _is_so_anywhere(error is not None, everyone):
        raise StateError(f"the first rank could not write {folder / VOTES}") from error


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Vote) -> None:
    """Resume from a checkpoint of any mesh. Every rank calls this. A worker that is not in it starts without momentum.

    Args:
        folder: that `save_sharded` wrote.
        model: is overwritten.
        optimizer: of its parameters, made as for the checkpoint.

    """
    folder = Path(folder)
    for name in (VOTES, METADATA):
        if not (folder / name).exists():
            raise StateError(f"{folder} holds no complete checkpoint: {name} is missing")
    votes = load_file(folder / VOTES)
    _check_files(folder, votes, _everyone(optimizer))
    known = _metadata(folder).state_dict_metadata
    loaded = get_model_state_dict(model)
    _check_model(folder, known, loaded)
    optimizer.poll.resume(votes["server"])
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, entries in _tensors(optimizer).items():
        saved = {key: tensor for key, tensor in entries.items() if f"{name}.{key}" in known}
        tensors[name] = saved
    with _one_error(f"{folder} could not be read"):
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


# ---- files ---------------------------------------------------------------------------------------


def _metadata(folder: Path) -> Any:
    """What PyTorch knows about the checkpoint."""
    return dcp.FileSystemReader(folder).read_metadata()  # type: ignore[attr-defined]


def _files(folder: Path) -> list[str]:
    """The files of the checkpoint that PyTorch writes."""
    parts = {entry.relative_path for entry in _metadata(folder).storage_data.values()}
    return [METADATA, *sorted(parts)]


def _write(path: Path, state: State) -> OSError | None:
    """Write a file; an error is returned, so that all ranks can raise one."""
    try:
        save_file(path, state)
    except OSError as error:
        return error
    return None


def _digests(folder: Path, names: Sequence[str], group: Group) -> Tensor:
    """SHA-256 of files as numbers, 0 for one that is missing. Each rank reads some of them."""
    mine = torch.zeros((len(names), NUMBERS), dtype=torch.int64)
    for place in range(group.rank, len(names), group.world):
        path = folder / names[place]
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            mine[place] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    return group.all_gather(mine.to(group.device)).sum(0).cpu()


def _check_files(folder: Path, votes: State, group: Group) -> None:
    """Raise the same error on all ranks if a file is not what was written."""
    found = _digests(folder, votes["files"], group)
    is_equal = (found == votes["digests"]).all(1).tolist()
    for name, fits in zip(votes["files"], is_equal, strict=True):
        if not fits:
            raise StateError(f"{folder / name} is missing, cut short or damaged")


def _check_model(folder: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise if the checkpoint is of another model."""
    for name, value in wanted.items():
        saved = known.get(f"{MODEL}.{name}")
        if saved is None:
            raise StateError(f"{folder} is of another model: it does not hold {name}")
        if not isinstance(value, Tensor):
            continue
        found = tuple(saved.size)
        shape = tuple(value.shape)
        if found != shape:
            raise StateError(
                f"{folder} is of another model: {name} has shape {found}, and this model's has {shape}"
            )


# ---- ranks ---------------------------------------------------------------------------------------


def _everyone(optimizer: Vote) -> Group:
    """All ranks."""
    team = optimizer.poll.team
    team.connect()
    return team.everyone


def _is_so_anywhere(mine: bool, group: Group) -> bool:
    """Whether something is true on any rank. Every rank calls this."""
    by_rank = group.all_gather(torch.tensor([int(mine)], device=group.device))
    return bool(by_rank.any())


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Raise what went wrong on any rank as one sentence: PyTorch's error is no Exception, and many lines long."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise StateError(f"{what}: rank {rank} failed with {type(cause).__name__}: {cause}") from error
