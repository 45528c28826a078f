"""Links that are slow or cut: a relay for TCP connections, and a network namespace that `tc` shapes."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from soak.driver import Skipped

PIECE = 4096


class Relay:
    """Listens on a port of loopback and passes everything on to another one, slowly if told so."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.bytes_a_second = 0  # 0: as fast as it goes
        self.faults = 0
        self._open = True  # False: the link is cut, and nobody is let in
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._open:
                    threading.Thread(target=self._connect, args=(client,), daemon=True).start()
                else:
                    client.close()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        self._pairs += [client, server]
        threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                if self.bytes_a_second:
                    time.sleep(len(piece) / self.bytes_a_second)
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self, seconds: float) -> None:
        """Break every connection, and accept none for a while."""
        self.faults += 1
        self._open = False
        self._break()
        time.sleep(seconds)
        self._open = True

    def slow(self, bytes_a_second: int, seconds: float) -> None:
        """Be slow for a while."""
        self.faults += 1
        self.bytes_a_second = bytes_a_second
        time.sleep(seconds)
        self.bytes_a_second = 0

    def close(self) -> None:
        """End it."""
        self._listener.close()
        self._break()

    def _break(self) -> None:
        pairs, self._pairs = self._pairs, []
        for end in pairs:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay that is gone afterwards."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()


class Namespace:
    """A network of its own, whose only link, loopback, can be slow or down."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults = 0

    def shape(self, kbit: int) -> None:
        """The speed of the link; 0: as fast as it goes."""
        how = f"tbf rate {kbit}kbit burst 16000 latency 400ms" if kbit else "noqueue"
        _ip("tc", "-n", self.name, "qdisc", "replace", "dev", "lo", "root", *how.split())

    def slow(self, kbit: int, seconds: float) -> None:
        """Be slow for a while."""
        self.faults += 1
        self.shape(kbit)
        time.sleep(seconds)
        self.shape(0)

    def cut(self, seconds: float) -> None:
        """Lose every packet for a while; connections stay."""
        self.faults += 1
        _ip("ip", "-n", self.name, "link", "set", "lo", "down")
        time.sleep(seconds)
        _ip("ip", "-n", self.name, "link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """The command, to be run in this network."""
        return ["ip", "netns", "exec", self.name, *command]


@contextmanager
def namespace(chance: random.Random) -> Iterator[Namespace]:
    """A network that is gone afterwards."""
    made = Namespace(f"soak-{os.getpid()}-{chance.randrange(10**6)}")
    try:
        _ip("ip", "netns", "add", made.name)
        _ip("ip", "-n", made.name, "link", "set", "lo", "up")
        made.shape(0)
        yield made
    finally:
        subprocess.run(["ip", "netns", "delete", made.name], capture_output=True)


def _ip(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise Skipped(f"`{command[0]}` is missing: install iproute2") from None
    if done.returncode:
        raise Skipped(f"`{' '.join(command)}` failed, which needs root: {done.stderr.strip()}")
