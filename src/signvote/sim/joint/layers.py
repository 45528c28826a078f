"""The gradients of all workers in one pass over the samples of all workers.

All workers hold the same parameters, so their samples can go through the network side by side: activations
and their gradients do not depend on the worker that owns a sample. Only two things belong to one worker:
the gradient of a parameter, a sum over its samples alone, and the statistics of batch norm. The functions here
compute those two per worker. The result is what each worker would compute by itself, up to the order of
floating-point sums, at about the cost of one ordinary training step.

`SideBySide` replaces the functions of PyTorch that layers call, so a model may use them directly, share a parameter
among layers, or call a layer twice. It knows convolutions, linear layers, embeddings, attention, layer norm, RMS norm,
and batch norm without running statistics; functions that take no parameter stay. `layers_plain` has the sums per worker
in plain torch, which run anywhere. `layers_cuda` has them in Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from signvote.sim.joint.attention import attention
from signvote.sim.joint.by_worker import check_rows, sum_rows, sums_of
from signvote.sim.joint.crew import Crew, NotTogetherError
from signvote.sim.joint.norms import batch_norm, group_norm, layer_norm, norm_relu, rms_norm
from signvote.tasks.models import batch_norm_relu


class SideBySide(TorchFunctionMode):
    """While this is active, the backward pass of the crew's model fills `crew.gradients`.

    A layer that mixes samples without having parameters, such as a mean over the batch, is not noticed here;
    `JointPass.trouble` compares gradients.
    """

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self.crew = crew

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch, or what replaces it."""
        named = kwargs or {}
        function = FUNCTIONS.get(func)
        if function is not None:
            return function(self.crew, *args, **named)
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.requires_grad and self._takes_parameter(args, named):
            name = getattr(func, "__name__", str(func))
            raise NotTogetherError(f"its model calls {name} with a parameter")
        return result

    def _takes_parameter(self, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        for argument in (*args, *named.values()):
            inner = argument if isinstance(argument, tuple | list) else [argument]
            if any(self.crew.trains(each) for each in inner):
                return True
        return False


# ---- linear layers -------------------------------------------------------------------------------


def linear(crew: Crew, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: (samples, ..., in) -> (samples, ..., out).

    On (samples, in) in float32: such layers are small and come last.
    """
    check_rows(crew, input, "a linear layer")
    dtype = torch.float32 if input.ndim == 2 else crew.dtype
    out: Tensor = _Linear.apply(input.to(dtype), weight, bias, crew)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, crew: Crew) -> Tensor:
        ctx.crew = crew
        ctx.parameters = (weight, bias)
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        return F.linear(x, cast, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, cast = ctx.saved_tensors
        weight, bias = ctx.parameters
        crew = ctx.crew
        into = crew.room(weight)
        for workers, samples in crew.parts.equals():
            count = workers.stop - workers.start
            outputs = g[samples].reshape(count, -1, g.shape[-1])
            inputs = x[samples].reshape(count, -1, x.shape[-1])
            into[workers] = outputs.transpose(1, 2) @ inputs
        if bias is not None:
            sum_rows(crew, crew.room(bias), g)
        back = g @ cast if ctx.needs_input_grad[0] else None
        return back, None, None, None


# ---- embeddings ----------------------------------------------------------------------------------


def embedding(
    crew: Crew,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding: (samples, ...) -> (samples, ..., features).

    Indices that all samples share, as positions in a sequence, are (length,) or (1, length). Each sample gets a row.
    Whether (samples,) are such indices, `JointPass.trouble` finds out.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotTogetherError("its embedding has max_norm, scale_grad_by_freq or sparse")
    samples = crew.parts.samples
    if input.ndim == 2 and len(input) == 1:
        input = input.expand(samples, -1)
    if input.ndim == 1 and len(input) == samples:
        crew.is_ambiguous = True
    if input.ndim == 1 and (len(input) != samples or crew.shares_indices):
        input = input.expand(samples, -1)
    check_rows(crew, input, "an embedding")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    out: Tensor = _Embedding.apply(weight, input, padding_idx, crew)  # type: ignore[no-untyped-call]
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding: int | None, crew: Crew) -> Tensor:
        ctx.crew = crew
        ctx.weight = weight
        ctx.padding = padding
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        crew = ctx.crew
        count = len(ctx.weight)
        into = crew.room(ctx.weight)
        owner = crew.parts.owner.long()
        first = (owner * count).view(-1, *[1] * (indices.ndim - 1))  # each worker has a table of its own
        tables = len(into) * count
        sums = torch.ops.aten.embedding_dense_backward(g, indices + first, tables, -1, False)
        into.copy_(sums.view(into.shape))
        if ctx.padding is not None:
            into[:, ctx.padding] = 0
        return None, None, None, None


# ---- convolutions --------------------------------------------------------------------------------


def conv2d(
    crew: Crew,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | str = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """F.conv2d without groups or dilation: (samples, C_in, H, W) -> (samples, C, H', W')."""
    numbers = (stride, padding, dilation)
    if groups != 1 or not all(isinstance(pair, tuple) for pair in numbers) or dilation != (1, 1):
        raise NotTogetherError("its convolution has groups, dilation or a padding that is no pair of numbers")
    check_rows(crew, input, "a convolution")
    x = input.to(crew.dtype)
    out: Tensor = _Conv.apply(x, weight, bias, stride, padding, crew)  # type: ignore[no-untyped-call]
    return out


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        crew: Crew,
    ) -> Tensor:
        ctx.crew = crew
        ctx.parameters = (weight, bias)
        ctx.stride = stride
        ctx.padding = padding
        ctx.narrow = None
        weight = weight.to(x.dtype, memory_format=torch.channels_last)
        bias = None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight)
        if crew.triton and bias is None:
            cuda = sums_of(crew)
            if cuda.is_narrow(weight, stride, padding):
                ctx.narrow = cuda
                out: Tensor = cuda.narrow(x, weight)
                return out
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        x, cast = ctx.saved_tensors
        weight, bias = ctx.parameters
        crew = ctx.crew
        g = g.contiguous(memory_format=torch.channels_last)
        sums_of(crew).conv_weights_(
            crew.room(weight),
            x,
            g,
            ctx.stride,
            ctx.padding,
            crew.parts,
        )
        if bias is not None:
            into = crew.room(bias)
            for workers, samples in crew.parts.equals():
                count = workers.stop - workers.start
                outputs = g[samples].view(count, -1, *g.shape[1:])
                into[workers] = outputs.sum((1, 3, 4), dtype=torch.float32)
        return _conv_backward(ctx, x, cast, g), None, None, None, None, None


def _conv_backward(ctx: Any, x: Tensor, weight: Tensor, g: Tensor) -> Tensor | None:
    """The gradient of a convolution's input."""
    if not ctx.needs_input_grad[0]:
        return None
    if ctx.narrow is not None:
        narrow: Tensor = ctx.narrow.narrow_backward(g, weight)
        return narrow
    back: Tensor = torch.ops.aten.convolution_backward(
        grad_output=g,
        input=x,
        weight=weight,
        bias_sizes=None,
        stride=ctx.stride,
        padding=ctx.padding,
        dilation=(1, 1),
        transposed=False,
        output_padding=(0, 0),
        groups=1,
        output_mask=(True, False, False),
    )[0]
    return back


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.batch_norm: batch_norm,
    F.conv2d: conv2d,
    F.multi_head_attention_forward: lambda crew, *args, **named: attention(crew, linear, *args, **named),
    batch_norm_relu: norm_relu,
}
