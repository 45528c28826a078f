"""The engine of torch.distributed: the simulator's answer, bit for bit, by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from signvote.sim import Config
from tests.ranks import Trainer, config, simulated, together, trained

RULES = ("majority", "it-signsgd", "pooled", "known-batch", "robust")


def as_simulated(world: int, cases: list[tuple[Config, dict[str, Any]]], folder: Path) -> None:
    wanted = {(c.rule, c.zeros): simulated(c) for c, _ in cases}
    for rank, sums in enumerate(together(world, trained, cases, folder=folder)):
        for (case, way), mine in zip(cases, sums, strict=True):
            assert mine == wanted[case.rule, case.zeros], f"rank {rank}, {case.rule}, {case.zeros}, {way}"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_four_ranks_equal_the_simulator_over_twenty_rounds(overlap: bool, tmp_path: Path) -> None:
    """Chunks under way while gradients are computed, and in turn: equal bits."""
    as_simulated(4, [(config(rule, 4, 20), {"overlap": overlap}) for rule in RULES], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 8])
def test_any_number_of_ranks_equals_the_simulator(world: int, tmp_path: Path) -> None:
    """Three with zeros that abstain, two without DDP."""
    zeros, over_ddp = "abstain" if world == 3 else "coin", world != 2
    cases = [(config(rule, world, 16, zeros=zeros), {"over_ddp": over_ddp}) for rule in RULES]
    as_simulated(world, cases, tmp_path)


def looked_at(rank: int, world: int) -> tuple[int, int, int, int]:
    """How many buckets DDP made before and after it rebuilt them, and the bytes sent."""
    trainer = Trainer(rank, config("pooled", world, 5))
    seen: list[int] = []
    take = trainer.state.take

    def counting(bucket: Any) -> Any:
        if bucket.is_last():
            seen.append(bucket.index() + 1)
        return take(bucket)

    trainer.state.take = counting  # type: ignore[method-assign]
    trainer.train(3)
    return seen[0], seen[-1], trainer.state.bytes_sent, trainer.state.layout.size


def test_buckets_are_rebuilt_into_many_and_about_a_quarter_of_a_byte_a_coordinate(tmp_path: Path) -> None:
    for before, after, sent, size in together(4, looked_at, folder=tmp_path):
        assert (before, after) == (1, 26)  # rebuilt after the first step
        assert sent < 1.2 * size / 4  # of a vector so short, padding and counts are a part
