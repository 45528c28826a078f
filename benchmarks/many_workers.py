"""What does a round of `robust` cost the server with thousands of workers?

    nice python -m benchmarks.many_workers                  # some minutes on one core, 3 GB of memory

1 million coordinates, dense ballots, a quarter of each worker's votes against the others; one in ten votes against all.
One thread. Processor seconds of `Server.decide`, in the second round, beside those of `majority` on the same ballots,
and the memory of what the rule has learned. Aim: with 10,000 workers at most 3 times majority.
Writes benchmarks/scale/many_workers.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from signvote import Layout, Server
from signvote.core.ballot import Ballot
from signvote.core.header import Kind
from signvote.core.rules import Robust

OUT = Path(__file__).parent / "scale" / "many_workers.json"
N = 1_000_000
MANY = (500, 2_000, 10_000)


def ballots(layout: Layout, workers: int, round: int) -> dict[int, bytes]:
    """One for each worker."""
    random = np.random.default_rng(round)
    common = random.integers(0, 256, layout.size // 8, np.uint8)
    found = {}
    for m in range(workers):
        noise = random.integers(0, 256, (2, len(common)), np.uint8)
        signs = common ^ (noise[0] & noise[1])
        if m % 10 == 9:
            signs = ~signs
        found[m] = Ballot(
            layout=layout, worker=m, round=round, run=0, kind=Kind.DENSE, signs=signs, batch_size=4
        ).to_bytes()
    return found


def measured(workers: int, n: int, rounds: int) -> dict[str, float]:
    """The last of some rounds."""
    layout = Layout([("w", (n,))])
    servers = {rule: Server(layout, rule) for rule in ("majority", "robust")}
    row: dict[str, float] = {"workers": workers, "n": n}
    for t in range(1, rounds + 1):
        sent = ballots(layout, workers, t)
        for name, server in servers.items():
            start = time.process_time()
            server.decide(t, sent)
            row[name] = time.process_time() - start
    rule = servers["robust"].rule
    assert isinstance(rule, Robust)
    opened = servers["robust"].open(rounds + 1)
    weights = rule.weights(servers["robust"]._expected)[:, 0].tolist()
    opened.stop()
    row["mebibytes"] = rule.trust.pairs.counts.nbytes / 2**20
    row["hostile without weight"] = sum(not weight for weight in weights[9::10]) / (workers // 10)
    row["others without weight"] = sum(not weight for m, weight in enumerate(weights) if m % 10 != 9)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=MANY)
    parser.add_argument("--coordinates", type=int, default=N)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured(20, N, 1)  # compiles
    rows = []
    print("| workers | majority, s | robust, s | ratio | MiB of trust |\n|---|---|---|---|---|")
    for workers in options.workers:
        row = measured(workers, options.coordinates, options.rounds)
        rows.append(row)
        ratio = row["robust"] / row["majority"]
        print(
            f"| {workers:,} | {row['majority']:.2f} | {row['robust']:.2f} | {ratio:.2f} | {row['mebibytes']:.0f} |",
            flush=True,
        )
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
