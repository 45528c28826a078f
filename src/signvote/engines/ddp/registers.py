"""Small values that every worker holds for all others: read, and changed only if they are as expected.

Each worker serves the registers of its own process. A request and its answer are one frame each, on a connection of
their own: four bytes of length, then JSON. A process that is dead, stopped or cut off gives no answer, and the caller
knows after `within` seconds. Whoever serves never waits for another worker.

    {"read": [key, ...]}                             the values, null where there is none
    {"change": key, "from": value, "to": value}      the value afterwards
    {"tell": key, "value": value}                    for keys that anybody may write: they start with TOLD
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, TypeVar

from signvote.errors import EngineError

T = TypeVar("T")
Address = tuple[str, int]

TOLD = "told/"
LENGTH = struct.Struct("<I")
MOST_BYTES = 2**22  # of a frame
UNREACHABLE = (OSError, ValueError, EOFError)  # a connection that failed, a frame that is none


class Registers:
    """The registers of this process. Any thread may use them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, keys: Sequence[str]) -> list[Any]:
        """The values of some keys; None where there is none."""
        with self._lock:
            return [self._values.get(key) for key in keys]

    def get(self, key: str) -> Any:
        """One value."""
        return self.read([key])[0]

    def put(self, key: str, value: Any) -> None:
        """Set a value, whatever it was."""
        with self._lock:
            self._values[key] = value

    def drop(self, prefix: str) -> None:
        """Remove all keys that start so."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def told(self) -> dict[str, Any]:
        """What others have told this process, by key."""
        with self._lock:
            return {key: value for key, value in self._values.items() if key.startswith(TOLD)}

    def change(self, key: str, expected: Any, desired: Any) -> Any:
        """Set a value if it is as expected; the value afterwards. A key that is missing stays so."""
        with self._lock:
            if key in self._values and self._values[key] == expected:
                self._values[key] = desired
            return self._values.get(key)

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request."""
        if "read" in request:
            return self.read([str(key) for key in request["read"]])
        if "change" in request:
            return self.change(str(request["change"]), request["from"], request["to"])
        key = str(request["tell"])
        if not key.startswith(TOLD):
            raise ValueError(f"{key!r} is not for others to write")
        self.put(key, request["value"])
        return None


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: Address, registers: Registers) -> None:
        self.registers = registers
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other end went away, or sent what is no request."""


class _Handler(BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.settimeout(10.0)
        request = _received(self.request)
        _send(self.request, self.server.registers.answer(request))


def serve(registers: Registers, address: Address) -> Callable[[], None]:
    """Answer requests from now on, in threads; call the result to end it."""
    try:
        server = _Server(address, registers)
    except OSError as error:
        host, port = address
        raise EngineError(
            f"this worker cannot listen on {host}:{port} ({error}); its address must be one of this machine, and the"
            " port free"
        ) from error
    threading.Thread(
        target=server.serve_forever,
        args=(0.1,),
        name="signvote",
        daemon=True,
    ).start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end


# ---- asking --------------------------------------------------------------------------------------


class Refused(ConnectionRefusedError):
    """Nobody listens at an address: the process there is gone."""


def ask(address: Address, request: Mapping[str, Any], within: float) -> Any:
    """The answer of another process; an error of UNREACHABLE if there is none."""
    try:
        connection = socket.create_connection(address, within)
    except ConnectionRefusedError as error:
        raise Refused(str(error)) from error
    with connection:
        connection.settimeout(within)
        _send(connection, request)
        return _received(connection)


def ask_all(
    requests: Mapping[int, tuple[Address, Mapping[str, Any]]], within: float
) -> tuple[dict[int, Any], dict[int, Exception]]:
    """Ask several processes at once: the answers, and why others gave none."""
    answers: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    if not requests:
        return answers, failures
    with ThreadPoolExecutor(len(requests), "signvote-ask") as pool:
        pending = {who: pool.submit(ask, *where, within) for who, where in requests.items()}
        for who, future in pending.items():
            try:
                answers[who] = future.result()
            except UNREACHABLE as error:
                failures[who] = error
    return answers, failures


def _send(connection: socket.socket, content: Any) -> None:
    data = json.dumps(content).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 2**16))
        if not part:
            raise EOFError("the connection ended in the middle of a frame")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
