"""The running scale of returns; everything stays on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueNormalizer(nn.Module):
    """Mean and variance of all returns seen so far, in whose units the value head is trained.

    Returns that are not finite are left out. Nothing here reads the device. `update`, alone or in
    `update_returns`, changes the scale: call one of them once per rollout.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))  # [1], the shape in checkpoints
        self.register_buffer("variance", torch.ones(1, dtype=torch.float64))

    def scale(self) -> Tensor:
        """Return the standard deviation, never 0.  # [1] float32"""
        return self.variance.sqrt().clamp(min=1e-4).float()  # equal returns have no deviation to divide by

    def normalize(self, values: Tensor) -> Tensor:
        """Shift and scale to zero mean and unit variance."""
        return (values - self.mean.float()) / self.scale()

    def denormalize(self, values: Tensor) -> Tensor:
        """Invert `normalize`."""
        return values * self.scale() + self.mean.float()

    @torch.no_grad()
    def update(self, returns: Tensor, valid: Tensor) -> None:
        """Take in the valid, finite returns, by the parallel form of Welford's method.  # [N, T] each"""
        rows = returns.reshape(-1, 1).double()
        seen = valid.reshape(-1, 1) & rows.isfinite()
        rows = torch.where(seen, rows, 0.0)
        new = seen.sum()
        new_mean = rows.sum(0) / new.clamp(min=1)
        new_squares = torch.where(seen, rows - new_mean, 0.0).square().sum(0)
        # M2 = M2_old + M2_new + δ²·n_old·n_new / n
        total = self.count + new
        delta = new_mean - self.mean
        share = new / total.clamp(min=1)
        squares = self.variance * self.count + new_squares + delta.square() * self.count * share
        self.variance.copy_(torch.where(total > 0, squares / total.clamp(min=1), self.variance))
        self.mean.add_(delta * share)
        self.count.copy_(total)

    @torch.no_grad()
    def update_returns(self, returns: Tensor, valid: Tensor, value_head: nn.Linear) -> Tensor:
        """Update the scale and rewrite the last layer of V, so that denormalize(V) stays what it was.

        Returns the factor by which that layer's gradients shrink.  # returns, valid [N, T] → [1]
        """
        old_mean, old_scale = self.mean.float().clone(), self.scale()
        self.update(returns, valid)
        scale = self.scale()
        factor = old_scale / scale
        value_head.weight.mul_(factor)
        value_head.bias.mul_(old_scale).add_(old_mean - self.mean.float()).div_(scale)
        return factor
