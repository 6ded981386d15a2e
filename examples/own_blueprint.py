"""A blueprint of your own: `python -m examples.own_blueprint`.

The decorator gives the blueprint CONV_LIGHT another body in convolutional networks, here and wherever this
module is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import esper
from esper.lifecycle.actions import Blueprint
from esper.population.blueprints import blueprint
from esper.tasks import load_task


@blueprint(Blueprint.CONV_LIGHT, topologies={"cnn"})
class WideConvolution(nn.Module):
    """Kernel 5 instead of 3, SiLU, norm."""

    def __init__(self, width: int, spatial_dims: int) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d}[spatial_dims]
        self.body = convolution(width, width, 5, padding=2, bias=False)
        self.norm = nn.GroupNorm(1, width)
        nn.init.zeros_(self.norm.weight)  # s = 0 at birth, and every gradient is alive after one step

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(torch.nn.functional.silu(self.body(h)))


def main(epochs: int = 20) -> esper.Grown:
    """Grow a small convolutional network by this blueprint alone."""
    digits = load_task("digits")
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    grown = esper.grow(
        model,
        train=(digits.train.inputs, digits.train.targets),
        val=(digits.validation.inputs, digits.validation.targets),
        controller="schedule:conv_light@0.1",
        epochs=epochs,
    )
    print(grown.report())
    return grown


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
