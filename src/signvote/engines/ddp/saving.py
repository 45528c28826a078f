"""Checkpoints of all ranks together: one folder per round, complete or absent.

    FOLDER/round-000120/worker-0.safetensors ...    one per rank: trust of its coordinates, momentum
    FOLDER/round-000120/shared.safetensors          state that all ranks share, written by the first rank
    FOLDER/latest                                   the name of the last complete round, replaced atomically

A rank that dies while it writes does no harm: `latest` still names the round before.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from signvote.checkpoint import load as load_file
from signvote.checkpoint import save as save_file
from signvote.checkpoint import write_atomically
from signvote.core.trust import State
from signvote.engines.ddp.state import VoteState
from signvote.errors import StateError

LATEST = "latest"
SHARED = "shared.safetensors"


def save(folder: str | Path, state: VoteState, shared: State, own: State | None = None) -> None:
    """Write a checkpoint. Every rank calls this after the same round; it returns when all ranks have written.

    Args:
        folder: a folder that all ranks can access.
        state: this rank's votes.
        shared: state that all ranks share: {"model": model.state_dict(), ...}. The first rank writes it.
        own: anything else that this rank needs.

    """
    folder = Path(folder)
    name = f"round-{state.round:06}"
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    is_first = state.group.rank == 0
    mine = {"vote": state.state_dict(), "own": own}
    save_file(place / f"worker-{state.worker_id}.safetensors", mine)
    if is_first:
        save_file(place / SHARED, shared | {"world": state.group.world})
    barrier(state)
    if is_first:
        write_atomically(folder / LATEST, name.encode())
        _remove_others(folder, name)
    barrier(state)


def _remove_others(folder: Path, name: str) -> None:
    for other in folder.glob("round-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def load(folder: str | Path, state: VoteState) -> tuple[State, State] | None:
    """Resume from the last complete checkpoint, of any number of ranks: (shared, own), or None without one."""
    folder = Path(folder)
    latest = folder / LATEST
    if not latest.exists():
        return None
    place = folder / latest.read_text().strip()
    shared = load_file(place / SHARED)
    saved = [load_file(path) for path in sorted(place.glob("worker-*.safetensors"))]
    if len(saved) != shared["world"]:
        raise StateError(f"{place} has the states of {len(saved)} workers; {shared['world']} were saved")
    votes = [each["vote"] for each in saved]
    state.load_state_dict(*votes)
    own: State | None = None
    for each in saved:
        if each["vote"]["worker"] == state.worker_id:
            own = each["own"]
    return shared, own or {}


def barrier(state: VoteState) -> None:
    """Wait for all ranks."""
    nothing = torch.zeros(1, dtype=torch.int64, device=state.group.device)
    state.group.all_gather(nothing)
