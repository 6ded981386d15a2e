"""Random numbers that belong to a member."""

from __future__ import annotations

import pytest
import torch

from esper.utils.streams import Stream, random_bits, random_order, random_uniform

MEMBERS = torch.arange(64)


def test_a_member_draws_the_same_in_any_shard_and_order() -> None:
    whole = random_bits(7, MEMBERS, Stream.DATA_ORDER, 3, 5)
    shard = torch.tensor([41, 3, 17])
    assert torch.equal(random_bits(7, shard, Stream.DATA_ORDER, 3, 5), whole[shard])
    alone = random_bits(7, torch.tensor([17]), Stream.DATA_ORDER, 3, 5)
    assert torch.equal(alone[0], whole[17])


def test_a_counter_per_member_equals_a_common_one() -> None:
    counters = torch.arange(64) % 4
    mixed = random_bits(1, MEMBERS, Stream.ACTION, counters, 3)
    for counter in range(4):
        common = random_bits(1, MEMBERS, Stream.ACTION, counter, 3)
        assert torch.equal(mixed[counters == counter], common[counters == counter])


def test_seed_member_stream_and_counter_all_matter() -> None:
    draws = [
        random_bits(seed, MEMBERS, stream, counter, 16)
        for seed in (0, 1, 2**63)
        for stream in Stream
        for counter in (0, 1, 2**40)
    ]
    words = torch.stack(draws).flatten()
    assert words.unique().numel() == words.numel(), "member 1 of seed 0 is not member 0 of seed 1"


def test_uniforms_are_uniform() -> None:
    sample = random_uniform(3, torch.arange(200), Stream.CONTROL, 0, 500)
    assert sample.dtype == torch.float32
    assert sample.min().item() >= 0
    assert sample.max().item() < 1
    assert sample.mean().item() == pytest.approx(0.5, abs=0.005)
    assert sample.var().item() == pytest.approx(1 / 12, abs=0.002)
    counts = torch.histc(sample, bins=16, min=0, max=1)
    chi_squared = ((counts - 6250) ** 2 / 6250).sum().item()
    assert chi_squared < 45, "15 degrees of freedom: 1 in 10,000"
    columns = torch.corrcoef(sample.T[:8])
    assert (columns - torch.eye(8)).abs().max().item() < 0.3


def test_orders_are_permutations_and_fair() -> None:
    order = random_order(5, torch.arange(3000), Stream.DATA_ORDER, 2, 5)
    assert torch.equal(order.sort(dim=1).values, torch.arange(5).expand(3000, 5))
    first = torch.bincount(order[:, 0], minlength=5) / 3000
    assert (first - 0.2).abs().max().item() < 0.03


@pytest.mark.gpu
def test_the_device_draws_the_same_numbers() -> None:
    here = random_bits(9, MEMBERS, Stream.SEED_INIT, 4, 33)
    there = random_bits(9, MEMBERS.cuda(), Stream.SEED_INIT, 4, 33)
    assert torch.equal(here, there.cpu())
