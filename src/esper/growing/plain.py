"""Seeds as plain modules of torch's layers and functions: no esper is needed to load them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from esper.population.blueprints import AlibiAttention, BlendGate, CausalSelfAttention, SqueezeExcite
from esper.population.extract import Grafted
from esper.utils.errors import UserError

# Seeds without sizes in their code, so that they can be traced once for every batch and length.


class _SqueezeExcite(nn.Module):
    def __init__(self, seed: SqueezeExcite, spatial_dims: int):
        super().__init__()
        self.excite = seed.excite
        self.blank = (..., *[None] * spatial_dims)

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.tanh(self.excite(h))[self.blank]


class _Gate(nn.Module):
    def __init__(self, gate: BlendGate, spatial_dims: int):
        super().__init__()
        self.linear = gate.linear
        self.spatial = gate.spatial
        self.blank = (..., *[None] * spatial_dims)

    def forward(self, h: Tensor) -> Tensor:
        pooled = h.flatten(2).mean(-1) if self.spatial else h
        return torch.sigmoid(self.linear(pooled))[self.blank]


class _CausalAttention(nn.Module):
    def __init__(self, seed: CausalSelfAttention, spatial_dims: int):
        super().__init__()
        self.qkv, self.out, self.heads = seed.qkv, seed.out, seed.heads
        self.width = seed.out.in_features

    def forward(self, h: Tensor) -> Tensor:
        qkv = self.qkv(F.layer_norm(h, [self.width]))
        split = qkv.unflatten(-1, [3, self.heads, self.width // self.heads]).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _AlibiAttention(nn.Module):
    slopes: Tensor  # [heads, 1, 1]

    def __init__(self, seed: AlibiAttention, spatial_dims: int):
        super().__init__()
        self.query, self.key_value, self.out, self.heads = seed.query, seed.key_value, seed.out, seed.heads
        self.width = seed.out.in_features
        slopes = torch.exp2(-8.0 * torch.arange(1, self.heads + 1) / self.heads)
        self.register_buffer("slopes", slopes.view(-1, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        unit = F.layer_norm(h, [self.width])
        query = self.query(unit).unflatten(-1, [self.heads, -1]).transpose(1, 2)  # [B, heads, T, D / heads]
        pair = self.key_value(unit).unflatten(-1, [2, -1])
        key, value = pair.select(2, 0).unsqueeze(1), pair.select(2, 1).unsqueeze(1)  # [B, 1, T, D / heads]
        steps = torch.ones_like(h[0, :, 0], dtype=torch.float32).cumsum(0)  # [T]; bfloat16 ends at 256
        distance = steps.unsqueeze(0) - steps.unsqueeze(1)  # [T, T], above 0 in the future
        bias = (self.slopes * distance).masked_fill(distance > 0, float("-inf"))
        scores = query @ key.transpose(-1, -2) * (self.width // self.heads) ** -0.5
        mixed = torch.softmax(scores + bias, dim=-1).type_as(value) @ value
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


_TRACEABLE: dict[type[nn.Module], Callable[[Any, int], nn.Module]] = {
    SqueezeExcite: _SqueezeExcite,
    BlendGate: _Gate,
    CausalSelfAttention: _CausalAttention,
    AlibiAttention: _AlibiAttention,
}


def plain_graft(grafted: Grafted, spatial_dims: int) -> fx.GraphModule:
    """A seed with its way of blending, as a traced module of torch's own layers and functions."""
    parts = copy.deepcopy(grafted)
    for name, part in list(parts.named_children()):
        if type(part) in _TRACEABLE:
            setattr(parts, name, _TRACEABLE[type(part)](part, spatial_dims))
    try:
        graph = fx.Tracer().trace(parts)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"the blueprint {type(grafted.seed).__name__} cannot be traced ({error}), so that it would need "
            "esper to be loaded; write its forward without asking for sizes"
        ) from error
    for node in graph.nodes:
        node.type = None  # an annotation that is only a string cannot be pickled
    return fx.GraphModule(parts, graph, class_name="Grown")


def grown_name(slot: str) -> str:
    """The name of what grew in a slot: of a module in the plain model."""
    return f"{slot.replace('.', '_')}_grown"
