"""Where each named parameter lies in the flat vector that workers vote on.

Layout is identity: ballots, trust and checkpoints carry its digest, so that two models which differ
in any name, shape or order can never be mixed up.
"""

from __future__ import annotations

import hashlib
import json
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
        for name, what in parameters:
            shape = tuple(what.shape if isinstance(what, Tensor) else what)
            segments.append(Segment(name, shape, start, start + prod(shape)))
            start = segments[-1].stop
        names = [s.name for s in segments]
        if len(set(names)) < len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise LayoutError(f"parameter names must differ; used more than once: {', '.join(twice)}")
        if start == 0:
            raise LayoutError("a layout needs at least one coordinate; got no trainable parameter")
        self.segments = tuple(segments)
        self.size = start
        described = json.dumps([[s.name, s.shape] for s in segments]).encode()
        self.digest = hashlib.blake2b(described, digest_size=16).digest()

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Tensor]) -> Layout:
        """The layout of a module's trainable parameters (tied ones once), or of named tensors."""
        return cls(trainable(model).items())

    def flatten(self, tensors: Mapping[str, Tensor | None], out: Tensor) -> Tensor:
        """Copy named tensors into the flat vector `out`; a missing one counts as zeros."""
        for s in self.segments:
            tensor = tensors.get(s.name)
            if tensor is None:
                out[s.start : s.stop].zero_()
            elif tuple(tensor.shape) != s.shape:
                raise LayoutError(f"{s.name} has shape {tuple(tensor.shape)}, but the layout says {s.shape}")
            else:
                out[s.start : s.stop].view(s.shape).copy_(tensor)
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({len(self.segments)} parameters, {self.size} coordinates, {self.digest.hex()[:8]})"


def trainable(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The named tensors that are voted on; all must be real floats."""
    if isinstance(model, nn.Module):
        model = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = dict(model)
    for name, tensor in named.items():
        if not torch.is_floating_point(tensor):
            raise LayoutError(f"{name} is {tensor.dtype}; only real floating-point parameters have signs")
    return named
