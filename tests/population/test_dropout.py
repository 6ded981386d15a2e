"""Dropout draws from the member's own stream, under vmap and in the row form alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.foundation.streams import Stream, stream_keys
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.dropout import StreamDropout, with_own_draws
from esper.population.hosts import Host
from esper.population.population import Population


class Doubled(nn.Module):
    """A module that has no row form, so that it runs under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.drop(x)


def make_host(under_vmap: bool) -> Host:
    drop = Doubled() if under_vmap else nn.Dropout(0.4)
    segments = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), drop),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2)),
    ]
    return Host(segments, "mlp", nn.Linear(8, 3), 8)


def train(ids: list[int], under_vmap: bool, epochs: int = 2) -> Population:
    config = PopulationConfig(batch_size=8, batches_per_epoch=3, seed_weights=1, initial_weights=4)
    population = Population(lambda: make_host(under_vmap), config, torch.tensor(ids), seed=3)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 4, generator=generator)
    targets = torch.randint(0, 3, (32,), generator=generator)
    data = MemberData.shared(inputs, targets, len(ids))
    for epoch in range(epochs):
        population.train_epoch(SlotStates.empty(len(ids), 2, "cpu"), data, Clock(0, epoch, epochs))
    return population


@pytest.mark.parametrize("under_vmap", [False, True])
def test_a_member_with_dropout_does_not_depend_on_its_neighbours(under_vmap: bool) -> None:
    """Nor on what the global generator was left at."""
    torch.manual_seed(1)
    alone = train([7], under_vmap)
    torch.manual_seed(2)
    among = train([3, 7, 9], under_vmap)
    torch.testing.assert_close(among.hosts.weights[1], alone.hosts.weights[0], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(among.hosts.weights[0], among.hosts.weights[1])


def test_rows_are_dropped_at_the_rate_and_scaled_each_in_its_own_way() -> None:
    drop, _ = with_own_draws(nn.Dropout(0.3))
    assert isinstance(drop, StreamDropout)
    drop.key = stream_keys(0, torch.arange(4), Stream.DROPOUT, 5)
    out = drop(torch.ones(4, 50, 40))
    torch.testing.assert_close(out.unique(), torch.tensor([0.0, 1 / 0.7]))
    torch.testing.assert_close((out == 0).float().mean(dim=(1, 2)), torch.full((4,), 0.3), atol=0.03, rtol=0)
    assert len({tuple(row.flatten().tolist()) for row in out}) == 4
    drop.key = stream_keys(0, torch.arange(4), Stream.DROPOUT, 6)
    assert not torch.equal(drop(torch.ones(4, 50, 40)), out)  # another minibatch draws anew


def test_whole_channels_are_dropped_where_the_layer_says_so() -> None:
    drop, _ = with_own_draws(nn.Dropout2d(0.5))
    assert isinstance(drop, StreamDropout)
    drop.key = stream_keys(0, torch.arange(2), Stream.DROPOUT, 0)
    by_channel = drop(torch.ones(2, 5, 6, 3, 3)).flatten(3)
    assert by_channel.amin(3).equal(by_channel.amax(3))
    assert set(by_channel.unique().tolist()) == {0.0, 2.0}


def test_nothing_is_drawn_outside_of_training_and_two_layers_draw_apart() -> None:
    module, found = with_own_draws(nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))))
    x = torch.ones(2, 100)
    assert torch.equal(module.eval()(x), x)
    for drop in found:
        drop.key = stream_keys(0, torch.tensor(0), Stream.DROPOUT, 0)
    first, second = (drop.train()(x) for drop in found)
    assert not torch.equal(first, second)


def test_training_without_a_key_says_what_is_missing() -> None:
    module, _ = with_own_draws(nn.Dropout(0.5))
    with pytest.raises(RuntimeError, match="give `keys`"):
        module(torch.ones(2, 3))
