"""A disk that fills up: a small tmpfs where this user may mount one, else a limit on the size of files."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4096


@dataclass(frozen=True)
class Disk:
    """A folder on a disk that can be filled and freed again."""

    folder: Path
    is_mounted: bool  # False: files of this process, and of those that it starts, get a limit instead

    def fill(self, *, leave_kib: int) -> None:
        """Leave so much space."""
        if not self.is_mounted:
            limit_files(leave_kib)
            return
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(BLOCK)) == BLOCK:
                    pass
            except OSError:
                size = file.tell()
            file.truncate(max(0, size - leave_kib * 1024))

    def free(self) -> None:
        """Leave all space again."""
        if self.is_mounted:
            self.ballast.unlink(missing_ok=True)
        else:
            limit_files(None)

    @property
    def ballast(self) -> Path:
        """The file that fills the disk."""
        return self.folder / "ballast"


@contextmanager
def small_disk(folder: Path, *, kib: int) -> Iterator[Disk]:
    """A disk of this size, mounted at a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "soak", str(folder)]
    mounted = subprocess.run(mount, capture_output=True)
    disk = Disk(folder, is_mounted=mounted.returncode == 0)
    try:
        yield disk
    finally:
        disk.free()
        if disk.is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def limit_files(kib: int | None) -> None:
    """Let a write beyond this size fail with an OSError; None: as large as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = hard if kib is None else kib * 1024
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
