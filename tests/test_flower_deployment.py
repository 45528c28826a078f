"""Flower deployed: SuperLink and SuperNodes as processes, with TLS and node keys, and a resume.

Every event is forced or waited for: a run ends by itself before anything is killed, and a round waits for all nodes.
`make soak` kills at other moments.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from signvote import checkpoint
from signvote.sim.gradients import evaluate
from signvote.tasks import load_task
from tests.flower_cluster import Cluster, cluster, free_port, wait_for, write_app
from tests.ranks import PATIENCE

pytestmark = pytest.mark.slow
APP = Path(__file__).parent / "flower_apps" / "deployed.py"
DOCS = Path(__file__).parent.parent / "docs" / "flower.md"


def documented(start: str) -> list[str]:
    """The commands in docs/flower.md that start so."""
    blocks = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(start)]
    assert lines, start
    return lines


def shell(command: str, home: Path) -> None:
    subprocess.run(["bash", "-ec", command], cwd=home, check=True, capture_output=True)


def make_keys(home: Path, nodes: int) -> None:
    for command in [*documented("openssl req"), *documented("echo"), *documented("openssl x509")]:
        shell(command, home)
    for node in range(nodes):
        shell(documented("ssh-keygen")[0].replace("node0", f"node{node}"), home)


def superlink(c: Cluster) -> None:
    command = documented("flower-superlink")[0].split()
    at = command.index("--ssl-ca-certfile")
    c.tls, c.connection = command[at:], f'root-certificates = "{c.home}/ca.pem"\n'
    c.superlink()


def supernode(c: Cluster, node: int, faults: str = "") -> None:
    """Start a node; `faults` by round, see flower_apps/deployed.py."""
    command = documented("flower-supernode")[0].replace("superlink.example:8000", f"127.0.0.1:{c.port}")
    words = command.replace("node0", f"node{node}").split(" --node-config ")[0].split()
    config = f'partition-id={node} num-partitions=3 faults="{faults}"'
    c.start(f"node{node}", *words, "--node-config", config, "--port", str(free_port()))


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
    return evaluate(task, model, 1000)["accuracy"]


def rounds_counted(state: dict[str, Any], worker: int) -> int:
    """Rounds in the server's trust of a worker, which `it-signsgd` learns from few voters, too."""
    rule = state["server"]["rule"]
    rounds: int = rule["seen"][rule["workers"].index(worker)]
    return rounds


def test_a_deployment_trains_and_resumes(tmp_path: Path) -> None:
    """Of two nodes one sends garbage in round 1 and an old ballot in round 2; a third is not registered."""
    saved = tmp_path / "run.safetensors"
    config = {"rounds": 1, "min-nodes": 2, "min-ballots": 1, "deadline": PATIENCE, "checkpoint": str(saved)}
    app = write_app(tmp_path / "app", APP, config)
    with cluster(tmp_path / "home") as c:
        make_keys(c.home, 3)
        superlink(c)
        for node in range(2):
            c.flwr("supernode", "register", f"node{node}.pub", "here", seconds=PATIENCE)
        supernode(c, 0)
        supernode(c, 1, "1:garbage 2:stale")
        supernode(c, 2)
        wait_for(lambda: c.processes["node2"].poll() is not None, PATIENCE, "an unregistered node is let in")
        run(c, "first", app)
        wait_for(lambda: c.processes["first"].poll() is not None, PATIENCE, "the first run does not end")
        at_first = checkpoint.load(saved)

        c.kill("superlink")
        superlink(c)
        run(c, "second", app, "-c", "rounds=2")
        wait_for(lambda: c.processes["second"].poll() is not None, PATIENCE, "the second run does not end")
    first, second, in_the_end = c.log("first"), c.log("second"), checkpoint.load(saved)

    assert re.search(r"round 1: refused node \d+ \(worker \d\): magic: not a ballot", first), first
    assert "round 1: 1 voted, 1 refused, 0 abstained, 0 silent" in first
    assert f"continues after round 1 of {saved}" in second
    assert "late: ballot for round 1; this is round 2" in second
    assert "round 2: 1 voted, 1 refused, 0 abstained, 0 silent" in second
    assert in_the_end["nodes"] == at_first["nodes"]
    (honest,) = in_the_end["server"]["rule"]["workers"]
    assert rounds_counted(in_the_end, honest) == 2
    assert "Exit Code: 305" in c.log("node2")
    assert "No SuperNode found with the given public key" in c.log("superlink")
