"""All workers' gradients in one pass over everybody's samples.

All workers hold the same parameters, so samples of all of them can go through the network side by side:
activations and their gradients do not care whose sample it is. Only two things are a worker's own: the
gradient of a parameter, a sum over its samples alone, and the statistics of batch norm. The layers here
keep those two apart and leave the rest as it is. What comes out is what each worker would compute by
itself, up to the order of floating-point sums, at about the price of one ordinary training step.

`side_by_side` puts these layers in place of a model's own. It knows convolutions, linear layers and batch
norm without running statistics; layers without parameters stay. The plain sums here run anywhere;
`layers_cuda` has them in Triton.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from signvote.core.layout import Layout
from signvote.tasks.models import BatchNormReLU


class Parts:
    """Who owns which rows of a batch: worker m has `sizes[m]` samples, one after the other."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts = [0, *accumulate(sizes)]
        self.sizes, self.samples, self.device = list(sizes), starts[-1], device
        self.first = torch.tensor(starts, dtype=torch.int32, device=device)  # (workers + 1,)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.owner = owner.to(device, torch.int32)  # (samples,)
        self._pieces: dict[int, tuple[Tensor, Tensor]] = {}

    def equals(self) -> list[tuple[slice, slice]]:
        """Neighbours with batches of equal size: (which workers, which samples)."""
        found, worker, sample = [], 0, 0
        for size, members in groupby(self.sizes):
            count = len(list(members))
            found.append((slice(worker, worker + count), slice(sample, sample + count * size)))
            worker, sample = worker + count, sample + count * size
        return found

    def pieces(self, most: int) -> tuple[Tensor, Tensor]:
        """Every worker's samples cut into pieces of at most `most`.

        Returns (pieces, 2) with the first sample and the one after the last, and (workers + 1,) with
        each worker's first piece.
        """
        if most not in self._pieces:
            spans, starts = [], [0]
            for begin, size in zip(accumulate(self.sizes, initial=0), self.sizes, strict=False):
                spans += [(at, min(at + most, begin + size)) for at in range(begin, begin + size, most)]
                starts.append(len(spans))
            tables = (torch.tensor(t, dtype=torch.int32, device=self.device) for t in (spans, starts))
            spans_of, starts_of = tables
            self._pieces[most] = spans_of, starts_of
        return self._pieces[most]

    def sums(self, per_sample: Tensor) -> Tensor:
        """(samples, ...) added up to (workers, ...)."""
        return torch.stack([part.sum(0) for part in torch.split(per_sample, self.sizes)])


@dataclass
class Crew:
    """What the layers of one model share."""

    parts: Parts
    gradients: Tensor  # (workers, N): where parameters' gradients go
    layout: Layout
    dtype: torch.dtype  # of activations
    triton: bool  # whether layers_cuda can be used

    def gradient_of(self, name: str) -> Tensor:
        """The gradients of a parameter by all workers: a view (workers, *shape)."""
        segment = next(s for s in self.layout.segments if s.name == name)
        mine = self.gradients[:, segment.start : segment.stop]
        return mine.view(len(mine), *segment.shape) if segment.shape else mine[:, 0]


def side_by_side(model: nn.Module, crew: Crew) -> nn.Module | None:
    """A copy of the model with the same parameters whose backward pass fills crew.gradients; None: cannot be.

    What mixes samples without having parameters, such as a mean over the batch, is not noticed.
    """
    clone = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for name, module in clone.named_modules():
        if type(module) in LAYERS and LAYERS[type(module)].fits(module):
            module.forward = LAYERS[type(module)](module, name, crew).forward
        elif list(module.parameters(recurse=False)) or isinstance(module, nn.modules.dropout._DropoutNd):
            return None
    return clone


