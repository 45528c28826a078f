"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace a file. After a crash it holds all of the old data or all of the new data, part after part."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(new, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # the error of a full disk does not name the file
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power cut, too
    finally:
        os.close(folder)
