from __future__ import annotations

import pytest
import torch
from torch import nn

from signvote import Layout, LayoutError


def test_a_module_lies_flat_in_the_order_of_its_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 5))
    layout = Layout.of(model)
    named = dict(model.named_parameters())
    assert [s.name for s in layout.segments] == list(named)
    assert layout.size == sum(p.numel() for p in named.values())
    assert all(s.stop - s.start == named[s.name].numel() for s in layout.segments)
    assert layout.segments[1].start == layout.segments[0].stop
    assert repr(layout) == f"Layout(6 parameters, {layout.size} coordinates, {layout.digest.hex()[:8]})"


def test_frozen_parameters_are_left_out_and_tied_ones_counted_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7)})
    model["head"].weight = model["embed"].weight
    model["head"].bias.requires_grad_(False)
    assert [s.name for s in Layout.of(model).segments] == ["embed.weight"]


def test_the_digest_changes_with_name_shape_and_order() -> None:
    layouts = [
        Layout([("a", (2, 3)), ("b", (4,))]),
        Layout([("b", (4,)), ("a", (2, 3))]),
        Layout([("a", (3, 2)), ("b", (4,))]),
        Layout([("a", (6,)), ("b", (4,))]),
        Layout([("a", (2, 3)), ("c", (4,))]),
        Layout([("a", (2, 3)), ("b", (2, 2))]),
        Layout([("a", (2, 3)), ("b", (4,)), ("c", (0,))]),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert len(set(layouts)) == len(layouts)
    assert layouts[0] == Layout([("a", torch.empty(2, 3)), ("b", torch.empty(4))])
    assert layouts[0] != "a layout"


def test_flatten_copies_in_row_major_order_and_fills_what_is_missing() -> None:
    layout = Layout([("a", (2, 3)), ("empty", (0,)), ("scalar", ()), ("b", (2,))])
    a = torch.arange(6.0).view(3, 2).T  # not contiguous
    flat = layout.flatten({"a": a, "scalar": torch.tensor(9.0), "b": None}, torch.full((9,), 7.0))
    assert flat.tolist() == [0, 2, 4, 1, 3, 5, 9, 0, 0]


def test_flatten_refuses_another_shape() -> None:
    layout = Layout([("a", (2, 3))])
    with pytest.raises(LayoutError, match=r"a has shape \(3, 2\), but the layout says \(2, 3\)"):
        layout.flatten({"a": torch.zeros(3, 2)}, torch.zeros(6))


def test_names_must_differ() -> None:
    with pytest.raises(LayoutError, match="used more than once: a"):
        Layout([("a", (1,)), ("a", (2,)), ("b", (1,))])


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(LayoutError, match="got no trainable parameter"):
        Layout.of(nn.ReLU())


def test_only_real_floats_have_signs() -> None:
    with pytest.raises(LayoutError, match=r"z is torch.complex64; only real floating-point"):
        Layout.of({"z": torch.zeros(2, dtype=torch.complex64)})
