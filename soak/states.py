"""Nested states, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def equal(a: Any, b: Any) -> bool:
    """Whether two states hold the same: tensors, numbers, texts, lists and dictionaries of them."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
