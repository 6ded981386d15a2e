"""Dropout from each row's own stream: a member's numbers do not depend on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.foundation.streams import rekeyed, uniform_of

# Layer → how many axes of a sample are drawn for: all of them, or the channels alone.
_DROPOUTS: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 1,
    nn.Dropout2d: 1,
    nn.Dropout3d: 1,
}


class StreamDropout(nn.Module):
    """x [B, ...] with a key [], or rows x [R, B, ...] with keys [R]; keys are lent for one call."""

    def __init__(self, p: float, place: int, axes: int | None) -> None:
        super().__init__()
        self.p, self.place, self.axes = p, place, axes
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.key is None:
            raise RuntimeError("dropout has no key; give `keys` when training a module that draws")
        lead = self.key.ndim + 1  # rows, if there are any, and the batch
        drawn = x.shape if self.axes is None else x.shape[: lead + self.axes]
        count = int(torch.Size(drawn[self.key.ndim :]).numel())
        kept = uniform_of(rekeyed(self.key, self.place), count) >= self.p
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0
        return x * kept.view(*drawn, *[1] * (x.ndim - len(drawn))) * scale


def with_own_draws(module: nn.Module) -> tuple[nn.Module, list[StreamDropout]]:
    """The module with its dropout layers replaced, and the layers that replace them."""
    found: list[StreamDropout] = []

    def replaced(part: nn.Module) -> nn.Module:
        if type(part) in _DROPOUTS:
            drop = StreamDropout(float(getattr(part, "p")), len(found), _DROPOUTS[type(part)])  # noqa: B009
            found.append(drop.train(part.training))
            return drop
        for name, child in part.named_children():
            setattr(part, name, replaced(child))
        return part

    return replaced(module), found
