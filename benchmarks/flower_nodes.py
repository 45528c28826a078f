"""What does the server of a Flower run do for each node, as nodes become many?

    nice python -m benchmarks.flower_nodes                     # replies that are made here: one minute
    nice python -m benchmarks.flower_nodes --simulated 1000    # Flower's simulation of as many nodes

Three rounds of 1,000 and of 10,000 nodes in this process. A reply is a ballot of 64 coordinates in its node's name.
Prints processor seconds a round of the server by part, without the replies, and the ratio: 10 is linear; and the bytes
of a message by part. Simulated, it prints the seconds of a round. Writes benchmarks/flower/nodes.json, simulated.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from tests.flower_cluster import cluster, write_app
from tests.flower_grid import LocalGrid

from signvote import Layout, Worker
from signvote.core.rounds import Round
from signvote.core.server import Server
from signvote.engines.flower import SignVote
from signvote.engines.flower.records import BALLOT, INSTRUCTION, METRICS, STATUS, to_array
from signvote.engines.flower.requests import Requests
from signvote.engines.flower.sampling import Sampling

ROUNDS = 3
SIZES = (1_000, 10_000)
RULES = ("majority", "weighted")
OUT = Path(__file__).parent / "flower"
APP = Path(__file__).parent / "flower_apps" / "nodes.py"
PARTS: dict[str, tuple[type, str]] = {
    "choosing nodes": (Sampling, "choose"),
    "messages": (Requests, "to"),
    "ballots": (Round, "add"),
    "decision": (Round, "close"),
    "learning": (Server, "settle"),
}


class Replies(LocalGrid):
    """Answers for all nodes, and measures how long that takes."""

    def __init__(self, nodes: int, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__({})
        self.online = set(range(nodes))
        self.parameters = parameters
        self.seconds = 0.0
        self.last: tuple[Message, Message] | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages."""
        names = [f"message {message.metadata.dst_node_id}" for message in messages]
        self.sent |= dict(zip(names, messages, strict=True))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """A ballot for each message."""
        start = time.process_time()
        replies = [self.reply(self.sent.pop(name)) for name in sorted(message_ids)]
        self.seconds += time.process_time() - start
        return replies

    def reply(self, message: Message) -> Message:
        """The ballot of one node."""
        instruction = message.content[INSTRUCTION]
        assert isinstance(instruction, ConfigRecord)
        number, round = instruction["worker"], instruction["round"]
        assert isinstance(number, int)
        assert isinstance(round, int)
        content = RecordDict()
        ballot = Worker(self.parameters, number).ballot(round)
        content[BALLOT] = ArrayRecord({BALLOT: to_array(ballot)})
        content[METRICS] = MetricRecord({"loss": 1.0})
        content[STATUS] = ConfigRecord({"applied": round - 1})
        name = f"message {message.metadata.dst_node_id}"
        message.metadata.__dict__["_message_id"] = name
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        self.last = message, reply
        return reply


def timed(seconds: Counter[str], part: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; adds its processor time to a part."""

    @wraps(work)
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        found = work(*args, **kwargs)
        seconds[part] += time.process_time() - start  # type: ignore[assignment]
        return found

    return measured


def by_part(nodes: int, rule: str) -> tuple[dict[str, float], dict[str, int]]:
    """Processor seconds a round of the server, and bytes of the last message and its reply."""
    seconds = Counter[str]()
    originals = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, timed(seconds, part, originals[part]))
    parameters = {"w": torch.randn(64)}
    parameters["w"].grad = torch.randn(64)
    grid = Replies(nodes, parameters)
    strategy = SignVote(Layout.of(parameters), rule)
    try:
        start = time.process_time()
        strategy.start(grid, ArrayRecord(parameters), num_rounds=ROUNDS)
        total = time.process_time() - start - grid.seconds
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])
    found = {part: seconds[part] / ROUNDS for part in PARTS}
    found["the rest"] = total / ROUNDS - sum(found.values())
    found["all"] = total / ROUNDS
    assert grid.last is not None
    down, up = (bytes_of(message) for message in grid.last)
    sizes = {f"down: {part}": size for part, size in down.items()}
    sizes |= {f"up: {part}": size for part, size in up.items()}
    return found, sizes


def bytes_of(message: Message) -> dict[str, int]:
    """Bytes of a message by record, as Flower writes them."""
    sizes = {name: _size(record) for name, record in message.content.items()}
    return {**sizes, "envelope": _size(message) - sum(sizes.values())}


def _size(thing: Any) -> int:
    return sum(len(each.deflate()) for each in get_all_nested_objects(thing).values())


def made_here() -> None:
    """Print and keep the tables of replies that are made here."""
    torch.set_num_threads(1)
    by_part(10, "weighted")  # compiles what needs compiling
    kept: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for rule in RULES:
        (few, _), (many, sizes) = (by_part(nodes, rule) for nodes in SIZES)
        kept[rule] = dict(zip(SIZES, (few, many), strict=True))
        print(f"| {rule} | {SIZES[0]:,} nodes | {SIZES[1]:,} nodes | times |\n|---|---|---|---|")
        for part in few:
            print(f"| {part} | {few[part]:.3f} s | {many[part]:.2f} s | {many[part] / few[part]:.1f} |")
    print("\n".join(f"| {part} | {size} |" for part, size in sizes.items()))
    keep("nodes.json", {"seconds": kept, "bytes": sizes})


def simulated(nodes: int, rounds: int, fraction: float) -> None:
    """Print and keep the seconds of a round of Flower's simulation."""
    with tempfile.TemporaryDirectory() as name, cluster(Path(name) / "home") as c:
        c.superlink("--simulation")
        out = Path(name) / "found.json"
        config = {"nodes": nodes, "rounds": rounds, "fraction": fraction, "out": str(out)}
        app = write_app(Path(name) / "app", APP, config)
        actors = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
        printed = c.flwr("run", str(app), "here", "--stream", "--federation-config", actors, seconds=7200)
        assert out.exists(), printed
        found = json.loads(out.read_text())
    seconds = [after - before for before, after in pairwise(found["marks"])]
    print(
        f"{nodes} nodes, a fraction of {fraction}, {rounds} rounds, {set(found['ballots'])} ballots a round"
    )
    print(f"seconds a round: first {seconds[0]:.1f}, median {median(seconds):.1f}, last {seconds[-1]:.1f}")
    print(f"loss: {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}")
    keep(f"simulated-{fraction:g}.json", {**found, "nodes": nodes, "seconds": seconds})


def keep(name: str, what: dict[str, Any]) -> None:
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text(json.dumps(what, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--simulated", type=int, metavar="NODES")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=1.0)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if options.simulated:
        simulated(options.simulated, options.rounds, options.fraction)
    else:
        made_here()


if __name__ == "__main__":
    main()
