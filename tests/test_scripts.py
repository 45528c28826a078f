"""The scripts of the documentation run as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher import launched

DOCS = Path(__file__).parents[1] / "docs"
COMPLETE = re.compile(r"^(?:from|import) ")  # a block that begins so is a script of its own


def scripts(page: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if COMPLETE.match(block)]


def run(script: str, folder: Path) -> str:
    """What a script prints. Warnings are errors in it."""
    path = folder / "train.py"
    path.write_text(script)
    done = launched("-W", "error", str(path), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(3))
def test_quickstart(number: int, tmp_path: Path) -> None:
    found = scripts("quickstart.md")
    assert len(found) == 3
    run(found[number], tmp_path)


@pytest.mark.slow
def test_torch_distributed(tmp_path: Path) -> None:
    script, *_ = scripts("ddp.md")
    (tmp_path / "train.py").write_text(script)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = launched(*launch, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    losses = [float(loss) for loss in re.findall(r"rank \d: loss (\d+\.\d+)", out)]
    assert len(losses) == 2
    assert max(losses) < 0.5


ENDS_AT_ONCE = """
import sys
import time

import torch
import torch.distributed as dist

import signvote


class Late:  # gives way to other threads while the interpreter ends
    def __del__(self):
        time.sleep(0.05)


dist.init_process_group("gloo")
weights = torch.zeros(100, requires_grad=True)
optimizer = signvote.Vote([weights], lr=1e-2)
late = Late()
late.itself = late
sys.setswitchinterval(1000)  # threads of gloo wait for Python until this one waits
for _ in range(3):
    weights.grad = torch.ones(100)
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()\n"])
def test_a_script_that_ends_after_a_step_is_not_aborted(end: str, tmp_path: Path) -> None:
    """A thread of gloo that frees a tensor while Python ends would abort the process."""
    (tmp_path / "train.py").write_text(ENDS_AT_ONCE + end)
    done = launched(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
