"""Flower deployed: SuperLink and SuperNodes as processes, with TLS and node keys, failures and a resume."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.flower_cluster import Cluster, cluster, free_port, wait_for, write_app

from signvote import checkpoint
from signvote.sim.gradients import evaluate
from signvote.tasks import load_task

pytestmark = pytest.mark.slow
APP = Path(__file__).parent / "flower_apps" / "deployed.py"
DOCS = Path(__file__).parent.parent / "docs" / "flower.md"
NODES = 3
COORDINATES = 50_890
FAULTS = "1:garbage 2:stale 3:other"  # of the last node


def documented(start: str) -> list[str]:
    """The commands in docs/flower.md that start so."""
    blocks = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(start)]
    assert lines, start
    return lines


def shell(command: str, home: Path) -> None:
    subprocess.run(["bash", "-ec", command], cwd=home, check=True, capture_output=True)


def make_keys(home: Path) -> None:
    for command in [*documented("openssl req"), *documented("echo"), *documented("openssl x509")]:
        shell(command, home)
    for node in range(NODES + 1):
        shell(documented("ssh-keygen")[0].replace("node0", f"node{node}"), home)


def superlink(c: Cluster) -> None:
    command = documented("flower-superlink")[0].split()
    at = command.index("--ssl-ca-certfile")
    c.tls, c.connection = command[at:], f'root-certificates = "{c.home}/ca.pem"\n'
    c.superlink()


def supernode(c: Cluster, node: int) -> None:
    command = documented("flower-supernode")[0].replace("superlink.example:8000", f"127.0.0.1:{c.port}")
    words = command.replace("node0", f"node{node}").split(" --node-config ")[0].split()
    faults = f' faults="{FAULTS}"' if node == NODES - 1 else ""
    c.start(
        f"node{node}", *words, "--node-config", f"partition-id={node} num-partitions={NODES}{faults}",
        "--port", str(free_port()),
    )  # fmt: skip


def run(c: Cluster, name: str, app: Path, *config: str) -> None:
    """Start a run; what it logs is in `c.log(name)`."""
    c.start(name, "flwr", "run", str(app), "here", "--stream", *config)


def decided(c: Cluster, name: str, round: int) -> bool:
    return re.search(rf"signvote: round {round}: \d+ voted", c.log(name)) is not None


def accuracy(state: dict[str, Any] | None) -> float:
    """Of a checkpoint's model, or of a fresh one, on the test images."""
    task = load_task("mnist-10k", model="mlp")
    torch.manual_seed(0)
    model = task.model()
    if state is not None:
        model.load_state_dict(state["model"])
    return evaluate(task, model, 1000)[0]


def rounds_counted(state: dict[str, Any], worker: int) -> float:
    """Rounds in the server's trust of a worker."""
    rule = state["server"]["rule"]
    return float(rule["counts"][rule["workers"].index(worker)][1].sum()) / COORDINATES


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
        make_keys(c.home)
        superlink(c)
        for node in range(NODES):
            c.flwr("supernode", "register", f"node{node}.pub", "here")
        for node in range(NODES + 1):  # the last one is not registered
            supernode(c, node)
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
    assert f"goes on after round 1 of {saved}" in second
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
