"""Does `make test` pass every time? Runs it again and again in a fresh clone, alone or beside busy cores.

    python -m tests.steady 10            10 runs with the cores to themselves
    python -m tests.steady 10 --busy     10 more, each core shared with an endless loop

Prints a line per run: seconds, exit code, pytest's last line, processes left behind (and with them ports).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = f"SIGNVOTE_STEADY={os.getpid()}"  # in the environment of every process that a run starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--busy", action="store_true", help="keep every core busy with an endless loop")
    options = parser.parse_args()
    passed = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "signvote"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(
            ["make", "--quiet", "lint"], cwd=clone, check=True, capture_output=True
        )  # installs, too
        cores = os.cpu_count() or 1
        with busy(cores if options.busy else 0):
            for number in range(1, options.runs + 1):
                passed += once(clone, number)
    print(f"{passed} of {options.runs} passed")
    sys.exit(passed < options.runs)


def once(clone: Path, number: int) -> bool:
    """One run and its line; what a failing run printed is kept."""
    start = time.monotonic()
    name, value = MARK.split("=")
    run = subprocess.run(
        ["make", "test"], cwd=clone, env=os.environ | {name: value}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.monotonic() - start
    summary = re.findall(r"^\d+ (?:passed|failed).*$", run.stdout, re.MULTILINE)
    left = lingering()
    print(
        f"run {number}: {seconds:.0f} s, exit {run.returncode}, {summary[-1:]}, left behind: {left or 'nothing'}",
        flush=True,
    )
    good = run.returncode == 0 and not left
    if not good:
        kept = Path(tempfile.gettempdir()) / f"signvote-steady-{os.getpid()}-{number}.log"
        kept.write_text(run.stdout)
        print(f"  its output: {kept}", flush=True)
    return good


def lingering() -> list[str]:
    """Processes of a run that do not end within half a minute of it; to end takes a busy machine a moment."""
    give_up = time.monotonic() + 30
    while (left := list(left_behind())) and time.monotonic() < give_up:
        time.sleep(1)
    return left


def left_behind() -> Iterator[str]:
    """Processes of a run that outlived it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Endless loops, as many as there are cores."""
    loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
