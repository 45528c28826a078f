"""Accelerate, Lightning and the Trainer of transformers: their examples on two real ranks, and how they resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote import Server, Worker

ROOT = Path(__file__).parent.parent
EXPECTED = {  # first lr, samples of a rank in a full step
    "accelerate": (2e-3, 64),
    "lightning": (2e-3, 64),
    "trainer": (2e-3, 16),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what both ranks of each example recorded. One launch, because loading the packages takes long."""
    folder = tmp_path_factory.mktemp("apps")
    for name in EXPECTED:
        (folder / name).mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "app_ranks.py"), str(folder)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    return folder


def by_hand(ranks: list[dict[str, Any]]) -> list[Tensor]:
    """The parameters after the recorded gradients, by `Worker` and `Server`."""
    models = [{str(i): nn.Parameter(p.clone()) for i, p in enumerate(rank["start"])} for rank in ranks]
    workers = [Worker(model, rank, momentum=0.9) for rank, model in enumerate(models)]
    server = Server(workers[0].layout, "weighted")
    for t, lr in enumerate(ranks[0]["lrs"]):
        ballots = {}
        for worker, rank in zip(workers, ranks, strict=True):
            for parameter, gradient in zip(worker.parameters.values(), rank["gradients"][t], strict=True):
                parameter.grad = gradient
            worker.batch_size = rank["sizes"][t][worker.worker_id]
            ballots[worker.worker_id] = worker.ballot(t + 1)
        decision = server.decide(t + 1, ballots)
        for worker in workers:
            worker.apply(decision, lr)
    return [p.detach() for p in models[0].values()]


def norm(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.reshape(-1) for g in gradients]).norm())


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_votes_as_worker_and_server_do_and_resumes(name: str, launched: Path) -> None:
    ranks: list[dict[str, Any]] = [torch.load(launched / name / f"rank-{rank}.pt") for rank in range(2)]
    one, other = ranks
    lr, samples = EXPECTED[name]

    rounds = len(one["lrs"])
    assert rounds >= 60
    assert not any(all_equal(*pair) for pair in zip(one["gradients"], other["gradients"], strict=True)), (
        "averaged"
    )
    assert all_equal(one["end"], other["end"])
    assert all_equal(one["end"], by_hand(ranks))
    assert one["losses"][-1] < 0.7 * one["losses"][0]

    assert one["sizes"] == other["sizes"]
    assert set(one["sizes"][:-1]) == {(samples, samples)}
    line = torch.linspace(lr, 0, rounds + 1)[:-1]
    assert torch.allclose(torch.tensor(one["lrs"]), line, atol=lr / rounds)
    norms = [norm(gradients) for rank in ranks for gradients in rank["gradients"]]
    assert max(norms) == pytest.approx(1.0, abs=1e-4)

    assert all(torch.equal(one[way], other[way]) for way in ("wanted", "resumed", "without"))
    assert torch.equal(one["resumed"], one["wanted"])
    assert not torch.equal(one["without"], one["wanted"])
    words = "the state is of worker 0, so worker 1 starts without momentum"
    assert not any(words in text for text in one["warnings"])
    assert sum(words in text for text in other["warnings"]) == 2


@pytest.mark.parametrize("name", EXPECTED)
def test_a_page_starts_with_the_example(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks[0] == (ROOT / "examples" / f"{name}_votes.py").read_text()
