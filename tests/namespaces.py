"""Hosts on one machine: network namespaces that a bridge joins. It needs root, on Linux."""

from __future__ import annotations

import os
import subprocess


class Refused(Exception):
    """Why this machine cannot have such hosts."""


def run(*command: str) -> None:
    """Run a command; say what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(f"`{command[0]}` is missing; install iproute2") from None
    if done.returncode:
        raise Refused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


class Namespaces:
    """A namespace for each host, and one for the bridge between them; eth0 of host h has SUBNET.(h + 1).

    Args:
        name: begins the names of the namespaces.
        subnet: the first three numbers of the addresses, such as "10.77.0".
        count: of hosts.

    """

    def __init__(self, name: str, subnet: str, count: int) -> None:
        self.names = [f"{name}-{os.getpid()}-{host}" for host in range(count)]
        self.bridge = f"{name}-{os.getpid()}-bridge"
        self.subnet = subnet

    def build(self) -> None:
        """Make them."""
        for name in (self.bridge, *self.names):
            run("ip", "netns", "add", name)
        run("ip", "-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            peer = ("peer", "name", port, "netns", self.bridge)
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
            run("ip", "-n", name, "address", "add", f"{self.subnet}.{host + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")

    def link(self, host: int, state: str) -> None:
        """Cut or mend a link, "down" or "up", on the side of the bridge: the host itself notices nothing."""
        run("ip", "-n", self.bridge, "link", "set", f"port{host}", state)

    def tear_down(self) -> None:
        """Remove what there is."""
        for name in (*self.names, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
