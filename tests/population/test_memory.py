"""What a member takes: weights as they are counted by hand, and activations that follow the batch."""

from __future__ import annotations

import pytest
import torch

from esper.population.config import PopulationConfig
from esper.population.hosts import build_host
from esper.population.memory import COPIES, member_bytes
from esper.population.population import Population


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_is_weights_and_what_a_batch_keeps(precision: str) -> None:
    def make() -> object:
        return build_host("cnn", (1, 8, 8), 10, width=4)

    found = []
    for batch in (8, 16, 32):
        config = PopulationConfig(batch_size=batch, precision=precision)  # type: ignore[arg-type]
        found.append(member_bytes(make, config, torch.randn(32, 1, 8, 8), torch.zeros(32, dtype=torch.long)))  # type: ignore[arg-type]
    first, second = found[1] - found[0], found[2] - found[1]
    assert second == pytest.approx(2 * first, rel=0.05)  # twice the samples, twice the activations
    population = Population(make, PopulationConfig(initial_weights=1), torch.arange(1))  # type: ignore[arg-type]
    rows = 12 * (population.hosts.weights.numel() + population.parts.weights.numel())
    assert found[0] - first > COPIES * rows * 0.9
    assert found[0] - first < COPIES * rows * 2.5
