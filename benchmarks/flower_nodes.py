"""What does the server of a Flower run do for each node, as nodes become many?

    python -m benchmarks.flower_nodes                         # three minutes on one core

Three rounds of 2,000 and of 20,000 nodes in this process. A reply is a ballot of 64 coordinates in its node's name.
Prints processor seconds a round of the server, without the replies, and the ratio: 10 is linear.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from tests.flower_grid import LocalGrid

from signvote import Layout, Worker
from signvote.engines.flower import SignVote
from signvote.engines.flower.records import BALLOT, INSTRUCTION, METRICS, STATUS, to_array

ROUNDS = 3
SIZES = (2_000, 20_000)
RULES = ("majority", "weighted")


class Replies(LocalGrid):
    """Answers for all nodes at once, and measures how long that takes."""

    def __init__(self, nodes: int, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__({})
        self.online = set(range(nodes))
        self.parameters = parameters
        self.seconds = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """A ballot for each message."""
        start = time.process_time()
        replies = [self.reply(message) for message in messages]
        self.seconds += time.process_time() - start
        return replies

    def reply(self, message: Message) -> Message:
        """The ballot of one node."""
        instruction = message.content.config_records[INSTRUCTION]
        number, round = instruction["worker"], instruction["round"]
        assert isinstance(number, int)
        assert isinstance(round, int)
        content = RecordDict()
        ballot = Worker(self.parameters, number).ballot(round)
        content[BALLOT] = ArrayRecord({BALLOT: to_array(ballot)})
        content[METRICS] = MetricRecord({"loss": 1.0})
        content[STATUS] = ConfigRecord({"applied": round - 1})
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        return reply


def seconds(nodes: int, rule: str) -> float:
    """Of the server, per round."""
    parameters = {"w": torch.randn(64)}
    parameters["w"].grad = torch.randn(64)
    grid = Replies(nodes, parameters)
    strategy = SignVote(Layout.of(parameters), rule)
    start = time.process_time()
    strategy.start(grid, ArrayRecord(parameters), num_rounds=ROUNDS)
    return (time.process_time() - start - grid.seconds) / ROUNDS


def main() -> None:
    """Print the table."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seconds(10, "weighted")  # compiles what needs compiling
    for rule in RULES:
        few, many = (seconds(nodes, rule) for nodes in SIZES)
        print(f"{rule}: {few:.2f} s and {many:.2f} s a round: {many / few:.1f} times")


if __name__ == "__main__":
    main()
