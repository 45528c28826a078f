"""Checkpoints of all ranks together: one folder per checkpoint, complete or absent.

    FOLDER/round-000120/worker-0.safetensors ...    one per rank: trust of its coordinates, momentum
    FOLDER/round-000120/shared.safetensors          state that all ranks share, written by the first rank
    FOLDER/round-000120/manifest.json               the files of this checkpoint and their sizes, written last
    FOLDER/latest                                   the name of the last complete checkpoint, replaced atomically

A rank that dies while it writes does no harm: `latest` still names the checkpoint before. The folder that it leaves
behind is never written to again: the next checkpoint of that round is `round-000120-1`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch

from signvote.checkpoint import load as load_file
from signvote.checkpoint import save as save_file
from signvote.checkpoint import write_atomically
from signvote.core.trust import State
from signvote.engines.ddp.state import Voting
from signvote.errors import ConfigError, StateError
from signvote.formats import upgraded

LATEST = "latest"
SHARED = "shared.safetensors"
MANIFEST = "manifest.json"
VERSION = 1
NAME = re.compile(r"round-\d{6,}(-\d+)?")


def save(folder: str | Path, state: Voting, shared: State, own: State | None = None) -> None:
    """Write a checkpoint. Every rank calls this after the same round; it returns when all ranks have written.

    The checkpoint before is removed after this one is complete. If ranks have different parameters, or the first rank
    does not see the files of all, every rank raises the same error and the checkpoint before stays.

    Args:
        folder: a folder that all ranks can access.
        state: this rank's votes.
        shared: state that all ranks share: {"model": model.state_dict(), ...}. The first rank writes it.
        own: anything else that this rank needs.

    """
    folder = Path(folder)
    is_first = state.poll.team.voters.rank == 0
    _refuse_shards(state)
    state.poll.check_parameters(f"the checkpoint of round {state.round}")
    attempt = _first_ranks(state, _make_place(folder, state.round) if is_first else 0)
    place = folder / _name(state.round, attempt)
    place.mkdir(parents=True, exist_ok=True)  # this machine may not see it yet
    mine = place / _worker_file(state.worker_id)
    save_file(mine, {"vote": state.rank_state(), "own": own})
    if is_first:
        save_file(place / SHARED, shared)
    files = _sizes(state, mine, place / SHARED)
    missing = _first_ranks(state, _missing(place, files) if is_first else 0)
    if missing:
        first = state.poll.team.voters.ranks[0]
        raise StateError(
            f"rank {first} sees {len(files) - missing} of {len(files)} files of the checkpoint in"
            f" {place}; all ranks must write to the same folder"
        )
    if is_first:
        _finish(place, files)
    barrier(state)


def _refuse_shards(state: Voting) -> None:
    """Raise for sharded parameters, of which a rank has a part only."""
    if state.poll.team.shards is not None:
        raise ConfigError("the parameters are sharded; use save_sharded and load_sharded")
    if state.poll.comes_and_goes:
        raise ConfigError(
            "workers that come and go do not write a checkpoint together: save model.state_dict() and"
            " optimizer.state_dict() on one of them, and momentum by Members(save=...)"
        )


def _name(round: int, attempt: int) -> str:
    again = f"-{attempt}" if attempt else ""
    return f"round-{round:06}{again}"


def _worker_file(worker: int) -> str:
    return f"worker-{worker}.safetensors"


def _make_place(folder: Path, round: int) -> int:
    """Make a folder under a name that no checkpoint has had; the number in its name."""
    for attempt in count():
        try:
            (folder / _name(round, attempt)).mkdir(parents=True)
        except FileExistsError:
            continue
        return attempt
    raise AssertionError("numbers do not end")


def _sizes(state: Voting, mine: Path, shared: Path) -> dict[str, int]:
    """The files of all ranks and their sizes in bytes, after all ranks have written theirs."""
    group = state.poll.team.voters
    its_size = mine.stat().st_size
    shared_size = 0
    if group.rank == 0:
        shared_size = shared.stat().st_size
    numbers = [state.worker_id - 2**63, its_size, shared_size]
    sent = torch.tensor(numbers, device=group.device)
    received: list[list[int]] = group.all_gather(sent).tolist()
    files = {}
    for worker, size, _ in received:
        name = _worker_file(worker + 2**63)
        files[name] = size
    _, _, files[SHARED] = received[0]
    return files


def _missing(place: Path, files: Mapping[str, int]) -> int:
    """How many files are absent or of another size."""
    missing = [name for name, size in files.items() if _size(place / name) != size]
    return len(missing)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _finish(place: Path, files: Mapping[str, int]) -> None:
    """Make a checkpoint the latest, and remove all others."""
    manifest = {"version": VERSION, "files": files}
    write_atomically(place / MANIFEST, json.dumps(manifest, indent=1).encode())
    write_atomically(place.parent / LATEST, place.name.encode())
    for other in place.parent.glob("round-*"):
        if other.name != place.name:
            shutil.rmtree(other, ignore_errors=True)


def load(folder: str | Path, state: Voting) -> tuple[State, State] | None:
    """Resume from the last complete checkpoint, of any number of ranks: (shared, own), or None without one."""
    _refuse_shards(state)
    place = _latest(Path(folder))
    if place is None:
        return None
    files = _read_manifest(place / MANIFEST)
    for name, size in files.items():
        if _size(place / name) != size:
            raise StateError(f"{place / name} is missing or cut short: {size} bytes were saved")
    shared = load_file(place / SHARED)
    saved = [load_file(place / name) for name in sorted(files) if name != SHARED]
    votes = [each["vote"] for each in saved]
    state.load_rank_states(*votes)
    own: State | None = None
    for each in saved:
        if each["vote"]["worker"] == state.worker_id:
            own = each["own"]
    return shared, own or {}


def _latest(folder: Path) -> Path | None:
    """The folder of the last complete checkpoint; None if there is none."""
    latest = folder / LATEST
    if not latest.exists():
        return None
    name = latest.read_bytes().decode(errors="replace").strip()
    if not NAME.fullmatch(name):
        raise StateError(
            f"{latest} is damaged: it holds {name[:40]!r}; write the name of a checkpoint into it"
        )
    return folder / name


def _read_manifest(path: Path) -> dict[str, int]:
    """The files of a checkpoint and their sizes."""
    try:
        manifest = upgraded(json.loads(path.read_bytes()), str(path), VERSION)
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except FileNotFoundError as error:
        raise StateError(
            f"{path} is missing: the checkpoint is not complete, or an earlier signvote wrote it"
        ) from error
    except StateError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged ({type(error).__name__})") from error
    if SHARED not in files or any(Path(name).name != name for name in files):
        raise StateError(f"{path} is damaged: it does not list the files of a checkpoint")
    return files


def _first_ranks(state: Voting, number: int) -> int:
    """The first rank's number, on all ranks; each waits for all."""
    group = state.poll.team.voters
    mine = torch.tensor([number], dtype=torch.int64, device=group.device)
    by_rank = group.all_gather(mine)
    return int(by_rank[0, 0])


def barrier(state: Voting) -> None:
    """Wait for all ranks."""
    _first_ranks(state, 0)
