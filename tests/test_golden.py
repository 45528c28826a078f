"""Golden runs: the bytes of every ballot and decision, and what the server has learned, of small fixed runs.

A refactoring must not change one bit of them. Gradients have few bits and momentum is 1/2, so that floats are exact and
the digests are the same on every machine. After an intended change: `python -m tests.test_golden`.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import RULES, Server, Worker
from tests.strategies import RULES_AND_ZEROS

GOLDEN = Path(__file__).parent / "golden" / "runs.json"
WORKERS = 5
ROUNDS = 12
SHAPES = {"first": (7, 11), "second": (130,), "third": (3, 3, 5)}
SENDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.5},
    "feedback": {"momentum": 0.5, "feedback": True},
    "top": {"momentum": 0.5, "top": 0.25},
    "top with feedback": {"top": 0.25, "feedback": True},
}
CASES = [
    f"{rule}, {zeros}, {how}"
    for (rule, zeros), how in product(RULES_AND_ZEROS, SENDING)
    if not RULES[rule].corrects or SENDING[how].keys() <= {"momentum"}
]


def gradients(worker: int, round: int) -> dict[str, Tensor]:
    """A common signal, and noise that grows with the worker's number; worker 4 has a nan once.

    Magnitudes differ by coordinate, so that `top` has no ties to break.
    """
    random = torch.Generator().manual_seed(1000 * round + worker)
    common = torch.Generator().manual_seed(round)
    found = {}
    for name, shape in SHAPES.items():
        signal = torch.randint(-1, 2, shape, generator=common)
        noise = torch.randint(-1, 2, shape, generator=random) * (
            torch.rand(shape, generator=random) < worker / 5
        )
        whole = (signal + noise).float()
        found[name] = whole * (1 + torch.arange(whole.numel()).view(shape) / 1024)
    if (worker, round) == (4, 7):
        found["second"][3] = torch.nan
    return found


def digest(case: str) -> str:
    """Of all ballots, decisions, parameters and the server's state of a run."""
    rule, zeros, how = case.split(", ")
    parameters = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(WORKERS)]
    sending: dict[str, Any] = {"zeros": zeros, "corrects": RULES[rule].corrects, **SENDING[how]}
    workers = [
        Worker(named, m, batch_size=4**m, run=3, decay=0.5, **sending) for m, named in enumerate(parameters)
    ]
    options = {"warmup": 3} if rule == "it-signsgd" else {}
    server = Server(workers[0].layout, rule, run=3, zeros=zeros, **options)  # type: ignore[arg-type]
    seen = hashlib.sha256()
    for t in range(1, ROUNDS + 1):
        ballots = {}
        for m, worker in enumerate(workers):
            for name, gradient in gradients(m, t).items():
                parameters[m][name].grad = gradient
            if (m, t) != (2, 5):  # away
                ballots[m] = worker.ballot(t)
        decision = server.decide(t, ballots)
        for worker in workers:
            worker.apply(decision, 2.0**-6)
        for message in (*ballots.values(), decision):
            seen.update(message)
    for tensor in parameters[0].values():
        seen.update(tensor.numpy().tobytes())
    state = server.state_dict()
    del state["watch"]  # which changes no vote
    seen.update(_plain(state).encode())
    return seen.hexdigest()[:16]


def _plain(state: Any) -> str:
    """A state as text, whatever the order of its keys."""
    if isinstance(state, dict):
        return "{" + ",".join(f"{key}:{_plain(state[key])}" for key in sorted(state)) + "}"
    if isinstance(state, Tensor):
        return f"{state.dtype}{state.tolist()}"
    return repr(state)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_what_it_was(case: str) -> None:
    assert digest(case) == json.loads(GOLDEN.read_text())[case]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: digest(case) for case in CASES}, indent=1) + "\n")
