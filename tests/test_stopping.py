"""Ctrl-C, in the first second and later: status 130, a valid result, and the command that resumes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from signvote import checkpoint
from signvote.sim import Config
from signvote.sim.compare import _pool, name_of
from tests.ranks import PATIENCE
from tests.test_package import command

INTERRUPTED = """
import os, signal, sys
class Now:
    def find_spec(self, name, *rest):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Now())
sys.argv[1:] = {arguments}
from signvote.cli import main
main()
"""  # Ctrl-C as a module is being imported


@pytest.mark.parametrize("name", ["signvote.cli.commands", "tyro", "torch", "signvote.sim.compare"])
def test_ctrl_c_in_the_first_second_is_status_130_and_one_line(name: str, tmp_path: Path) -> None:
    arguments = ["compare", "--model", "mlp", "--rounds", "1", "--out", str(tmp_path / "out")]
    code = INTERRUPTED.format(name=name, arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == f"Stopped. To resume: signvote {shlex.join(arguments)}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ctrl_c_before_the_first_run_starts_none(tmp_path: Path) -> None:
    """The whole process group gets the signal while the processes of the runs start."""
    out = tmp_path / "out"
    arguments = ["compare", "--model", "mlp", "--rounds", "3", "--out", str(out)]
    code = (
        "import concurrent.futures.process as p, os, signal, sys\n"
        "import signvote.sim.compare as c\n"
        "submit = p.ProcessPoolExecutor.submit\n"
        "def late(pool, *given):\n    future = submit(pool, *given)\n    os.killpg(0, signal.SIGINT)\n"
        "    return future\n"
        "p.ProcessPoolExecutor.submit = late\n"
        f"sys.argv[1:] = {arguments}\n"
        "from signvote.cli import main\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    (tmp_path / "late.py").write_text(code)
    line = [sys.executable, str(tmp_path / "late.py")]
    ended = subprocess.run(line, capture_output=True, text=True, start_new_session=True)
    assert ended.returncode == 130
    assert (
        ended.stderr == f"Stopped; 6 of 6 runs are unfinished. To resume: signvote {shlex.join(arguments)}\n"
    )
    assert not (out / "runs").exists()


WAITING = """
import sys, time
from dataclasses import replace
from pathlib import Path
import signvote.sim, signvote.sim.compare
from signvote.cli import main
train, here = signvote.sim.train, Path(__file__).parent

def waiting(config, task, out, *, watch=lambda run: None, **rest):
    def patient(run):
        stop = watch(run)
        if run.round == 5:
            (out / "waits").touch()
            while not (stop or (here / "go").exists()):
                stop = watch(run)
                time.sleep(0.02)
        return stop
    return train(config, task, out, watch=patient, **rest)

signvote.sim.compare.train = signvote.sim.train = waiting
if __name__ == "__main__":
    main()
"""  # signvote, but every run waits after round 5: until it is told to stop, or there is a file `go`


def waiting(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start signvote in a process group of its own; its runs wait after round 5."""
    (folder / "waiting.py").write_text(WAITING)
    return subprocess.Popen(
        [sys.executable, str(folder / "waiting.py"), *arguments],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_result_and_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("train", "--model", "mlp", "--rounds", "40", "--evaluate-every", "10", "--out", str(out))
    process = waiting(tmp_path, *arguments)
    wait_for_file(out / "waits", process)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    shown, err = process.communicate()
    assert process.returncode == 130, err
    assert "5 of 40 rounds, unfinished" in " ".join(shown.split())
    assert f"Stopped after round 5 of 40. To resume: signvote {shlex.join(arguments)} --resume\n" in err
    result = json.loads((out / "result.json").read_text())
    assert (result["status"], result["rounds_done"]) == ("interrupted", 5)
    assert checkpoint.load(out / "checkpoint.safetensors")["round"] == 5
    again = command(*arguments)
    assert again.returncode == 2
    assert "holds a run already; add --resume to continue it" in again.stderr


@pytest.mark.slow
def test_ctrl_c_stops_a_comparison_which_then_goes_on(tmp_path: Path) -> None:
    """The whole process group gets the signal, as from a terminal."""
    grid = tmp_path / "grid"
    arguments = [
        "compare",
        "--model",
        "mlp",
        "--rounds",
        "12",
        "--rules",
        "majority",
        "weighted",
        "--modes",
        "4",
    ]
    arguments += ["--jobs", "2", "--out", str(grid)]
    process = waiting(tmp_path, *arguments)
    for rule in ("majority", "weighted"):
        name = name_of(Config(task="mnist-10k", rule=rule, mode=4))
        wait_for_file(grid / "runs" / name / "waits", process)
    os.killpg(process.pid, signal.SIGINT)
    shown, err = process.communicate()
    assert process.returncode == 130, err
    assert f"Stopped; 2 of 2 runs are unfinished. To resume: signvote {shlex.join(arguments)}\n" in err
    results = json.loads((grid / "results.json").read_text())
    assert [(run["status"], run["rounds_done"]) for run in results["runs"]] == [("interrupted", 5)] * 2
    (tmp_path / "go").touch()
    shown, err = waiting(tmp_path, *arguments).communicate()
    assert "unfinished" not in shown + err
    results = json.loads((grid / "results.json").read_text())
    assert [run["rounds_done"] for run in results["runs"]] == [12, 12]


def test_a_second_ctrl_c_tells_the_runs_to_stop() -> None:
    with pytest.raises(KeyboardInterrupt), _pool(1) as (_, _, stop):
        raise KeyboardInterrupt
    assert stop.is_set()


@pytest.mark.slow
def test_the_runs_of_a_killed_comparison_end(tmp_path: Path) -> None:
    grid = tmp_path / "grid"
    arguments = ("--model", "mlp", "--rules", "majority", "--modes", "4", "--jobs", "1", "--out", str(grid))
    process = waiting(tmp_path, "compare", *arguments)
    name = name_of(Config(task="mnist-10k", rule="majority", mode=4))
    wait_for_file(grid / "runs" / name / "waits", process)
    process.kill()
    process.communicate(timeout=PATIENCE)  # returns when no process has its output open any more
