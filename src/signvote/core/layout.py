"""Where each named parameter lies in the flat vector that workers vote on.

A layout identifies a model: ballots, trust and checkpoints carry its digest, so that two models that differ in any
name, shape or order cannot be confused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from signvote.errors import LayoutError


@dataclass(frozen=True)
class Segment:
    """One named parameter: coordinates start to stop of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """Names and shapes of a model's parameters, as offsets in one flat vector.

    >>> layout = Layout([("weight", (2, 3)), ("bias", (3,))])
    >>> layout.size, [(s.name, s.start, s.stop) for s in layout.segments]
    (9, [('weight', 0, 6), ('bias', 6, 9)])
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor | Sequence[int]]]) -> None:
        segments: list[Segment] = []
        start = 0
        for name, tensor_or_shape in parameters:
            sizes = tensor_or_shape.shape if isinstance(tensor_or_shape, Tensor) else tensor_or_shape
            shape = tuple(sizes)
            stop = start + prod(shape)
            segments.append(Segment(name, shape, start, stop))
            start = stop
        uses = Counter(s.name for s in segments)
        repeated = sorted(name for name, count in uses.items() if count > 1)
        if repeated:
            raise LayoutError(f"parameter names must differ; used more than once: {', '.join(repeated)}")
        if start == 0:
            raise LayoutError("a layout needs at least one coordinate; got no trainable parameter")
        self.segments = tuple(segments)
        self.size = start
        described = json.dumps([[s.name, s.shape] for s in segments])
        self.digest = hashlib.blake2b(described.encode(), digest_size=16).digest()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The coordinates of each parameter."""
        return [(segment.start, segment.stop) for segment in self.segments]

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Tensor]) -> Layout:
        """The layout of a module's trainable parameters (tied ones once), or of named tensors."""
        return cls(trainable(model).items())

    def flatten(self, tensors: Mapping[str, Tensor | None], out: Tensor, first: int = 0) -> Tensor:
        """Copy named tensors into `out`, the flat vector from `first` on; a missing one counts as zeros."""
        for s in self.segments:
            begin = max(s.start, first)
            end = min(s.stop, first + out.numel())
            if begin >= end:
                continue
            tensor = tensors.get(s.name)
            flat = out[begin - first : end - first]
            if tensor is None:
                flat.zero_()
                continue
            shape = tuple(tensor.shape)
            if shape != s.shape:
                raise LayoutError(f"{s.name} has shape {shape}, but the layout says {s.shape}")
            if flat.numel() == tensor.numel():
                flat.view(s.shape).copy_(tensor)
            else:
                whole = tensor.detach().reshape(-1)
                flat.copy_(whole[begin - s.start : end - s.start])
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        digest = self.digest.hex()[:8]
        return f"Layout({len(self.segments)} parameters, {self.size} coordinates, {digest})"


def trainable(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The named tensors that workers vote on. All must be real floating-point tensors."""
    if isinstance(model, nn.Module):
        named: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    else:
        named = dict(model)
    for name, tensor in named.items():
        if not torch.is_floating_point(tensor):
            raise LayoutError(f"{name} is {tensor.dtype}; only real floating-point parameters have signs")
    return named
