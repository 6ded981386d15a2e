"""Layers that the policies share."""

from __future__ import annotations

import math

from torch import nn


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
