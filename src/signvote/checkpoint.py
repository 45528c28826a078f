"""State dicts on disk: safetensors, no pickle, written so that a crash never costs the previous file.

The tensors of a (nested) state go into the file as they are; everything else is JSON in its header.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from signvote.atomic import write_atomically as write_atomically
from signvote.errors import StateError

State = dict[str, Any]

HEADER = "signvote"
REFERENCE = "tensor:"


def save(path: str | os.PathLike[str], state: State) -> None:
    """Write a state; until the new file is complete and on disk, the old one stays.

    Raises StateError for a value that is no tensor, number, string, boolean, None, list or dict.
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps(_without_tensors(state, "state", tensors))
    write_atomically(Path(path), to_safetensors(tensors, metadata={HEADER: header}))


def load(path: str | os.PathLike[str]) -> State:
    """Read what `save` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {})[HEADER]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state: State = _with_tensors(json.loads(header), tensors)
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise StateError(f"{path} is cut short or no signvote checkpoint ({error})") from error
    return state


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value with each tensor replaced by a reference to its place in `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return REFERENCE + name
    if isinstance(value, dict):
        return {key: _without_tensors(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, str) and value.startswith(REFERENCE):
        raise StateError(f"{name}: a string that starts with {REFERENCE!r} cannot be saved")
    if value is None or isinstance(value, str | int | float):
        return value
    raise StateError(f"{name} is a {type(value).__name__}, which a checkpoint does not hold")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if isinstance(value, str) and value.startswith(REFERENCE):
        return tensors[value.removeprefix(REFERENCE)]
    return value
