"""A small GPT, byte by byte: embeddings, blocks of causal attention and an MLP, and a head tied to the embedding.

name       context   width   layers   heads   parameters
gpt-tiny        64      64        2       4      119,104   seconds on a CPU
gpt-small      256     256        6       8    4,852,992   for a GPU

Linear layers and layer norms have no bias. Weights start as GPT-2's: normal with a deviation of 0.02, divided by the
root of the number of additions where a block adds to its input.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256  # the vocabulary
DEVIATION = 0.02


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inside = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        of_a_head = width // self.heads
        inside = self.inside(x)
        split = inside.view(n, length, 3, self.heads, of_a_head)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (n, heads, length, width / heads) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(n, length, width)
        out: Tensor = self.out(mixed)
        return out


class Block(nn.Module):
    """x + attention, then x + MLP, each of the normalized x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.inside = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        x = x + self.attention(self.norm1(x))
        normalized = self.norm2(x)
        hidden = F.gelu(self.inside(normalized))
        out: Tensor = x + self.out(hidden)
        return out


class Gpt(nn.Module):
    """The logits of the next byte at every place."""

    def __init__(self, *, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith("out.weight")
                deviation = DEVIATION / math.sqrt(2 * layers) if adds else DEVIATION
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length) int64 -> (n, length, 256)."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(place)
        x = self.norm(self.blocks(x))
        return F.linear(x, self.tokens.weight)


GPTS = {
    "gpt-tiny": partial(
        Gpt,
        context=64,
        width=64,
        layers=2,
        heads=4,
    ),
    "gpt-small": partial(
        Gpt,
        context=256,
        width=256,
        layers=6,
        heads=8,
    ),
}
