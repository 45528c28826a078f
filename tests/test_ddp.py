"""The engine of torch.distributed: the simulator's answer, bit for bit, by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signvote import Server, Worker
from signvote.engines.ddp import VoteState, exchange, process_group, vote_gradients
from signvote.engines.ddp.process_group import ProcessGroup
from signvote.sim import Config
from tests.ranks import Trainer, config, simulated, together, trained

RULES = ("majority", "it-signsgd", "weighted", "robust")


def as_simulated(world: int, cases: list[tuple[Config, dict[str, Any]]], folder: Path) -> None:
    wanted = {(c.rule, c.zeros): simulated(c) for c, _ in cases}
    for rank, sums in enumerate(together(world, trained, cases, folder=folder)):
        for (case, way), mine in zip(cases, sums, strict=True):
            assert mine == wanted[case.rule, case.zeros], f"rank {rank}, {case.rule}, {case.zeros}, {way}"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_four_ranks_equal_the_simulator(overlap: bool, tmp_path: Path) -> None:
    """Chunks under way while gradients are computed, and in turn: equal bits."""
    as_simulated(4, [(config(rule, 4, 10), {"overlap": overlap}) for rule in RULES], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_number_of_ranks_equals_the_simulator(world: int, tmp_path: Path) -> None:
    """Three with zeros that abstain, two without DDP."""
    zeros, over_ddp = "abstain" if world == 3 else "coin", world != 2
    cases = [(config(rule, world, 8, zeros=zeros), {"over_ddp": over_ddp}) for rule in RULES]
    as_simulated(world, cases, tmp_path)


def looked_at(rank: int, world: int) -> tuple[int, int, int, int]:
    """How many buckets DDP made before and after it rebuilt them, and the bytes sent."""
    trainer = Trainer(rank, config("weighted", world, 5))
    seen: list[int] = []
    decide = trainer.state.decide

    def counting(since: float) -> Any:
        seen.append(len(trainer.state.buckets))
        return decide(since)

    trainer.state.decide = counting  # type: ignore[method-assign]
    trainer.train(3)
    return seen[0], seen[-1], trainer.state.bytes_sent, trainer.state.layout.size


def test_buckets_are_rebuilt_into_many_and_about_a_quarter_of_a_byte_a_coordinate(tmp_path: Path) -> None:
    for before, after, sent, size in together(4, looked_at, folder=tmp_path):
        assert (before, after) == (1, 26)  # rebuilt after the first step
        assert sent < 1.2 * size / 4  # of a vector so short, padding and counts are a part


def in_turns(
    rank: int, world: int, cases: list[tuple[Config, dict[str, Any]]]
) -> tuple[list[list[int]], int]:
    """As on a slow link; the checksums, and how often rows traveled in turns."""
    turned = []
    rotate = ProcessGroup._rotate

    def counting(group: ProcessGroup, received: Any, sent: Any) -> None:
        turned.append(len(sent))
        rotate(group, received, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SLOW", -1)
        patch.setattr(process_group, "TURN", 40)
        patch.setattr(process_group, "SHORTEST", 16)
        patch.setattr(ProcessGroup, "_rotate", counting)
        return trained(rank, world, cases), len(turned)


@pytest.mark.parametrize("world", [2, 3])
def test_votes_that_travel_in_turns_equal_the_simulator(world: int, tmp_path: Path) -> None:
    """Votes of one plane, of two, and sparse ones, whose pieces have different lengths."""
    cases = [
        (config("weighted", world, 6), {"overlap": True}),
        (config("robust", world, 6, zeros="abstain"), {"over_ddp": False}),
        (config("majority", world, 6, zeros="abstain", top=0.1), {"overlap": False}),
    ]
    wanted = [simulated(case) for case, _ in cases]
    for sums, turned in together(world, in_turns, cases, folder=tmp_path):
        assert sums == wanted
        assert turned >= 5 * len(cases)


SENDING: list[dict[str, Any]] = [
    {"top": 0.5, "top_end": 0.01},
    {"feedback": True, "clip": 0.1},
    {"polar": True},
    {"top": 0.3, "feedback": True, "momentum": 0.0, "interpolation": 0.5},
]


@pytest.mark.parametrize("sending", SENDING, ids=str)
def test_top_and_feedback_equal_the_simulator(sending: dict[str, Any], tmp_path: Path) -> None:
    """Votes on few coordinates need a support plane; feedback needs the whole vector before any sign is known."""
    cases = []
    for rule, zeros, overlap in (("weighted", "coin", True), ("it-signsgd", "abstain", False)):
        case = config(rule, 3, 8, zeros=zeros, **sending)
        cases.append((case, {"overlap": overlap, "over_ddp": overlap}))
    as_simulated(3, cases, tmp_path)


class Odd(nn.Module):
    """Parameters of no elements: inside a chunk that is not complete yet, and after one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 100))
        self.nothing = nn.Parameter(torch.empty(0))
        self.last = nn.Parameter(torch.linspace(-1, 1, 90))
        self.end = nn.Parameter(torch.empty(0))


def gradient(p: torch.Tensor, rank: int, t: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + 10 * rank + len(p)))


def odd(rank: int, world: int) -> list[float]:
    model = Odd()
    state = VoteState(model, "majority", momentum=0.9, chunk=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for t in range(1, 6):
        for p in model.parameters():
            p.grad = gradient(p, rank, t)
        vote_gradients(state)
        optimizer.step()
    return torch.cat([p.detach() for p in model.parameters()]).tolist()


def test_a_parameter_of_no_elements_changes_nothing(tmp_path: Path) -> None:
    """Each chunk is sent once, and momentum advances once a round."""
    models = [Odd(), Odd()]
    workers = [Worker(model, m, momentum=0.9) for m, model in enumerate(models)]
    server = Server(workers[0].layout, "majority")
    for t in range(1, 6):
        for m, model in enumerate(models):
            for p in model.parameters():
                p.grad = gradient(p, m, t)
        decision = server.decide(t, {w.worker_id: w.ballot(t) for w in workers})
        for worker in workers:
            worker.apply(decision, 0.125)
    wanted = torch.cat([p.detach() for p in models[0].parameters()]).tolist()
    assert together(2, odd, folder=tmp_path) == [wanted, wanted]
