"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either the old one or all of the new one, whatever happens meanwhile."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk does not say which file it was
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must survive a power cut
    finally:
        os.close(folder)
