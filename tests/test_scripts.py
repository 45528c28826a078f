"""The scripts of the documentation run as they are shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
COMPLETE = re.compile(r"^(?:from|import) ")  # a block that begins so is a script of its own


def scripts(page: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if COMPLETE.match(block)]


def run(script: str, folder: Path, *launcher: str) -> str:
    """What a script prints. Warnings are errors in it, but for those of the launcher."""
    path = folder / "train.py"
    path.write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(3))
def test_quickstart(number: int, tmp_path: Path) -> None:
    found = scripts("quickstart.md")
    assert len(found) == 3
    run(found[number], tmp_path, "-W", "error")


@pytest.mark.slow
def test_torch_distributed(tmp_path: Path) -> None:
    script, *_ = scripts("ddp.md")
    out = run(script, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    losses = [float(loss) for loss in re.findall(r"rank \d: loss (\d+\.\d+)", out)]
    assert len(losses) == 2
    assert max(losses) < 0.5
