"""Layers of hosts over tokens that take a leading axis of rows themselves; see row_layers.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.population.blocks import AttendToPast
from esper.population.hosts import TokenEmbedding


class RowAttendToPast(AttendToPast):
    """The same through torch's own kernel, which keeps the scores in the cache.

    The module itself multiplies in the open: vmap would take that kernel row by row, and torch's counter of
    operations does not know it.
    """

    def forward(self, qkv: Tensor) -> Tensor:
        split = qkv.unflatten(-1, (3, self.heads, -1)).flatten(0, -5)  # [n, T, 3, heads, D / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [n, heads, T, D / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(*qkv.shape[:-1], -1)


class FusedAttendToPast(RowAttendToPast):
    """The same as one GPU kernel of our own where sequences are short, else torch's."""

    def forward(self, qkv: Tensor) -> Tensor:
        from esper.population import kernels

        time, width = qkv.shape[-2], qkv.shape[-1] // 3
        if not kernels.attention_fits(time, width // self.heads):
            return super().forward(qkv)
        out: Tensor = kernels.RowAttention.apply(qkv, self.heads)  # type: ignore[no-untyped-call]
        return out


class RowEmbedding(nn.Module):
    """weight [R, V, D], tokens [R, ...] → [R, ..., D]

    A token beyond the vocabulary is refused: it must not find the vectors of another row.
    """

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        self.weight: Tensor = layer.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows, vocabulary, _ = self.weight.shape
        first = vocabulary * torch.arange(rows, device=tokens.device)  # of each row, in a table of all rows
        place = tokens + first.view(-1, *[1] * (tokens.ndim - 1))
        unknown = (tokens < 0) | (tokens >= vocabulary)
        return F.embedding(place.masked_fill(unknown, rows * vocabulary), self.weight.flatten(0, 1))


class RowTokenEmbedding(nn.Module):
    """positions [R, context, D], tokens [R, B, T] → [R, B, T, D]"""

    def __init__(self, embedding: TokenEmbedding, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, embedding.positions

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.tokens(tokens) + self.positions[:, None, : tokens.shape[2]]
        return result


def row_embedding(layer: nn.Embedding) -> nn.Module | None:
    """None for the ones that treat some tokens or gradients in a way of their own."""
    plain = layer.padding_idx is None and layer.max_norm is None
    return RowEmbedding(layer) if plain and not (layer.scale_grad_by_freq or layer.sparse) else None


def row_attention(layer: AttendToPast, method: str) -> nn.Module:
    return (FusedAttendToPast if method == "fused" else RowAttendToPast)(layer.heads)
