"""Votes on few coordinates over torch.distributed: bytes near their entropy, up and down."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from signvote import ConfigError, Vote
from tests.ranks import alone as alone
from tests.ranks import together

SIZE = 300_000
SHARES = (0.3, 0.1, 0.03, 0.01)


def entropy_bytes(n: int, share: float) -> float:
    """Of which coordinates, and of a sign for each of them."""
    rest = 1 - share
    return n * (-share * math.log2(share) - rest * math.log2(rest) + share) / 8


def sent(rank: int, world: int) -> list[float]:
    """Bytes that a rank sends in a round, as multiples of the least possible; the share falls from round to round."""
    weights = torch.zeros(SIZE, requires_grad=True)
    optimizer = Vote([weights], lr=1e-3, momentum=0.0, top=1.0, zeros="abstain")
    share = -(-SIZE // 64 // world) * 64  # coordinates that a rank decides
    found = []
    for t, top in enumerate(SHARES):
        before = weights.detach().clone()
        weights.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(world * t + rank))
        optimizer.top = top
        optimizer.step()
        decided = (weights != before)[rank * share :][:share].double().mean().item()
        up = entropy_bytes(SIZE // world, top)
        down = entropy_bytes(SIZE // world, decided)
        found.append(optimizer.bytes_sent / ((world - 1) * (up + down)))
    return found


def test_bytes_are_within_a_tenth_of_the_entropy_both_ways(tmp_path: Path) -> None:
    for found in together(3, sent, folder=tmp_path):
        assert all(1 <= each <= 1.1 for each in found), found


@pytest.mark.usefixtures("alone")
def test_the_share_may_change_and_must_be_one() -> None:
    sparse, dense = (Vote([torch.zeros(9, requires_grad=True)], top=top) for top in (0.5, None))
    sparse.top = 0.1
    assert sparse.top == 0.1
    for wrong in (0.0, 1.5, None):
        with pytest.raises(ConfigError, match="top"):
            sparse.top = wrong
    with pytest.raises(ConfigError, match="cannot become"):
        dense.top = 0.5


def by_hand(signals: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mismatches, votes cast) of each worker, equal weights: a tie shows nothing, and no vote is no evidence."""
    votes = torch.zeros_like(signals)
    for vote, signal in zip(votes, signals, strict=True):
        kept = signal.abs().argsort(descending=True)[:k]
        vote[kept] = signal[kept].sign()
    decision = votes.sum(0).sign()
    is_judged = (votes != 0) & (decision != 0)
    return ((votes != decision) & is_judged).sum(1), is_judged.sum(1)


def counted(rank: int, world: int, n: int, top: float) -> tuple[list[list[int]], int]:
    """The record of all workers after a round, as this rank has it, and coordinates that moved."""
    weights = torch.zeros(n, requires_grad=True)
    optimizer = Vote([weights], momentum=0.0, top=top, zeros="abstain", batch_size=1, feedback=True)
    weights.grad = signals_of(world, n)[rank]
    optimizer.step()
    counts = optimizer.poll.server.rule.state_dict()["counts"].view(world, 2)
    return counts.long().T.tolist(), int((weights != 0).sum())


def signals_of(world: int, n: int) -> torch.Tensor:
    return torch.randn(world, n, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("top", [0.02, 0.4])
def test_workers_are_judged_by_what_they_voted_on(top: float, tmp_path: Path) -> None:
    n, world = 5000, 3
    mismatches, cast = by_hand(signals_of(world, n), round(top * n))
    for counts, moved in together(world, counted, n, top, folder=tmp_path):
        assert counts == [mismatches.tolist(), cast.tolist()]
        assert 0 < moved <= cast.sum()
