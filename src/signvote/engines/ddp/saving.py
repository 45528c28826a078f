"""Checkpoints of all ranks together: a folder per round, complete or not there.

    FOLDER/round-000120/worker-0.safetensors ...    each rank its own: trust of its coordinates, momentum
    FOLDER/round-000120/shared.safetensors          what all have alike, written by the first rank
    FOLDER/latest                                   the name of the last complete round, replaced atomically

A rank that dies while it writes costs nothing: `latest` still names the round before.
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


def save(folder: str | Path, state: VoteState, shared: State, own: State | None = None) -> None:
    """Write a checkpoint; every rank calls it after the same round, and comes back when all have written.

    Args:
        folder: that all ranks see.
        state: this rank's votes.
        shared: what all ranks have alike: {"model": model.state_dict(), ...}; the first rank's is kept.
        own: anything else that this rank needs.

    """
    folder = Path(folder)
    name = f"round-{state.round:06}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    first = state.meeting.rank == 0
    save_file(
        folder / name / f"worker-{state.worker_id}.safetensors", {"vote": state.state_dict(), "own": own}
    )
    if first:
        save_file(folder / name / "shared.safetensors", shared | {"world": state.meeting.world})
    meet(state)
    if first:
        write_atomically(folder / LATEST, name.encode())
        for old in folder.glob("round-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)
    meet(state)


def load(folder: str | Path, state: VoteState) -> tuple[State, State] | None:
    """Go on from the last complete checkpoint of a world of any size: (shared, own), or None if there is none."""
    folder = Path(folder)
    if not (folder / LATEST).exists():
        return None
    place = folder / (folder / LATEST).read_text().strip()
    shared = load_file(place / "shared.safetensors")
    saved = [load_file(path) for path in sorted(place.glob("worker-*.safetensors"))]
    if len(saved) != shared["world"]:
        raise StateError(f"{place} has the states of {len(saved)} workers; {shared['world']} were saved")
    state.load_state_dict(*(each["vote"] for each in saved))
    mine = next((each["own"] for each in saved if each["vote"]["worker"] == state.worker_id), None)
    return shared, mine or {}


def meet(state: VoteState) -> None:
    """Wait until every rank is here."""
    state.meeting.all_gather(torch.zeros(1, dtype=torch.int64, device=state.meeting.device))
