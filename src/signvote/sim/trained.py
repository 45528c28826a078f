"""What a run leaves behind: its result and its model, in a folder that held nothing else."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from signvote.errors import ConfigError
from signvote.results import results_file

CHECKPOINT = "checkpoint.safetensors"
RESULT = "result.json"


class Trained(dict[str, Any]):
    """The result of a run, as `result.json` holds it, with the trained model.

    Attributes:
        model: a copy, on the device of the run.

    """

    def __init__(self, result: dict[str, Any], model: nn.Module) -> None:
        super().__init__(result)
        self.model = deepcopy(model)


def check_folder(out: Path, *, resume: bool) -> None:
    """Refuse a folder whose run or results would be lost."""
    if (out / CHECKPOINT).exists() or (out / RESULT).exists():
        if not resume:
            raise ConfigError(
                f"{out} holds a run already; add --resume to continue it (in Python, resume=True),"
                " or choose another folder"
            )
        return
    if results_file(out).exists():
        raise ConfigError(f"{out} holds the results of other runs; choose another folder")
