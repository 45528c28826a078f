"""Flower deployed: a SuperLink, its ServerApp and a node are killed; nodes misbehave; the run resumes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.flower_cluster import Cluster, cluster, wait_for, write_app
from tests.test_flower_deployment import (
    APP,
    accuracy,
    decided,
    make_keys,
    rounds_counted,
    run,
    superlink,
    supernode,
)

from signvote import checkpoint

NODES = 3
FAULTS = {NODES - 1: "1:garbage 2:stale 3:other"}


def restart_until_let_in(c: Cluster, node: int) -> None:
    """As a service manager would: a killed node is let in again when its last heartbeat is a minute old."""
    before = c.log(f"node{node}").count("SuperNode ID:")

    def is_in() -> bool:
        if c.processes[f"node{node}"].poll() is not None:
            c.kill(f"node{node}")
            supernode(c, node)
        return c.log(f"node{node}").count("SuperNode ID:") > before

    supernode(c, node)
    wait_for(is_in, 240, "a killed node is not let in again")


def test_a_deployment_trains_through_failures_and_resumes(tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    config = {"rounds": 99, "min-nodes": NODES, "min-ballots": 1, "deadline": 120.0, "checkpoint": str(saved)}
    app = write_app(tmp_path / "app", APP, config)
    with cluster(tmp_path / "home") as c:
        make_keys(c.home, NODES + 1)
        superlink(c)
        for node in range(NODES):
            c.flwr("supernode", "register", f"node{node}.pub", "here")
        for node in range(NODES + 1):  # the last one is not registered
            supernode(c, node, FAULTS.get(node, ""))
        run(c, "first", app)
        wait_for(lambda: decided(c, "first", 1), 300, "no first round")

        for name in ("node1", "first", "superlink"):  # with the SuperLink goes the ServerApp
            c.kill(name)
        at_first = checkpoint.load(saved)
        superlink(c)
        run(c, "second", app, "-c", "deadline=40.0")
        wait_for(lambda: decided(c, "second", 2), 300, "the run does not go on without a node")
        restart_until_let_in(c, 1)
        wait_for(lambda: decided(c, "second", 4), 300, "it stays away")
    first, second, in_the_end = c.log("first"), c.log("second"), checkpoint.load(saved)

    assert re.search(r"round 1: refused node \d+ \(worker \d\): magic: not a ballot", first)
    assert "round 1: 2 voted, 1 refused, 0 abstained, 0 silent" in first
    assert f"continues after round 1 of {saved}" in second
    assert "late: ballot for round 1; this is round 2" in second
    assert "layout: ballot for layout" in second
    killed = int(
        re.findall(r"round 2: 1 voted, 1 refused, 0 abstained, 1 silent \(workers \[(\d)\]\)", second)[0]
    )
    assert in_the_end["nodes"] == at_first["nodes"]
    assert rounds_counted(at_first, killed) == 1
    assert rounds_counted(in_the_end, killed) > 1  # only votes were lost, not what was known of it
    assert "Exit Code: 305" in c.log(f"node{NODES}")
    assert "No SuperNode found with the given public key" in c.log("superlink")
    assert accuracy(in_the_end) > accuracy(None) + 0.1
