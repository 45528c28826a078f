"""The gradients of all workers in one pass over the samples of all workers.

All workers hold the same parameters, so their samples can go through the network side by side: activations
and their gradients do not depend on the worker that owns a sample. Only two things belong to one worker:
the gradient of a parameter, a sum over its samples alone, and the statistics of batch norm. The layers here
compute those two per worker. The result is what each worker would compute by itself, up to the order of
floating-point sums, at about the cost of one ordinary training step.

`side_by_side` replaces a model's layers by these. It supports convolutions, linear layers and batch norm
without running statistics; layers without parameters stay. `layers_plain` has the sums per worker in plain
torch, which run anywhere. `layers_cuda` has them in Triton.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signvote.core.layout import Layout
from signvote.sim.joint import layers_plain
from signvote.sim.joint.parts import Parts
from signvote.tasks.models import BatchNormReLU


@dataclass
class Crew:
    """State that the layers of one model share."""

    parts: Parts
    gradients: Tensor  # (workers, N): where parameters' gradients go
    layout: Layout
    dtype: torch.dtype  # of activations
    triton: bool  # whether layers_cuda can be used

    def gradient_of(self, name: str) -> Tensor:
        """The gradients of a parameter by all workers: a view (workers, *shape)."""
        segment = next(s for s in self.layout.segments if s.name == name)
        mine = self.gradients[:, segment.start : segment.stop]
        if not segment.shape:
            return mine[:, 0]
        return mine.view(len(mine), *segment.shape)


def side_by_side(model: nn.Module, crew: Crew) -> nn.Module | None:
    """A copy of the model with the same parameters whose backward pass fills crew.gradients.

    Returns None for a model with a layer that is not supported. A layer that mixes samples without having
    parameters, such as a mean over the batch, is not noticed.
    """
    shared = {id(p): p for p in model.parameters()}
    clone = copy.deepcopy(model, shared)
    for name, module in clone.named_modules():
        layer = LAYERS.get(type(module))
        if layer is not None and layer.fits(module):
            module.forward = layer(module, name, crew).forward
        elif list(module.parameters(recurse=False)) or isinstance(module, nn.modules.dropout._DropoutNd):
            return None
    return clone


class Layer:
    """A layer that knows which worker owns a sample."""

    def __init__(self, plain: nn.Module, name: str, crew: Crew) -> None:
        self.plain: Any = plain
        self.crew = crew
        prefix = f"{name}." if name else ""
        names = [own for own, _ in plain.named_parameters()]
        self.gradient = {own: crew.gradient_of(prefix + own) for own in names}

    forward: Callable[..., Tensor]

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Whether this class can replace that layer."""
        return all(p.requires_grad for p in plain.parameters())


class SideLinear(Layer):
    """nn.Linear, on (samples, ..., features)."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, ..., in) -> (samples, ..., out), in float32: these layers are small and come last."""
        plain = self.plain
        out: Tensor = _Linear.apply(x.float(), plain.weight, plain.bias, self)  # type: ignore[no-untyped-call]
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
            outputs = g[samples].reshape(count, -1, g.shape[-1])
            inputs = x[samples].reshape(count, -1, x.shape[-1])
            into["weight"][workers] = outputs.transpose(1, 2) @ inputs
            if "bias" in into:
                into["bias"][workers] = outputs.sum(1)
        back = g @ weight if ctx.needs_input_grad[0] else None
        return back, None, None, None


class SideConv(Layer):
    """nn.Conv2d without groups or dilation."""

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Zero padding by numbers, one group, no dilation."""
        if plain.groups != 1 or plain.dilation != (1, 1):
            return False
        if plain.padding_mode != "zeros" or isinstance(plain.padding, str):
            return False
        return super().fits(plain)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, C_in, H, W) -> (samples, C, H', W')."""
        x = x.to(self.crew.dtype)
        plain = self.plain
        out: Tensor = _Conv.apply(x, plain.weight, plain.bias, self)  # type: ignore[no-untyped-call]
        return out


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        weight = weight.to(x.dtype, memory_format=torch.channels_last)
        bias = None if bias is None else bias.to(x.dtype)
        plain = layer.plain
        ctx.layer = layer
        ctx.narrow = None
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
        crew = ctx.layer.crew
        plain = ctx.layer.plain
        into = ctx.layer.gradient
        g = g.contiguous(memory_format=torch.channels_last)
        _sums(crew).conv_weights_(
            into["weight"],
            x,
            g,
            plain.stride,
            plain.padding,
            crew.parts,
        )
        if "bias" in into:
            for workers, samples in crew.parts.equals():
                count = workers.stop - workers.start
                outputs = g[samples].view(count, -1, *g.shape[1:])
                into["bias"][workers] = outputs.sum((1, 3, 4), dtype=torch.float32)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if ctx.narrow is not None:
            return ctx.narrow.narrow_backward(g, weight), None, None, None
        back = torch.ops.aten.convolution_backward(
            grad_output=g,
            input=x,
            weight=weight,
            bias_sizes=None,
            stride=plain.stride,
            padding=plain.padding,
            dilation=(1, 1),
            transposed=False,
            output_padding=(0, 0),
            groups=1,
            output_mask=(True, False, False),
        )
        return back[0], None, None, None


class SideNorm(Layer):
    """nn.BatchNorm2d without running statistics; each worker's samples have their own."""

    relu = False

    @classmethod
    def fits(cls, plain: Any) -> bool:
        """Statistics of the batch alone."""
        return plain.affine and not plain.track_running_stats and super().fits(plain)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalize each worker's samples by themselves, then do what the plain layer does."""
        x = x.contiguous(memory_format=torch.channels_last)
        if shortcut is not None:
            shortcut = shortcut.contiguous(memory_format=torch.channels_last)
        plain = self.plain
        out: Tensor = _Norm.apply(x, shortcut, plain.weight, plain.bias, self)  # type: ignore[no-untyped-call]
        return out


class SideNormReLU(SideNorm):
    """BatchNormReLU: relu(batch norm + shortcut)."""

    relu = True


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, layer: SideNorm
    ) -> Tensor:
        sums = _sums(layer.crew)
        parts = layer.crew.parts
        mean, scale = sums.moments(x, parts, layer.plain.eps)
        y: Tensor = sums.normalize(
            x,
            shortcut,
            mean,
            scale,
            weight,
            bias,
            parts,
            layer.relu,
        )
        ctx.layer = layer
        ctx.has_shortcut = shortcut is not None
        ctx.save_for_backward(x, y, mean, scale, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        layer = ctx.layer
        g = g.contiguous(memory_format=torch.channels_last)
        back = _sums(layer.crew).normalize_backward_(
            layer.gradient["weight"],
            layer.gradient["bias"],
            g,
            *ctx.saved_tensors,
            layer.crew.parts,
            layer.relu,
            ctx.has_shortcut,
        )
        return *back, None, None, None


LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: SideLinear,
    nn.Conv2d: SideConv,
    nn.BatchNorm2d: SideNorm,
    BatchNormReLU: SideNormReLU,
}


def _sums(crew: Crew) -> Any:
    """The module with the sums per worker."""
    if not crew.triton:
        return layers_plain
    from signvote.sim.joint import layers_cuda

    return layers_cuda
