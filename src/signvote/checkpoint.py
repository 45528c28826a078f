"""State dicts on disk, as safetensors and without pickle. A crash never destroys the previous file.

A checkpoint is a safetensors file in three parts:

    header   the state as JSON, in the metadata `checkpoint`; each tensor is replaced by its name
    tensors  the tensors of the (nested) state; each name starts with a number, so no two are alike
    digest   the tensor `sha256`, which is the last 32 bytes: SHA-256 of all bytes before them

`load` checks the digest before it uses anything, so it refuses a file with any changed byte. It needs memory for about
twice the file, whatever the file says.

Files of format 1 have no digest and are still read: they hold the state in the metadata `signvote`, without a tensor
`sha256`. A damaged file of format 2 cannot pass for one, because no single change gives it the other name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from signvote.atomic import write_atomically as write_atomically
from signvote.errors import StateError
from signvote.formats import upgraded

State = dict[str, Any]

FORMAT = 2
HEADER = "checkpoint"  # entry of the metadata
DIGEST = "sha256"  # name of the last tensor
DIGEST_BYTES = 32
SIZE_BYTES = 8  # at the start of a safetensors file: the size of its header
MOST_HEADER_BYTES = 100_000_000  # safetensors reads no more
MOST_DEPTH = 100  # of lists and dicts in each other
MOST_BITS = 10_000  # of an integer; Python reads no number of more than 4,300 digits
NUMBERS = "biuf"  # kinds of numpy scalars that have an equal Python value

HEADER_1 = "signvote"  # of format 1
REFERENCE_1 = "tensor:"

DAMAGE = (
    SafetensorError,
    ValueError,  # JSON, UTF-8, shapes
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    RuntimeError,
)


def save(path: str | os.PathLike[str], state: State) -> None:
    """Write a state. The old file stays until the new one is complete and on disk.

    `load` returns an equal state: the same tensors on the CPU, and the same keys in the same order. A key may be a
    string, a number, a boolean, None or a tuple of these, so the state_dict of an optimizer can be saved. Numbers
    of numpy come back as Python's.

    Raises StateError for a value that is no tensor, number, string, boolean, None, list, tuple or dict.
    """
    write_atomically(Path(path), *_written(state))


def to_bytes(state: State) -> bytes:
    """The bytes that `save` would write."""
    return b"".join(_written(state))


def _written(state: State) -> tuple[bytes, memoryview, bytes]:
    """A file in parts."""
    if not isinstance(state, dict):
        raise StateError(f"a state is a dict; this one is a {type(state).__name__}")
    tensors: dict[str, Tensor] = {}
    plain = _encoded(state, "state", tensors)
    content = {"format": FORMAT, "state": plain}
    metadata = {HEADER: json.dumps(content)}
    try:
        file = to_safetensors(tensors, metadata=metadata)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise StateError(f"the state has a tensor that safetensors does not hold ({error})") from error
    return _sealed(file)


def load(path: str | os.PathLike[str]) -> State:
    """Read a state that `save` wrote. A damaged file, or one of another kind, raises StateError with its name."""
    return from_bytes(Path(path).read_bytes(), str(path))


def from_bytes(data: bytes, path: str) -> State:
    """The state in the bytes of a file; errors name the path."""
    try:
        state = _opened(data, path) if _is_intact(data) else _opened_1(data)
    except StateError:
        raise
    except DAMAGE as error:
        raise StateError(f"{path} is damaged, cut short or no signvote checkpoint ({error})") from None
    if not isinstance(state, dict):
        raise StateError(
            f"{path} holds a {type(state).__name__} instead of a state; it is no signvote checkpoint"
        )
    return state


# ---- the file ------------------------------------------------------------------------------------


def _sealed(file: bytes) -> tuple[bytes, memoryview, bytes]:
    """The parts of a safetensors file with a digest as its last tensor."""
    header, rest = _parts(file)
    entry = {
        "dtype": "U8",
        "shape": [DIGEST_BYTES],
        "data_offsets": [len(rest), len(rest) + DIGEST_BYTES],
    }
    unclosed = header.rstrip(b" ").removesuffix(b"}")
    added = f',"{DIGEST}":{json.dumps(entry)}}}'
    longer = unclosed + added.encode()
    padding = -len(longer) % SIZE_BYTES
    longer += b" " * padding
    if len(longer) > MOST_HEADER_BYTES:
        raise StateError(
            f"the state has {len(longer):,} bytes besides its tensors; a checkpoint holds {MOST_HEADER_BYTES:,}:"
            " turn long lists of numbers into tensors"
        )
    start = len(longer).to_bytes(SIZE_BYTES, "little") + longer
    digest = hashlib.sha256(start)
    digest.update(rest)
    return start, rest, digest.digest()


def _is_intact(data: bytes) -> bool:
    """Whether a file ends with the digest of its content."""
    content = memoryview(data)[:-DIGEST_BYTES]
    return hashlib.sha256(content).digest() == data[-DIGEST_BYTES:]


def _parts(data: bytes) -> tuple[bytes, memoryview]:
    """The header of a safetensors file, and the bytes after it."""
    size = int.from_bytes(data[:SIZE_BYTES], "little")
    end = SIZE_BYTES + size
    if end > len(data):
        raise ValueError("its header is not complete")
    return data[SIZE_BYTES:end], memoryview(data)[end:]


def _metadata(data: bytes) -> dict[str, str]:
    header, _ = _parts(data)
    metadata: dict[str, str] = json.loads(header)["__metadata__"]
    return metadata


def _opened(data: bytes, what: str) -> Any:
    """The state in an intact file."""
    content = json.loads(_metadata(data)[HEADER])
    content = upgraded(content, what, FORMAT, key="format")
    return _decoded(content["state"], from_safetensors(data))


def _opened_1(data: bytes) -> Any:
    """The state in a file of format 1, which has no digest."""
    metadata = _metadata(data)
    if set(metadata) != {HEADER_1}:
        raise ValueError("its content does not match its digest")
    tensors = from_safetensors(data)
    used: set[str] = set()
    state = _decoded_1(json.loads(metadata[HEADER_1]), tensors, used)
    if used != set(tensors):
        raise ValueError("it has tensors that belong to nothing")
    return state


# ---- the state -----------------------------------------------------------------------------------


def _encoded(value: Any, place: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """The value as JSON, with each tensor moved to `tensors`.

    A list stays a list. Everything else that is no plain value is an object with one entry, which names its kind:
    {"tensor": name}, {"tuple": [...]} or {"dict": [[key, value], ...]}.
    """
    if depth > MOST_DEPTH:
        raise StateError(
            f"the state has more than {MOST_DEPTH} lists and dicts in each other; does it hold itself?"
        )
    if isinstance(value, np.generic) and value.dtype.kind in NUMBERS:
        value = value.item()

    def inner(item: Any, name: object) -> Any:
        return _encoded(item, f"{place}.{name}", tensors, depth + 1)

    if isinstance(value, Tensor):
        return {"tensor": _moved(value, place, tensors)}
    if isinstance(value, dict):
        entries = []
        for key, its_value in value.items():
            plain_key = _encoded_key(key, place, depth)
            entries.append([plain_key, inner(its_value, key)])
        return {"dict": entries}
    if isinstance(value, list | tuple):
        items = [inner(item, i) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise StateError(
            f"{place} is an integer of {value.bit_length():,} bits; a checkpoint holds {MOST_BITS:,}"
        )
    if value is None or isinstance(value, str | int | float):
        return value
    raise StateError(f"{place} is a {type(value).__name__}, which a checkpoint does not hold")


def _encoded_key(key: Any, place: str, depth: int) -> Any:
    tensors: dict[str, Tensor] = {}
    plain = _encoded(key, f"a key of {place}", tensors, depth + 1)
    if tensors:
        raise StateError(f"a key of {place} is a tensor, which a checkpoint does not hold")
    return plain


def _moved(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    """Put a copy of a tensor among the others, and return its name there."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "sparse"
        if tensor.is_quantized:
            kind = "quantized"
        elif tensor.is_meta:
            kind = "meta"
        raise StateError(f"{place} is a {kind} tensor, which a checkpoint does not hold")
    readable = place.encode(errors="replace").decode()
    name = f"{len(tensors)} {readable}"
    on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg()
    tensors[name] = on_cpu.contiguous().clone()
    return name


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_encoded`."""
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decoded(content, tensors))
    if kind == "dict":
        return {_decoded(key, tensors): _decoded(item, tensors) for key, item in content}
    raise ValueError(f"it holds a {kind!r}")


def _decoded_1(value: Any, tensors: dict[str, Tensor], used: set[str]) -> Any:
    """A value of format 1. `used` gets the names of its tensors."""
    if isinstance(value, dict):
        return {key: _decoded_1(item, tensors, used) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded_1(item, tensors, used) for item in value]
    if isinstance(value, str) and value.startswith(REFERENCE_1):
        name = value.removeprefix(REFERENCE_1)
        used.add(name)
        return tensors[name]
    return value
