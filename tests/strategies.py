"""What the tests of kernels draw from; nothing here needs a backend."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from signvote.core.rules import RULES
from signvote.kernels import Coin
from tests import reference as obvious

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

lengths = st.integers(1, 200)
workers = st.integers(1, 9)
weights = st.integers(-10_240, 10_240)
coins = st.none() | st.builds(Coin, st.integers(0, 2**64 - 1), st.integers(0, 10_000))


def numbers(count: int, kinds: int) -> st.SearchStrategy[list[int]]:
    """So many whole numbers below `kinds`. They are drawn as bytes: one by one takes 20 times as long."""
    size = 1 if kinds < 10 else 2
    drawn = st.binary(min_size=size * count, max_size=size * count)
    return drawn.map(lambda found: (np.frombuffer(found, f"u{size}") % kinds).tolist())


@st.composite
def ballots(draw: st.DrawFn, *, ternary: bool) -> list[list[int]]:
    n, m = draw(lengths), draw(workers)
    signs = [-1, 0, 1] if ternary else [-1, 1]
    return [[signs[i] for i in draw(numbers(n, len(signs)))] for _ in range(m)]


def tables_for(rounds: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What CoordinateTrust would hand to the kernel."""
    kinds = sorted(set(rounds))
    tables = torch.zeros(len(kinds), 4 * max(kinds) + 3, dtype=torch.int32)
    for i, t in enumerate(kinds):
        w = [obvious.llr_integer(c / (2 * t)) for c in range(2 * t + 1)]
        tables[i, : 2 * len(w)] = torch.tensor([-v for v in w] + w, dtype=torch.int32)
    sizes = torch.tensor([2 * t + 1 for t in rounds], dtype=torch.int32)
    return tables, torch.tensor([kinds.index(t) for t in rounds]), sizes


# Rules with the zeros that they allow: corrections are dense.
RULES_AND_ZEROS = [
    (rule, zeros)
    for rule in RULES
    for zeros in ("coin", "abstain")
    if zeros == "coin" or not RULES[rule].corrects
]
