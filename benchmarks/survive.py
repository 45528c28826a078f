"""What does a step cost with members that may come and go, beside a step of ranks that are fixed?

    python -m benchmarks.survive             # four workers on this machine, one thread each, 5 million parameters

Both forms have the same parameters and gradients, in the same processes, and take turns, five steps each. A step is
`step()` alone. The table has medians, on the first worker; the ratio is what counts. Bytes are those that a worker
sends in a round. Writes benchmarks/survive/step.json; events.json beside it has the events of `python -m soak.survive`.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from tests.elastic import addresses
from tests.ranks import checksum, together
from torch import nn

from signvote import Members, Vote

WORKERS = 4
SIZES = (64, 4096, 1024, 512, 10)  # 5 million coordinates
BLOCK = 5  # steps in a row
OUT = Path(__file__).with_suffix("") / "step.json"


def model() -> nn.Module:
    """The same on all workers, with a gradient of its own on each."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES)]
    return nn.Sequential(*layers)


def steps(rank: int, world: int, peers: list[str], turns: int) -> dict[str, object]:
    """Seconds of each step of both forms, on one worker."""
    forms = {}
    for name in ("fixed", "members"):
        made = model()
        torch.manual_seed(1 + rank)
        for parameter in made.parameters():
            parameter.grad = torch.randn_like(parameter)
        members = Members(peers=peers, worker_id=rank) if name == "members" else None
        forms[name] = (made, Vote(made.parameters(), batch_size=8, members=members))
        forms[name][1].step()
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(turns):
        for name, (_, optimizer) in forms.items():
            for _ in range(BLOCK):
                begun = time.perf_counter()
                optimizer.step()
                seconds[name].append(time.perf_counter() - begun)
    sums = {checksum(made) for made, _ in forms.values()}
    assert len(sums) == 1, "both forms must come to the same parameters"
    found = {
        "coordinates": forms["fixed"][1].layout.size,
        "seconds": {name: median(each) for name, each in seconds.items()},
        "bytes": {name: optimizer.bytes_sent for name, (_, optimizer) in forms.items()},
    }
    forms["members"][1].leave()
    return found


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = together(WORKERS, steps, addresses(WORKERS), options.turns, folder=Path(folder))[0]
    found["ratio"] = found["seconds"]["members"] / found["seconds"]["fixed"]
    options.out.write_text(json.dumps({"workers": WORKERS, **found}, indent=1) + "\n")
    table = Table("", "seconds", "bytes sent")
    for name in ("fixed", "members"):
        table.add_row(name, f"{found['seconds'][name]:.4f}", f"{found['bytes'][name]:,}")
    Console().print(table, f"ratio {found['ratio']:.2f}")


if __name__ == "__main__":
    main()
