"""The samples of a gradient are counted as batches pass through the model."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote.core.samples import SampleCount


class Anything(nn.Module):
    """Accepts whatever it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is computed."""


X = torch.zeros(5, 2)
OTHER = torch.zeros(9, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        ((X, OTHER), {}, 5),
        ((), {"inputs": X, "mask": OTHER}, 5),
        ((OTHER,), {"inputs": X}, 9),
        (("text", 3, None, X), {}, 5),
        (([(X, OTHER)],), {}, 5),
        (({"b": {"x": X}, "a": OTHER},), {}, 5),
        ((UserDict(x=X),), {}, 5),
        ((OrderedDict(x=[X]),), {}, 5),
        ((torch.tensor(2.0), X), {}, 5),  # a number has no first dimension
        ((torch.zeros(0, 2), X), {}, 0),  # a batch of nothing is a batch
        (("text", {7}, iter([X])), {}, 0),  # an iterator is left alone
        ((), {}, 0),
    ],
)
def test_the_first_tensor_counts(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: int) -> None:
    model = Anything()
    samples = SampleCount(model)
    model(*args, **kwargs)
    assert samples.total == wanted


def test_passes_add_up_until_they_are_reset() -> None:
    model = nn.Linear(2, 1)
    samples = SampleCount(model)
    for size in (8, 8, 3):
        model(torch.zeros(size, 2)).sum().backward()
    assert samples.total == 19
    samples.total = 0
    model(X)
    assert samples.total == 5


def test_evaluation_does_not_count() -> None:
    model = nn.Linear(2, 1)
    samples = SampleCount(model)
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    model.eval()
    model(X)
    assert samples.total == 0
    model.train()
    model(X)
    assert samples.total == 5


def test_a_copy_of_the_model_has_a_count_of_its_own() -> None:
    """As an average of the parameters keeps one; and a whole model can be saved."""
    model = nn.Linear(2, 1)
    samples = SampleCount(model)
    twin = copy.deepcopy(model)
    twin(X)
    assert samples.total == 0
    torch.save(model, io.BytesIO())


def test_a_closed_count_stays() -> None:
    model = nn.Linear(2, 1)
    samples = SampleCount(model)
    model(X)
    samples.close()
    model(X)
    assert samples.total == 5
    assert not model._forward_pre_hooks


def test_counting_changes_no_output() -> None:
    model = nn.Linear(2, 1)
    wanted: Tensor = model(X)
    SampleCount(model)
    assert torch.equal(model(X), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_compiled_models_are_counted(is_compiled_first: bool) -> None:
    """With accumulation; evaluation does not count."""
    torch.compiler.reset()
    model = nn.Linear(2, 1)
    compiled: Any = torch.compile(model, backend="eager")
    samples = SampleCount(compiled if is_compiled_first else model)
    for _ in range(3):
        samples.total = 0
        for size in (8, 8, 3):
            compiled(torch.zeros(size, 2)).sum().backward()
        assert samples.total == 19
    with torch.no_grad():
        compiled(X)
    assert samples.total == 19
