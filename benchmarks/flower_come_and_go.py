"""Tens of thousands of Flower nodes, of which a few vote in each round: do memory and time of the strategy stay flat?

    nice python -m benchmarks.flower_come_and_go            # some minutes on one core

300 rounds of the real strategy, the default rule, 64 coordinates, 300 nodes a round. In each round 100 are new and 100
have left for good, and about 5,000 are remembered. Replies are made in this process, as in `flower_nodes.py`. Prints,
for each 30 rounds, the nodes that came by, those that are known, processor seconds a round of the strategy, and the
memory of the process. Writes benchmarks/flower/come_and_go.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from typing import Any

import torch
from flwr.app import ArrayRecord

from benchmarks.come_and_go import managed, resident
from benchmarks.flower_nodes import OUT, Replies
from signvote import Layout
from signvote.engines.flower import SignVote

VOTERS, NEW, REMEMBER = 300, 100, 5_000
NAMES = ("rounds", "nodes", "known", "milliseconds", "mebibytes", "mebibytes in use", "mebibytes free")


class Turnover:
    """Called by the strategy after each round: other nodes are online in the next one."""

    def __init__(self, grid: Replies, strategy: SignVote, each: int) -> None:
        self.grid = grid
        self.strategy = strategy
        self.each = each
        self.rows: list[dict[str, float]] = []
        self._mark = 0.0

    def __call__(self, round: int, arrays: ArrayRecord) -> None:
        """Round 0 is the start."""
        first = NEW * round
        self.grid.online = set(range(first, first + VOTERS))
        if round % self.each == 0:
            self._note(round)

    def _note(self, round: int) -> None:
        spent = time.process_time() - self.grid.seconds
        if round:
            gc.collect()
            came = VOTERS + NEW * (round - 1)
            milliseconds = 1000 * (spent - self._mark) / self.each
            row = (round, came, len(self.strategy.nodes), milliseconds, resident(), *managed())
            self.rows.append(dict(zip(NAMES, row, strict=True)))
            cells = (f"{value:,.0f}" for value in row)
            print(f"| {' | '.join(cells)} |", flush=True)
        self._mark = time.process_time() - self.grid.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    parameters = {"w": torch.randn(64)}
    parameters["w"].grad = torch.randn(64)
    grid = Replies(VOTERS, parameters)
    strategy = SignVote(Layout.of(parameters), remember=REMEMBER)
    turnover = Turnover(grid, strategy, options.rounds // 10)
    print(
        "| rounds | nodes that came by | known | ms a round | MiB | in use | free |\n|---|---|---|---|---|---|---|"
    )
    arrays: Any = ArrayRecord(parameters)
    strategy.start(grid, arrays, num_rounds=options.rounds, evaluate_fn=turnover)
    OUT.mkdir(exist_ok=True)
    (OUT / "come_and_go.json").write_text(json.dumps(turnover.rows, indent=1))


if __name__ == "__main__":
    main()