class Layer:
    """What a layer does when it knows whose samples it sees."""

    def __init__(self, plain: nn.Module, name: str, crew: Crew) -> None:
        self.plain: Any = plain
        self.crew = crew
        prefix = f"{name}." if name else ""
        self.gradient = {own: crew.gradient_of(prefix + own) for own, _ in plain.named_parameters()}

    forward: Callable[..., Tensor]

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Whether this can stand for that layer."""
        return all(p.requires_grad for p in plain.parameters())


class SideLinear(Layer):
    """nn.Linear, on (samples, features)."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, in) -> (samples, out), in float32: these layers are small and come last."""
        out: Tensor = _Linear.apply(x.float(), self.plain.weight, self.plain.bias, self)  # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        into = ctx.layer.gradient
        for workers, samples in ctx.layer.crew.parts.equals():
            count = workers.stop - workers.start
            mine, its = (t[samples].view(count, -1, t.shape[1]) for t in (g, x))
            into["weight"][workers] = mine.transpose(1, 2) @ its
            if "bias" in into:
                into["bias"][workers] = mine.sum(1)
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None


class SideConv(Layer):
    """nn.Conv2d without groups or dilation."""

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Zero padding by numbers, one group, no dilation."""
        simple = (plain.groups, plain.dilation, plain.padding_mode) == (1, (1, 1), "zeros")
        return simple and not isinstance(plain.padding, str) and super().fits(plain)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, C_in, H, W) -> (samples, C, H', W')."""
        out: Tensor = _Conv.apply(x.to(self.crew.dtype), self.plain.weight, self.plain.bias, self)  # type: ignore[no-untyped-call]
        return out


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        weight = weight.to(x.dtype, memory_format=torch.channels_last)
        bias = None if bias is None else bias.to(x.dtype)
        plain = layer.plain
        ctx.layer, ctx.narrow = layer, None
        ctx.save_for_backward(x, weight)
        if layer.crew.triton and bias is None:
            cuda = _sums(layer.crew)
            if cuda.is_narrow(weight, plain.stride, plain.padding):
                ctx.narrow = cuda
                out: Tensor = cuda.narrow(x, weight)
                return out
        return F.conv2d(x, weight, bias, plain.stride, plain.padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        crew, plain, into = ctx.layer.crew, ctx.layer.plain, ctx.layer.gradient
        g = g.contiguous(memory_format=torch.channels_last)
        _sums(crew).conv_weights_(into["weight"], x, g, plain.stride, plain.padding, crew.parts)
        if "bias" in into:
            for workers, samples in crew.parts.equals():
                mine = g[samples].view(workers.stop - workers.start, -1, *g.shape[1:])
                into["bias"][workers] = mine.sum((1, 3, 4), dtype=torch.float32)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if ctx.narrow is not None:
            return ctx.narrow.narrow_backward(g, weight), None, None, None
        back = torch.ops.aten.convolution_backward(
            g, x, weight, None, plain.stride, plain.padding, (1, 1), False, (0, 0), 1, (True, False, False)
        )  # fmt: skip
        return back[0], None, None, None


class SideNorm(Layer):
    """nn.BatchNorm2d without running statistics; each worker's samples have their own."""

    relu = False

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Statistics of the batch alone."""
        return plain.affine and not plain.track_running_stats and super().fits(plain)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalise each worker's samples by themselves, then do what the plain layer does."""
        x = x.contiguous(memory_format=torch.channels_last)
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        out: Tensor = _Norm.apply(x, shortcut, self.plain.weight, self.plain.bias, self)  # type: ignore[no-untyped-call]
        return out


class SideNormReLU(SideNorm):
    """BatchNormReLU: relu(batch norm + shortcut)."""

    relu = True


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, layer: SideNorm
    ) -> Tensor:
        sums, parts = _sums(layer.crew), layer.crew.parts
        mean, scale = sums.moments(x, parts, layer.plain.eps)
        y: Tensor = sums.normalise(x, shortcut, mean, scale, weight, bias, parts, layer.relu)
        ctx.layer, ctx.has_shortcut = layer, shortcut is not None
        ctx.save_for_backward(x, y, mean, scale, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        layer = ctx.layer
        g = g.contiguous(memory_format=torch.channels_last)
        into = layer.gradient["weight"], layer.gradient["bias"]
        back = _sums(layer.crew).normalise_backward_(
            *into, g, *ctx.saved_tensors, layer.crew.parts, layer.relu, ctx.has_shortcut
        )
        return *back, None, None, None


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: SideLinear,
    nn.Conv2d: SideConv,
    nn.BatchNorm2d: SideNorm,
    BatchNormReLU: SideNormReLU,
}

