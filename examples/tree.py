"""One root, four relays, 64 workers: a tree of servers that decides what one server would, bit for bit.

    python examples/tree.py                                      # 9 processes, some seconds
    python examples/tree.py --rule robust --workers 128
    python examples/tree.py --lose 2 --rounds 10                 # relay 2 dies in the middle of round 5

Rank 0 is the root and ranks 1 to 4 are relays. Each relay has a process for its workers, which train a
small model on data of their own. All messages are bytes, carried by torch.distributed. With --check, which
is the default, the root also gets copies of the ballots, and compares each decision with that of one server.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from signvote import RULES, Layout, Server, Worker
from signvote.core.ballot import parse
from signvote.core.relay import Relay
from signvote.core.root import Root
from signvote.core.wire import Form, form_of

INPUTS, CLASSES = 20, 4


# ---- bytes between ranks -----------------------------------------------------------------------------


def send(message: bytes, rank: int) -> None:
    """Send a message; one to a rank that died is lost."""
    try:
        dist.send(torch.tensor([len(message)]), rank)
        dist.send(torch.frombuffer(bytearray(message or b"0"), dtype=torch.uint8), rank)
    except RuntimeError:
        pass


def receive(rank: int) -> bytes | None:
    """The next message from a rank; None if it died."""
    try:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)
        data = torch.zeros(max(1, int(size)), dtype=torch.uint8)
        dist.recv(data, rank)
    except RuntimeError:
        return None
    return bytes(data.numpy().tobytes()[: int(size)])


# ---- the three parts ---------------------------------------------------------------------------------


def root(options: argparse.Namespace, layout: Layout) -> str:
    """Decides and learns; a summary."""
    server, one = Server(layout, options.rule), Server(layout, options.rule)
    relays = range(1, options.relays + 1)
    total_bytes = [0, 0]  # ballots, partial tallies
    for t in range(1, options.rounds + 1):
        tree = Root(server, t)
        weights = tree.weigh([receive(relay) for relay in relays])
        verdict = None
        while verdict is None:
            for relay, message in zip(relays, weights, strict=True):
                send(message, relay)
            partials = [receive(relay) for relay in relays]
            total_bytes[1] += sum(len(partial) for partial in partials if partial)
            verdict = tree.decide(partials)
            weights = tree.weights
        for relay in relays:
            send(verdict, relay)
        tree.learn([receive(relay) for relay in relays])
        if options.check:
            ballots = {}
            for relay in relays:
                for _ in range(int(receive(relay) or 0)):
                    ballot = receive(relay) or b""
                    total_bytes[0] += len(ballot)
                    ballots[parse(ballot, layout=layout, run=0).worker] = ballot
            assert one.decide(t, ballots) == tree.decision, f"round {t}: the tree differs from one server"
            assert one.report == server.report
    same = "as one server would, bit for bit" if options.check else "unchecked"
    voters = len(server.report.voters)
    text = f"{options.rounds} rounds decided {same}; {voters} workers voted in the last\n"
    instead = f" instead of {total_bytes[0]:,} bytes of ballots" if options.check else ""
    return text + f"into the root: {total_bytes[1]:,} bytes of tallies{instead}"


def relay(options: argparse.Namespace, layout: Layout, rank: int) -> None:
    """Stands for its workers."""
    mine = Relay(Server(layout, options.rule))
    crew = rank + options.relays  # the rank of its workers
    for t in range(1, options.rounds + 1):
        branch = mine.open(t)
        ballots = []
        for worker in workers_of(options, rank):
            ballot = receive(crew) or b""
            branch.add(worker, ballot)
            ballots.append(ballot)
        send(branch.roll(), 0)
        verdict = None
        while verdict is None:
            message = receive(0) or b""
            if rank == options.lose and t == 5:
                os._exit(0)  # in the middle of a round: its workers have been weighed already
            if form_of(message) is Form.VERDICT:  # else weights, perhaps again, because another relay died
                verdict = message
            else:
                branch.weigh(message)
                send(branch.partial(), 0)
        send(branch.decide(verdict), crew)
        send(branch.evidence(), 0)
        if options.check:
            send(str(len(ballots)).encode(), 0)
            for ballot in ballots:
                send(ballot, 0)


def crew(options: argparse.Namespace, rank: int) -> None:
    """The workers of a relay: each has a model, data and a batch size of its own."""
    parent = rank - options.relays
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    numbers = workers_of(options, parent)
    models = [model() for _ in numbers]
    sizes = [4 if number % 8 else 64 for number in numbers]
    workers = [Worker(m, n, batch_size=b) for m, n, b in zip(models, numbers, sizes, strict=True)]
    for t in range(1, options.rounds + 1):
        losses = []
        for net, worker, size in zip(models, workers, sizes, strict=True):
            random = torch.Generator().manual_seed(1000 * t + worker.worker_id)
            inputs = torch.randn(size, INPUTS, generator=random)
            loss = nn.functional.cross_entropy(net(inputs), (inputs @ teacher).argmax(1))
            net.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            send(worker.ballot(t), parent)
        decision = receive(parent)
        if decision is None:
            return  # the relay died: find another one, or stay away
        for worker in workers:
            worker.apply(decision, step=0.01)
        if rank == 2 * options.relays and t in (1, options.rounds):
            print(
                f"round {t}: mean loss of the last relay's workers {sum(losses) / len(losses):.2f}",
                flush=True,
            )


def workers_of(options: argparse.Namespace, relay: int) -> range:
    """The workers of a relay."""
    return range(relay - 1, options.workers, options.relays)


def model() -> nn.Module:
    """The same for all."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def run(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    world = 1 + 2 * options.relays
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(minutes=10)
    )
    part(rank, options)


def part(rank: int, options: argparse.Namespace) -> str:
    """What a rank does; on rank 0, a summary."""
    layout = Layout.of(model())
    if rank == 0:
        text = root(options, layout)
        print(text)
        return text
    if rank <= options.relays:
        relay(options, layout, rank)
    else:
        crew(options, rank)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rule", default="weighted", choices=[name for name in RULES if not RULES[name].corrects]
    )
    parser.add_argument("--relays", type=int, default=4)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lose", type=int, default=0, help="a relay that dies in round 5; 0: none")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (options, f"{folder}/meeting"), nprocs=1 + 2 * options.relays)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
