"""nn.MultiheadAttention for all workers at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from signvote.sim.joint.crew import Crew, NotTogetherError

Linear = Callable[[Crew, Tensor, Tensor, Tensor | None], Tensor]


def attention(crew: Crew, linear: Linear, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward, where a sequence attends to itself: (length, samples, width) and its weights.

    Args:
        crew: the workers.
        linear: their linear layer.
        *args: of F.multi_head_attention_forward.
        **named: likewise.

    """
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    given.apply_defaults()
    call = given.arguments
    _check(call)
    heads = call["num_heads"]
    x = call["query"].transpose(0, 1)  # (samples, length, width)
    inside = linear(crew, x, call["in_proj_weight"], call["in_proj_bias"])
    samples, length, _ = x.shape
    split = inside.view(samples, length, 3, heads, -1)
    query, key, value = split.permute(2, 0, 3, 1, 4)  # (samples, heads, length, width / heads) each
    mask = _mask(call, query.dtype)
    dropout = call["dropout_p"] if call["training"] else 0.0
    weights = None
    if call["need_weights"]:
        weights = _weights(query, key, mask)
        mixed = F.dropout(weights, dropout) @ value
        if call["average_attn_weights"]:
            weights = weights.mean(1)
    else:
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout)
    together = mixed.transpose(1, 2).flatten(2)
    out = linear(crew, together, call["out_proj_weight"], call["out_proj_bias"])
    return out.transpose(0, 1), weights


def _check(call: dict[str, Any]) -> None:
    """Raise for what is not supported."""
    query = call["query"]
    is_itself = query is call["key"] and query is call["value"]
    if not is_itself or call["in_proj_weight"] is None or query.ndim != 3:
        raise NotTogetherError("its attention is not that of a batch of sequences to themselves")
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    has_extras = any(call[name] is not None for name in extras)
    if call["add_zero_attn"] or has_extras:
        raise NotTogetherError("its attention has add_zero_attn, add_bias_kv or static keys")


def _mask(call: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """What is added to the products of queries and keys, (..., length, length); None: nothing."""
    length, samples, _ = call["query"].shape
    mask: Tensor | None = None
    if call["attn_mask"] is not None:
        mask = _additive(call["attn_mask"], dtype)
        if mask.ndim == 3:
            mask = mask.view(samples, -1, length, length)
    if call["key_padding_mask"] is None:
        return mask
    padding = _additive(call["key_padding_mask"], dtype)
    by_key = padding.view(samples, 1, 1, length)
    return by_key if mask is None else mask + by_key


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers: -inf where a boolean one is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return numbers.masked_fill_(mask, -math.inf)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(query key / sqrt(width) + mask)."""
    scale = 1 / math.sqrt(query.shape[-1])
    products = (query * scale) @ key.transpose(-2, -1)
    if mask is not None:
        products = products + mask
    return products.softmax(-1)
