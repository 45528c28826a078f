"""Writes a Flower app to start from: a copy of the folder `flower_mnist`, without the suffix .txt of its files.

This is not part of the package `flower`, because it does not need flwr.
"""

from __future__ import annotations

from pathlib import Path

from signvote.errors import ConfigError

TEMPLATE = Path(__file__).parent / "flower_mnist"


def write_app(folder: Path | str) -> list[Path]:
    """Write the app into a new or empty folder. Returns the files."""
    folder = Path(folder)
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty_folder:
        raise ConfigError(f"{folder} is there already and not an empty folder; choose another name")
    written = []
    for source in sorted(TEMPLATE.rglob("*.txt")):
        name = source.relative_to(TEMPLATE).with_suffix("")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
        written.append(path)
    return written
