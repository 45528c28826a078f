"""The core over TCP: a server and workers as processes, each with a checkpoint of its own.

A worker opens a connection for each round, sends its ballot and waits for the decision. If the connection breaks it
sends the same bytes again. The server decides when all ballots are there, saves, and answers; a ballot for a round that
is decided already gets the saved decision. So any process may die at any moment and be started again.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tests.ranks import PATIENCE
from torch import nn

from signvote import Layout, Server, Worker, checkpoint
from signvote.core.ballot import parse

INPUTS, OUTPUTS = 40, 30
STEP = 0.01
LENGTH = struct.Struct("<QQ")  # worker, bytes that follow
RETRY = 0.02  # seconds


def fresh() -> nn.Module:
    """The model that everybody starts from."""
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


def backward(model: nn.Module, worker: int, round: int) -> None:
    """The gradient of a worker in a round: noisier for some workers than for others."""
    noise = torch.Generator().manual_seed(1000 * worker + round)
    inputs = torch.randn(4 << worker % 4, INPUTS, generator=noise)
    targets = inputs[:, :OUTPUTS].sin() + torch.randn(len(inputs), OUTPUTS, generator=noise)
    model.zero_grad()
    ((model(inputs) - targets) ** 2).mean().backward()


def undisturbed(rule: str, workers: int, rounds: int) -> dict[str, Any]:
    """The same training in one process: the state of the server, and the model."""
    models = [fresh() for _ in range(workers)]
    voters = [Worker(model, m, momentum=0.9) for m, model in enumerate(models)]
    server = Server(Layout.of(models[0]), rule)
    for t in range(1, rounds + 1):
        ballots = {}
        for m, voter in enumerate(voters):
            backward(models[m], m, t)
            ballots[m] = voter.ballot(t)
        decision = server.decide(t, ballots)
        for voter in voters:
            voter.apply(decision, STEP)
    return {"server": server.state_dict(), "model": models[0].state_dict()}


# ---- the server --------------------------------------------------------------------------------------


class Desk:
    """The server, with what it must remember to be started again: its state and its last decision."""

    def __init__(self, rule: str, workers: int, folder: Path) -> None:
        self.server = Server(Layout.of(fresh()), rule)
        self.workers = workers
        self.path = folder / "server.safetensors"
        self.decision = b""
        if self.path.exists():
            saved = checkpoint.load(self.path)
            self.server.load_state_dict(saved["server"])
            self.decision = bytes(saved["decision"].tolist())

    @property
    def round(self) -> int:
        return self.server.last_round or 0

    def is_late(self, ballot: bytes) -> bool:
        """Whether its round is decided already."""
        return parse(ballot, layout=self.server.layout, run=0).round <= self.round

    def decide(self, ballots: dict[int, bytes]) -> None:
        self.decision = self.server.decide(self.round + 1, ballots)
        decision = torch.tensor(list(self.decision), dtype=torch.uint8)
        checkpoint.save(self.path, {"server": self.server.state_dict(), "decision": decision})


def serve(port: int, rule: str, workers: int, folder: str) -> None:
    """Decide round after round, until killed."""
    torch.set_num_threads(1)
    desk = Desk(rule, workers, Path(folder))
    waiting: dict[int, tuple[socket.socket, bytes]] = {}
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            link, _ = listener.accept()
            with suppress(OSError):
                link.settimeout(PATIENCE)
                worker, ballot = receive(link)
                if desk.is_late(ballot):
                    send(link, 0, desk.decision)
                else:
                    waiting[worker] = (link, ballot)  # instead of one whose link broke
            if len(waiting) == workers:
                desk.decide({m: ballot for m, (_, ballot) in waiting.items()})
                for link, _ in waiting.values():
                    with suppress(OSError):
                        send(link, 0, desk.decision)
                waiting = {}


# ---- a worker ----------------------------------------------------------------------------------------


def work(port: int, number: int, rounds: int, folder: str) -> None:
    """Vote until the last round; `worker-N.rounds` grows by a byte with each ballot that is computed."""
    torch.set_num_threads(1)
    path = Path(folder, f"worker-{number}.safetensors")
    model = fresh()
    worker = Worker(model, number, momentum=0.9)
    if path.exists():
        saved = checkpoint.load(path)
        model.load_state_dict(saved["model"])
        worker.load_state_dict(saved["worker"])
    with path.with_suffix(".rounds").open("ab", buffering=0) as computed:
        for t in range((worker.applied_round or 0) + 1, rounds + 1):
            backward(model, number, t)
            ballot = worker.ballot(t)
            computed.write(b".")
            worker.apply(ask(port, number, ballot), STEP)
            checkpoint.save(path, {"model": model.state_dict(), "worker": worker.state_dict()})
    path.with_suffix(".done").touch()


def ask(port: int, number: int, ballot: bytes) -> bytes:
    """The decision that a ballot is answered with, however often the link breaks."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE) as link:
            send(link, number, ballot)
            return receive(link)[1]
        time.sleep(RETRY)
    raise TimeoutError("the server does not answer")


# ---- messages ----------------------------------------------------------------------------------------


def send(link: socket.socket, worker: int, message: bytes) -> None:
    link.sendall(LENGTH.pack(worker, len(message)) + message)


def receive(link: socket.socket) -> tuple[int, bytes]:
    worker, size = LENGTH.unpack(exactly(link, LENGTH.size))
    return worker, exactly(link, size)


def exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionError("the link broke")
        data += piece
    return data
