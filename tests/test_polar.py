"""The polar factors of a signal: what a matrix becomes before its signs are sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from signvote import Vote, Worker
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.polar import polar_factor, with_polar_factors
from signvote.sim.machine import Machine
from signvote.tasks import load_task, text
from tests.joint import finished
from tests.test_text import config

SHAPES = [(8, 24), (24, 8), (16, 16), (1, 9), (9, 1)]


def exact(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    factor: Tensor = u @ v
    return factor


def conditioned(rows: int, columns: int) -> Tensor:
    """A matrix whose largest direction is 20 times the smallest."""
    torch.manual_seed(rows)
    u, s, v = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)
    sizes = torch.logspace(0, -1.3, len(s))
    matrix: Tensor = (u * sizes) @ v
    return matrix


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_close_to_the_exact_factor(shape: tuple[int, int]) -> None:
    matrix = conditioned(*shape)
    found, wanted = polar_factor(matrix), exact(matrix)
    sizes = torch.linalg.svdvals(found)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
    assert (found.sign() == wanted.sign()).float().mean() > 0.9
    torch.testing.assert_close(polar_factor(matrix.mT), found.mT)


def test_the_size_of_a_matrix_does_not_count() -> None:
    matrix = conditioned(8, 24)
    for scale in (2.0**-60, 2.0**60):
        assert torch.equal(polar_factor(scale * matrix), polar_factor(matrix))
    assert torch.equal(polar_factor(-matrix), -polar_factor(matrix))


def test_rows_and_columns_of_zeros_stay_zero() -> None:
    """So the zero rule decides there, as without polar factors."""
    matrix = conditioned(8, 24)
    matrix[3] = 0
    matrix[:, 5] = 0
    found = polar_factor(matrix)
    assert torch.equal(found == 0, matrix == 0)
    assert not polar_factor(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_type_stays(dtype: torch.dtype) -> None:
    matrix = conditioned(8, 24).to(dtype)
    found = polar_factor(matrix)
    assert found.dtype == dtype
    wanted = polar_factor(matrix.float())
    assert (found.sign() == wanted.sign()).float().mean() > 0.95


def test_only_matrices_change_and_a_convolution_is_one() -> None:
    layout = Layout([("bias", (5,)), ("conv", (4, 2, 3, 3)), ("empty", (0, 3)), ("scale", ()), ("w", (6, 2))])
    rows = torch.randn(3, layout.size)
    before = rows.clone()
    found = with_polar_factors(rows, layout)
    assert torch.equal(rows, before)
    assert torch.equal(found[:, :5], rows[:, :5])
    assert torch.equal(found[:, 77], rows[:, 77])
    for row, its in zip(rows, found, strict=True):
        assert torch.equal(its[5:77], polar_factor(row[5:77].view(4, 18)).flatten())
        assert torch.equal(its[78:], polar_factor(row[78:].view(6, 2)).flatten())
        assert torch.equal(its, with_polar_factors(row, layout))


def test_a_gradient_that_is_not_finite_abstains() -> None:
    encoder = Encoder(Layout([("w", (4, 4))]), 0, Encoding(momentum=0.5, polar=True))
    gradient = torch.randn(16)
    gradient[3] = torch.inf
    assert encoder.encode(1, gradient) is None
    assert encoder.memory.average is None


def test_a_worker_votes_with_the_signs_of_the_factor_of_its_momentum() -> None:
    model = nn.Linear(24, 8, bias=False)
    worker = Worker(model, 0, momentum=0.5, polar=True)
    first, second = conditioned(8, 24), torch.randn(8, 24)
    for t, gradient in enumerate((first, second), start=1):
        model.weight.grad = gradient.clone()
        worker.ballot(t)
    average = 0.25 * first + 0.5 * second
    assert worker.encoder.memory.average is not None
    torch.testing.assert_close(worker.encoder.memory.average.view(8, 24), average)

    model = nn.Linear(24, 8, bias=False)
    before = model.weight.detach().clone()
    optimizer = Vote(model.parameters(), lr=2**-8, momentum=0.0, polar=True)
    model.weight.grad = first.clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 2**-8 * polar_factor(first).sign())


def test_a_language_model_votes_so_by_default_and_together_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text, "TEST_WINDOWS", 64)
    runs = [finished(config(), load_task("python-source"), Machine(together=way)) for way in (False, True)]
    assert runs[0].config.polar
    assert torch.equal(runs[0].gradients.x, runs[1].gradients.x)
