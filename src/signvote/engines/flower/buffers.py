"""Medians of the buffers that nodes report: floating-point numbers of the model that are not voted on.

A node may send anything: the rest is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from signvote.core.layout import Layout
from signvote.engines.flower.records import BUFFERS, record_in

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Buffers = dict[str, Numbers]


class Reporting:
    """In which rounds nodes report their buffers.

    Args:
        every: rounds between two reports; 0: none.

    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.final_round = 0  # of this call of `start`: it has a report, too
        self.is_asked = False  # in this round

    def ask(self, round: int, buffers: Mapping[str, Tensor]) -> None:
        """Decide whether nodes report these buffers in a round."""
        self.is_asked = False
        if self.every and buffers:
            is_due = round % self.every == 0
            self.is_asked = is_due or round == self.final_round


def buffers_of(model: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The entries of a model that nodes may report: floating-point tensors that are not voted on."""
    voted = {segment.name for segment in layout.segments}
    found = {}
    for name, tensor in model.items():
        has_numbers = tensor.is_floating_point() and tensor.numel() > 0
        if has_numbers and name not in voted:
            found[name] = tensor
    return found


def buffers_in(content: RecordDict, buffers: Mapping[str, Tensor]) -> Buffers:
    """The numbers of these buffers in a reply. Those of another size, or not finite, are left out."""
    found = {}
    for name, buffer in buffers.items():
        values = _buffer_in(content, name, buffer.numel())
        if values is not None:
            found[name] = values
    return found


def set_buffers_(buffers: Mapping[str, Tensor], reported: Sequence[Buffers]) -> None:
    """Set each buffer that most nodes report to the median over these nodes, number by number.

    A minority of nodes cannot move a median beyond what the others report, nor change an entry that only they report,
    such as a frozen parameter.
    """
    for name, buffer in buffers.items():
        usable = [values[name] for values in reported if name in values]
        if 2 * len(usable) > len(reported):
            middle = np.median(np.stack(usable), axis=0)
            buffer.copy_(torch.from_numpy(middle).view(buffer.shape))


def _buffer_in(content: RecordDict, name: str, size: int) -> Numbers | None:
    array = record_in(content, BUFFERS, ArrayRecord).get(name)
    if array is None or len(array.data) != 4 * size:
        return None
    values = np.frombuffer(array.data, "<f4")
    return values if np.isfinite(values).all() else None
