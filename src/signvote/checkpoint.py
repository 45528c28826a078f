"""State dicts on disk, as safetensors and without pickle. A crash never destroys the previous file.

The tensors of a (nested) state become tensors of the file. Everything else is JSON in its header.
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
    """Write a state. The old file stays until the new one is complete and on disk.

    Raises StateError for a value that is no tensor, number, string, boolean, None, list or dict.
    """
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, "state", tensors)
    metadata = {HEADER: json.dumps(plain)}
    content = to_safetensors(tensors, metadata=metadata)
    write_atomically(Path(path), content)


def load(path: str | os.PathLike[str]) -> State:
    """Read a state that `save` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            plain = json.loads(metadata[HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state: State = _with_tensors(plain, tensors)
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise StateError(f"{path} is cut short or no signvote checkpoint ({error})") from error
    return state


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value with each tensor moved to `tensors` and replaced by a reference."""
    if isinstance(value, Tensor):
        on_cpu = value.detach().cpu()
        tensors[name] = on_cpu.contiguous().clone()
        return REFERENCE + name
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            plain[key] = _without_tensors(item, f"{name}.{key}", tensors)
        return plain
    if isinstance(value, list):
        return [_without_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, str) and value.startswith(REFERENCE):
        raise StateError(f"{name}: a string that starts with {REFERENCE!r} cannot be saved")
    if value is None or isinstance(value, str | int | float):
        return value
    raise StateError(f"{name} is a {type(value).__name__}, which a checkpoint does not hold")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_without_tensors`."""
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if isinstance(value, str) and value.startswith(REFERENCE):
        return tensors[value.removeprefix(REFERENCE)]
    return value
