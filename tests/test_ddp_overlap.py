"""Gradients that arrive in another order on every rank: chunks travel in one order all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signvote import Vote
from tests.ranks import together


class Net(nn.Module):
    """One layer is used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = (nn.Linear(20, 20) for _ in range(3))

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        outputs: Tensor = self.last(self.rare(x) if rarely else x)
        return outputs


def trained(rank: int, world: int) -> list[np.ndarray[Any, Any]]:
    """With votes after the backward pass, and during it."""
    found = []
    for overlap in (False, True):
        torch.manual_seed(1)
        model = Net()
        optimizer = Vote(model.parameters(), lr=1e-2, overlap=overlap, chunk=128)
        for t in range(4):
            optimizer.zero_grad()
            random = torch.Generator().manual_seed(10 * t + rank)
            outputs = model(torch.randn(5, 20, generator=random), rarely=rank == 1)
            outputs.sum().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())
    return found


def test_a_layer_that_one_rank_does_not_use(tmp_path: Path) -> None:
    answers = together(2, trained, folder=tmp_path)
    wanted = answers[0][0]
    for found in (answers[0][1], *answers[1]):
        assert (found == wanted).all()
