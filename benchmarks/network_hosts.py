"""Four hosts on one machine: namespaces joined by links that `tc` shapes, and a process on each that does as told.

Every host is a network namespace, joined to the others by a bridge in another one; each end of each link is shaped by
tbf, so a host has the given speed up and down (0: not shaped).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

from tests.namespaces import Namespaces, Refused, run

HOSTS = 4


class Network(Namespaces):
    """Four hosts whose links can be shaped; eth0 of host r has 10.77.0.(r+1)."""

    def __init__(self) -> None:
        super().__init__("signvote", "10.77.0", HOSTS)

    def shape(self, mbit: int) -> None:
        """The speed of every link, up and down; 0: as fast as it goes."""
        burst = max(mbit * 10**6 // 8 // 250, 16_000 if mbit <= 10 else 64_000)  # bytes, 4 ms of the rate
        how = f"tbf rate {mbit}mbit burst {burst} latency 100ms" if mbit else "noqueue"
        ports = [(self.bridge, f"port{rank}") for rank in range(HOSTS)]
        for name, device in (*((name, "eth0") for name in self.names), *ports):
            run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *how.split())


class Crew:
    """A process on each host, told what to do."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.errors = [TemporaryFile("w+") for _ in range(HOSTS)]  # noqa: SIM115

    def start(self, network: Network, arguments: list[str]) -> None:
        """Start them."""
        local = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        for rank, name in enumerate(network.names):
            command = [sys.executable, "-m", "benchmarks.network", "--rank", str(rank), *arguments]
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors[rank], text=True, env={**os.environ, **local}, start_new_session=True,
            )  # fmt: skip
            self.processes.append(process)

    def all(self, *command: object) -> list[Any]:
        """Tell all hosts the same; their replies."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._reply(rank) for rank in range(len(self.processes))]

    def _reply(self, rank: int) -> Any:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            time.sleep(1)  # for the others to say what happened to them
            for file in self.errors:
                file.seek(0)
            said = (f"host {r}: {file.read()[-1500:]}" for r, file in enumerate(self.errors))
            raise RuntimeError(f"host {rank} is gone. They said:\n" + "\n".join(said))
        return json.loads(line)

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def hosts(arguments: list[str]) -> Iterator[tuple[Network, Crew]]:
    """The network and its processes; nothing of them is left afterwards."""
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise Refused(f"`{missing[0]}` is missing; install iproute2")
    network, crew = Network(), Crew()
    try:
        network.build()
        crew.start(network, arguments)
        yield network, crew
    finally:
        crew.stop()
        network.tear_down()
