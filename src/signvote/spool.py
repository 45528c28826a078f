"""Ballots of a round beyond a limit of memory, in a temporary file."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np

from signvote.errors import ConfigError, DataError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 2**26  # bytes of the file that are mapped at a time: a process may have some ten thousand mappings


class Spool:
    """Keeps ballots in memory up to a limit, and writes further ones to a temporary file.

    The file has no name, so it is gone when the round is decided, or when the process ends, however it ends. A ballot
    that does not fit the disk raises a DataError; the round goes on with the ballots that it has.

    Args:
        keep_bytes: of packed ballots that stay in memory.
        folder: where the file is; None: where temporary files are.

    >>> spool = Spool(keep_bytes=2)
    >>> [spool.keep(np.array([1, 2], np.uint8)).tolist() for _ in range(3)]
    [[1, 2], [1, 2], [1, 2]]
    >>> spool.bytes_in_file
    4

    """

    def __init__(self, keep_bytes: int, folder: str | os.PathLike[str] | None = None) -> None:
        if keep_bytes < 0:
            raise ConfigError(f"keep_bytes is {keep_bytes}; it must be 0 or more")
        self.keep_bytes = keep_bytes
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._lock = Lock()
        self._file: IO[bytes] | None = None
        self._close: Callable[[], object] = lambda: None  # also called when nobody has the spool any more
        self._map: mmap.mmap | None = None
        self._start = 0  # of the map in the file
        self._used = 0  # bytes of the map
        self.clear()

    def keep(self, packed: Bytes) -> Bytes:
        """The same bits, in memory or in the file."""
        with self._lock:
            if self.bytes_in_memory + packed.nbytes <= self.keep_bytes:
                self.bytes_in_memory += packed.nbytes
                return packed
            try:
                return self._written(packed)
            except OSError as error:
                raise DataError(
                    f"a ballot of {packed.nbytes:,} bytes cannot be written to {self.folder},"
                    f" which has {self.bytes_in_file:,} bytes of this round: {error.strerror}"
                ) from error

    def _written(self, packed: Bytes) -> Bytes:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115  # see `_close`
            self._close = weakref.finalize(self, self._file.close)
        if self._map is None or self._used + packed.nbytes > len(self._map):
            self._map_more(max(BLOCK, packed.nbytes))
        assert self._map is not None
        self._file.seek(self._start + self._used)
        left = memoryview(packed.tobytes())
        while left:  # by `write` and not through the map, where a full disk would kill the process
            left = left[self._file.write(left) :]
        there = np.frombuffer(self._map, np.uint8, packed.nbytes, self._used)
        self._used += packed.nbytes
        self.bytes_in_file += packed.nbytes
        return there

    def _map_more(self, size: int) -> None:
        """Map the next part of the file, which needs no room on the disk until it is written."""
        assert self._file is not None
        start = self._start + (0 if self._map is None else len(self._map))
        size += -size % mmap.ALLOCATIONGRANULARITY
        self._file.truncate(start + size)
        self._map = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ, offset=start)
        self._start = start
        self._used = 0

    def clear(self) -> None:
        """Drop all ballots, and the file."""
        with self._lock:
            self._close()
            self._file = None
            self._map = None  # closed with the last ballot that refers to it
            self._start = self._used = 0
            self.bytes_in_memory = self.bytes_in_file = 0
