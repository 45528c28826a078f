"""Flower as it really runs: SuperLink and SuperNodes as processes on loopback, on free ports, ended by pid."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BIN = Path(sys.executable).parent
PYPROJECT = """
[project]
name = "test-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "signvote"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: Callable[[], object], seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"waited {seconds} s: {why}"
        time.sleep(0.2)


def write_app(folder: Path, module: Path, config: dict[str, object]) -> Path:
    """A Flower app of one module with `server` and `client` in it."""
    folder.mkdir()
    values = "".join(f'{k} = "{v}"\n' if isinstance(v, str) else f"{k} = {v}\n" for k, v in config.items())
    (folder / "pyproject.toml").write_text(PYPROJECT + values)
    shutil.copy(module, folder / "app.py")
    return folder


class Cluster:
    """Everything started here is told apart by its FLWR_HOME and ended with `stop`."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        home.mkdir(parents=True, exist_ok=True)
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        threads = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.environment = os.environ | quiet | threads | {"FLWR_HOME": str(home), "PATH": path}
        self.tls: list[str] = []  # of the SuperLink
        self.connection = "insecure = true\n"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process whose output goes to a file in the home."""
        with open(self.home / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.home
            )
        return self.processes[name]

    def superlink(self, *more: str) -> None:
        """Start it and wait until it listens."""
        listen = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        self.start("superlink", "flower-superlink", *listen, *(self.tls or ["--insecure"]), *more)
        address = f"127.0.0.1:{self.port}"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\n{self.connection}'
        )
        wait_for(self._listens, 600, f"the SuperLink does not listen\n{self.log('superlink')}")

    def _listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def flwr(self, *arguments: str, seconds: float = 900) -> str:
        """What a `flwr` command prints."""
        done = subprocess.run(
            ["flwr", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=self.home,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, app: Path, *more: str) -> str:
        """Start a run; its number."""
        found = re.search(r"started run (\d+)", self.flwr("run", str(app), "here", *more))
        assert found
        return found[1]

    def log(self, name: str) -> str:
        """What a process has printed so far."""
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pids(self, *, under: int | None = None) -> list[int]:
        """Processes of this cluster that are alive; `under`: one of them and its descendants."""
        mark, found = f"FLWR_HOME={self.home}".encode(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                        if state != "Z":
                            found[int(entry.name)] = int(parent)
                except OSError:
                    continue
        if under is None:
            return list(found)
        family, grown = {under}, True
        while grown:
            more = {pid for pid, parent in found.items() if parent in family} - family
            grown, family = bool(more), family | more
        return sorted(family & set(found))

    def kill(self, name: str) -> None:
        """SIGKILL to a process and everything below it."""
        process = self.processes.pop(name)
        for pid in self.pids(under=process.pid):
            _signal(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End all that is left, by pid."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                _signal(pid, number)
            end = time.monotonic() + 5
            while self.pids() and time.monotonic() < end:
                for process in self.processes.values():
                    process.poll()
                time.sleep(0.1)
        assert not self.pids()
        for process in self.processes.values():
            process.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def cluster(home: Path) -> Iterator[Cluster]:
    """A cluster that is gone afterwards, whatever happens."""
    made = Cluster(home)
    try:
        yield made
    finally:
        made.stop()
