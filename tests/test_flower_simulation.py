"""Flower's simulation: the same bits as our simulator, and the app that `signvote flower-app` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from signvote import checkpoint
from signvote.sim import train
from signvote.tasks import load_task
from tests.flower_apps.same import CONFIGS, TASK
from tests.flower_cluster import Cluster, cluster, write_app
from tests.ranks import PATIENCE
from tests.test_package import command

pytestmark = pytest.mark.slow
APPS = Path(__file__).parent / "flower_apps"
ONE_ACTOR = "num-supernodes={} client-resources-num-cpus=1 init-args-num-cpus=1"
TWO_ACTORS = ONE_ACTOR[:-1] + "2"


def equal(a: Any, b: Any) -> bool:
    """Nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


@pytest.fixture(scope="module")
def simulating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SuperLink that simulates, for one run after the other: it takes seconds to start."""
    with cluster(tmp_path_factory.mktemp("flower") / "home") as c:
        c.superlink("--simulation")
        yield c


def test_ten_rounds_equal_the_simulator_bit_for_bit(simulating: Cluster, tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", APPS / "same.py", {"out": str(tmp_path)})
    printed = simulating.flwr(
        "run", str(app), "here", "--stream", "--federation-config", TWO_ACTORS.format(3)
    )
    for config in CONFIGS:
        path = tmp_path / f"{config.rule}.safetensors"
        assert path.exists(), printed
        ours = checkpoint.load(path)
        assert ours["server"]["last_round"] == 10
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        train(config, TASK, tmp_path / config.rule)
        torch.set_num_threads(threads)
        theirs = checkpoint.load(tmp_path / config.rule / "checkpoint.safetensors")
        assert equal(ours["model"], theirs["model"])
        assert equal(ours["server"], theirs["server"])  # trust, too


def test_what_flower_app_writes_runs_and_learns(simulating: Cluster, tmp_path: Path) -> None:
    done = command("flower-app", str(tmp_path / "app"))
    assert done.returncode == 0, done.stderr
    config = f"rounds=5 local-steps=4 step=0.004 deadline={PATIENCE}"
    settings = ["-c", config, "--federation-config", ONE_ACTOR.format(5)]
    printed = simulating.flwr("run", str(tmp_path / "app"), "here", "--stream", *settings)
    accuracies = [float(value) for value in re.findall(r"{'accuracy': ([0-9.]+)}", printed)]
    assert len(accuracies) == 6, printed
    assert accuracies[-1] > accuracies[0] + 0.2, accuracies
    assert "whose votes counted in round 5:" in printed, printed
    shares = [float(share) for share in re.findall(r"\t +\d+ +([0-9.]+) %", printed)]
    assert len(shares) == 5
    assert shares[0] > 4 * shares[-1], "nodes declare batches of 4 to 256"
    saved = re.search(r"The model is in (.*\.pt)", printed)
    assert saved, printed
    model = load_task("mnist-10k", model="mlp").model()
    model.load_state_dict(torch.load(saved[1], weights_only=True))
