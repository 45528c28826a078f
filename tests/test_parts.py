"""The largest coordinates of a signal, found by a sample or without one."""

from __future__ import annotations

import pytest
import torch

from signvote.core.parts import SAMPLED, largest

N = 20_000


def alike(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def misleading(n: int) -> torch.Tensor:
    """Large exactly where the sample looks."""
    signal = alike(n) * 1e-3
    signal[::SAMPLED] += 9
    return signal


def in_steps(n: int) -> torch.Tensor:
    """Many ties."""
    return alike(n).mul(2).round()


@pytest.mark.parametrize("kind", [alike, misleading, in_steps, torch.zeros])
@pytest.mark.parametrize("n", [1, 100, N])
@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 1.0])
def test_exactly_the_largest_are_kept(kind: object, n: int, share: float) -> None:
    assert callable(kind)
    signal = kind(n)
    kept = largest(signal, share)
    assert torch.equal(kept[kept != 0], signal[kept != 0])
    k = max(1, round(share * n))
    magnitudes = signal.abs().sort(descending=True).values[:k]
    nonzero = magnitudes[magnitudes > 0]
    assert torch.equal(kept.abs().sort(descending=True).values[: len(nonzero)], nonzero)
    assert kept.count_nonzero() == len(nonzero)


def test_rows_are_as_each_row_alone() -> None:
    rows = torch.stack([alike(N), misleading(N)])
    assert torch.equal(largest(rows, 0.01), torch.stack([largest(row, 0.01) for row in rows]))


def test_of_a_signal_that_is_not_finite_any_may_be_kept() -> None:
    """The worker abstains then; nothing is raised."""
    signal = alike(N)
    signal[7] = torch.nan
    assert largest(signal, 0.5).shape == signal.shape
