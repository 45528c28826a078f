"""What does a round of the rule `mean` cost beside plain votes: seconds, bytes, memory?

    python -m benchmarks.mean_rounds                           # a million coordinates in 20 tensors, 15 workers
    python -m benchmarks.mean_rounds --coordinates 25_000_000 --workers 4

One thread. In every round all rules see the same random gradients, in turns; the processor time of the fastest round
of each rule counts. `worker` is one worker's part: from its gradient to its ballot, and what it notes of the decision.
`server` decides from all ballots. No gradient is computed and nothing is sent. Memory is what is kept between rounds,
momentum included.
Writes benchmarks/mean_rounds.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from signvote import Layout, Server
from signvote.core.ballot import parse
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding

TENSORS = 20
RULES: dict[str, dict[str, Any]] = {
    "majority": {},
    "weighted": {},
    "mean": {},
    "mean, bound 1.5": {"bound": 1.5},
}


class Party:
    """A server and its workers under one rule, and the fastest round so far."""

    def __init__(self, name: str, layout: Layout, workers: int) -> None:
        self.server = Server(layout, name.partition(",")[0], **RULES[name])
        encoding = Encoding(momentum=0.9).suiting(self.server.rule)
        self.workers = [Encoder(layout, m, encoding, batch_size=64) for m in range(workers)]
        self.seconds = {"worker": float("inf"), "server": float("inf")}
        self.up = self.down = 0

    def round(self, t: int, gradients: Tensor) -> None:
        """One round; the gradients become the signals."""
        ballots, planes = {}, {}
        start = time.process_time()
        for worker, gradient in zip(self.workers, gradients, strict=True):
            planes[worker.worker_id] = worker.encode(t, gradient)
            ballots[worker.worker_id] = worker.ballot(t, planes[worker.worker_id])
        encoded = time.process_time()
        message = self.server.decide(t, ballots)
        decided = time.process_time()
        decision = parse(message, layout=self.server.layout, run=0)
        if decision.claims is not None:
            largest = torch.from_numpy(decision.claims.copy())
            for worker in self.workers:
                worker.correct(planes[worker.worker_id], largest)
        followed = time.process_time()
        own = (encoded - start + followed - decided) / len(self.workers)
        self.seconds["worker"] = min(self.seconds["worker"], own)
        self.seconds["server"] = min(self.seconds["server"], decided - encoded)
        self.up, self.down = len(ballots[0]), len(message)

    def kept(self) -> tuple[int, int]:
        """Bytes that a worker and the server keep between rounds."""
        memory = self.workers[0].memory
        return _bytes(memory), _bytes(self.server.rule.state_dict().values())


def _bytes(values: Any) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def layout_of(coordinates: int) -> Layout:
    """About as many coordinates in tensors of equal length."""
    return Layout([(f"t{i}", (coordinates // TENSORS,)) for i in range(TENSORS)])


def measured(layout: Layout, workers: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each rule."""
    parties = {name: Party(name, layout, workers) for name in RULES}
    random = torch.Generator().manual_seed(0)
    for t in range(1, rounds + 1):
        gradients = torch.randn(workers, layout.size, generator=random)
        for party in parties.values():
            party.round(t, gradients.clone())
    for name, party in parties.items():
        worker, server = party.kept()
        seconds = {**party.seconds, "round": party.seconds["worker"] + party.seconds["server"]}
        sizes = {"up": party.up, "down": party.down, "worker keeps": worker, "server keeps": server}
        yield {"rule": name, "seconds": seconds, "bytes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinates", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = layout_of(args.coordinates)
    rows = list(measured(layout, args.workers, args.rounds))
    args.out.write_text(
        json.dumps({"coordinates": layout.size, "workers": args.workers, "rows": rows}, indent=1) + "\n"
    )
    Console().print(_table(rows, layout.size, args.workers))


def _table(rows: list[dict[str, Any]], n: int, workers: int) -> Table:
    title = f"{n:,} coordinates, {workers} workers: seconds as multiples of majority's, bytes per coordinate"
    table = Table("rule", *rows[0]["seconds"], *rows[0]["bytes"], title=title)
    plain = rows[0]["seconds"]
    for row in rows:
        ratios = [f"{row['seconds'][part] / plain[part]:.2f}" for part in plain]
        table.add_row(row["rule"], *ratios, *(f"{size / n:.3f}" for size in row["bytes"].values()))
    return table


if __name__ == "__main__":
    main()
