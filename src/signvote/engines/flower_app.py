"""Writes a Flower app to start from: a copy of the folder `flower_mnist`, whose files end in .txt here.

Not part of the package `flower`, because it needs no flwr.
"""

from __future__ import annotations

from pathlib import Path

from signvote.errors import ConfigError

TEMPLATE = Path(__file__).parent / "flower_mnist"


def write_app(folder: Path) -> list[Path]:
    """Write the app into a new or empty folder; the files written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not an empty folder; choose another name")
    written = []
    for source in sorted(TEMPLATE.rglob("*.txt")):
        path = folder / source.relative_to(TEMPLATE).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
        written.append(path)
    return written
