"""Bytes and seconds of a deployed round: votes, FedAvg, and Flower with nothing to do.

    python -m benchmarks.flower_cost

A SuperLink and 3 SuperNodes as processes on this machine; the paper's CNN, N = 582,026, one step per round. Bytes are
what the SuperLink itself counts (`flwr list`), divided by nodes and rounds, once with 2 rounds and once with more, so
that what only the first rounds send (the app, the model) is told apart. Writes benchmarks/flower/cost.json.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.flower_cluster import Cluster, cluster, free_port, wait_for, write_app

NODES, SHORT, LONG = 3, 2, 6
OUT = Path(__file__).parent / "flower" / "cost.json"
APPS = Path(__file__).parent / "flower_apps"
WAYS = {"Flower alone": "idle.py", "votes": "cost.py", "FedAvg": "cost.py"}


def run(c: Cluster, folder: Path, way: str, rounds: int) -> dict[str, Any]:
    """One run: seconds of its rounds, bytes through the SuperLink."""
    times = folder / f"{way}-{rounds}.json"
    config = {"way": way, "rounds": rounds, "out": str(times)}
    app = write_app(folder / f"{way}-{rounds}".replace(" ", "-"), APPS / WAYS[way], config)
    number = c.submit(app)
    wait_for(times.exists, 600, f"{way} does not end")
    wait_for(
        lambda: '"finished' in c.flwr("list", "--run-id", number, "--format", "json"), 60, "not finished"
    )
    listed = json.loads(c.flwr("list", "--run-id", number, "--format", "json"))["runs"][0]
    marks = json.loads(times.read_text())
    seconds = [after - before for before, after in pairwise(marks)]
    return {"way": way, "rounds": rounds, "seconds": seconds, **listed["network-traffic"]}


def row(short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """What a further round costs, per node."""
    more = (long["rounds"] - short["rounds"]) * NODES
    up = (long["inbound-bytes"] - short["inbound-bytes"]) / more
    down = (long["outbound-bytes"] - short["outbound-bytes"]) / more
    seconds = median(long["seconds"][1:])
    return {
        "way": long["way"],
        "bytes_up": round(up),
        "bytes_down": round(down),
        "seconds": seconds,
        "runs": [short, long],
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name, cluster(Path(name) / "home") as c:
        c.superlink()
        for node in range(NODES):
            c.start(f"node{node}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{c.port}",
                    "--port", str(free_port()))  # fmt: skip
        for way in WAYS:
            rows.append(row(run(c, Path(name), way, SHORT), run(c, Path(name), way, LONG)))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1))
    print("| | bytes up | bytes down | seconds per round |\n|---|---|---|---|")
    for r in rows:
        print(f"| {r['way']} | {r['bytes_up']:,} | {r['bytes_down']:,} | {r['seconds']:.1f} |")


if __name__ == "__main__":
    main()
