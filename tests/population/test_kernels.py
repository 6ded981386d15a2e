"""The GPU kernels against the same layers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.population.layout import Layout
from esper.population.row_module import RowModule

CONVOLUTIONS = {
    "3x3": nn.Conv2d(8, 12, 3, padding=1),
    "from one channel": nn.Conv2d(1, 16, 3, padding=1, bias=False),
    "1x1": nn.Conv2d(16, 8, 1, bias=False),
    "strided": nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "signal": nn.Conv1d(8, 8, 5, stride=2, padding=2),
    "depthwise signal": nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False),
    "wide": nn.Conv2d(32, 64, 3, padding=1, bias=False),
}


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def worst_error(module: nn.Module, channels: int, spatial: tuple[int, ...]) -> float:
    """Of outputs and both gradients: fused rows against float64 rows under the grouped form."""
    device = torch.device("cuda")
    layout = Layout.of(module)
    weights = torch.randn(5, layout.total, device=device)
    x = torch.randn(5, 3, channels, *spatial, device=device)
    results = []
    for way, dtype in (("fused", torch.float32), ("grouped", torch.float64)):
        w, inputs = (t.detach().to(dtype).requires_grad_() for t in (weights, x))
        out = RowModule(module, device, way)(w, inputs, {}, True)
        probe = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
        grads = torch.autograd.grad((out * probe).sum(), (w, inputs))
        results.append((out.detach(), *grads))
    errors = [relative_error(fused, truth) for fused, truth in zip(*results, strict=True)]
    return float(torch.tensor(errors).max())  # a NaN stays a NaN, and passes no test


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_fused_convolution_is_the_convolution(name: str) -> None:
    conv = CONVOLUTIONS[name]
    spatial = (9,) if isinstance(conv, nn.Conv1d) else (9, 7)
    assert worst_error(conv, conv.in_channels, spatial) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "spatial"), [(8, (8, 8)), (12, (5, 3)), (16, (40,)), (32, (32, 32))])
def test_fused_norm_is_the_norm(channels: int, spatial: tuple[int, ...]) -> None:
    assert worst_error(nn.GroupNorm(1, channels), channels, spatial) < 1e-5
