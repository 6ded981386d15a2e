"""Where seeds may grow is found by one look at the model, which holds on to nothing that it computes."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from esper.growing.slots import find_slots


def test_looking_for_places_keeps_no_activation_alive() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    made: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.register_forward_hook(lambda _module, _inputs, output: made.append(weakref.ref(output)))
    alive: list[int] = []

    def run() -> None:
        output = model(torch.ones(3, 8))
        alive.append(sum(activation() is not None for activation in made))
        assert output.shape == (3, 2)

    places = find_slots(model, run)
    assert [place.shape for place in places] == [(8,)] * 4
    assert alive == [1]  # what the model gives