# ---- the sums that are a worker's own, in plain torch; layers_cuda has the same names ----------------


def _sums(crew: Crew) -> Any:
    if not crew.triton:
        return Plain
    from signvote.sim.joint import layers_cuda

    return layers_cuda


class Plain:
    """What layers_cuda must equal up to rounding."""

    @staticmethod
    def conv_weights_(
        out: Tensor, x: Tensor, g: Tensor, stride: tuple[int, int], padding: tuple[int, int], parts: Parts
    ) -> None:
        """Each worker's gradient of a convolution's weight into out, (workers, C, C_in, K, K)."""
        x, g = x.float(), g.float()
        per_worker = torch.split(x, parts.sizes), torch.split(g, parts.sizes)
        for row, mine, its in zip(out, *per_worker, strict=True):
            row.copy_(conv2d_weight(mine, row.shape, its, stride, padding))  # type: ignore[no-untyped-call]

    @staticmethod
    def moments(x: Tensor, parts: Parts, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and 1 / deviation, (workers, C), of each worker's samples and pixels."""
        split = torch.split(x.float(), parts.sizes)
        mean = torch.stack([part.mean((0, 2, 3)) for part in split])
        var = torch.stack([part.var((0, 2, 3), correction=0) for part in split])
        return mean, torch.rsqrt(var + eps)

    @staticmethod
    def normalise(
        x: Tensor, shortcut: Tensor | None, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor,
        parts: Parts, relu: bool,
    ) -> Tensor:  # fmt: skip
        """relu((x - mean) * scale * weight + bias + shortcut), relu and shortcut only where asked for."""
        y = _normal(x, mean, scale, parts) * _channels(weight) + _channels(bias)
        if shortcut is not None:
            y = y + shortcut
        return (y.relu() if relu else y).to(x.dtype)

    @staticmethod
    def normalise_backward_(
        weight_grad: Tensor, bias_grad: Tensor, g: Tensor, x: Tensor, y: Tensor, mean: Tensor, scale: Tensor,
        weight: Tensor, bias: Tensor, parts: Parts, relu: bool, shortcut: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Gradients of weight and bias into their places; returns those of x and of the shortcut."""
        g = torch.where(y > 0, g.float(), 0) if relu else g.float()
        normal = _normal(x, mean, scale, parts)
        bias_grad.copy_(parts.sums(g.sum((2, 3))))
        weight_grad.copy_(parts.sums((g * normal).sum((2, 3))))
        pixels = x.shape[2] * x.shape[3]
        each = torch.tensor(parts.sizes, device=x.device)[:, None] * pixels
        owner = parts.owner.long()
        back = g - _channels((bias_grad / each)[owner]) - normal * _channels((weight_grad / each)[owner])
        back = back * _channels(scale[owner] * weight)
        return back.to(x.dtype), g.to(x.dtype) if shortcut else None


def _normal(x: Tensor, mean: Tensor, scale: Tensor, parts: Parts) -> Tensor:
    owner = parts.owner.long()
    return (x.float() - _channels(mean[owner])) * _channels(scale[owner])


def _channels(values: Tensor) -> Tensor:
    """(C,) or (n, C) so that it multiplies (n, C, H, W)."""
    return values[..., None, None]
