"""The health of seeds' gradients against a plain loop over seeds and their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.lifecycle.actions import Blend
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.metrics import EXPLODING_NORM, VANISHING_NORM, gradient_health, measure_seeds
from esper.population.plan.packing import PlanSpec
from esper.population.plan.rows import training_rows
from esper.population.population import Population
from tests.population.reference import ReferenceMember, ReferenceSeed, Seed
from tests.population.worlds import every_pair, make_population, plant, record, reference_member, used_columns
from tests.slots import states_from_records

CPU = torch.device("cpu")
World = tuple[Population, SlotStates, list[ReferenceMember]]
SCALES = (0.0, 1e-9, 1e-3, 1.0, 1e3)
SPOILS = (0.0, math.nan, math.inf, -math.inf, 1e25)


@pytest.fixture(scope="module", params=["signals", "vectors", "residual images", "text"])
def world(request: pytest.FixtureRequest) -> World:
    """Every blueprint under every style, two of three isolated."""
    pairs = every_pair(request.param)
    population = make_population(request.param, len(pairs))
    stages = (Stage.TRAINING, Stage.HOLDING, Stage.TRAINING)
    records = [
        [record(stages[(i + s) % 3], *pairs[(i + 3 * s) % len(pairs)]) for s in range(population.num_slots)]
        for i in range(len(pairs))
    ]
    states = plant(population, states_from_records(records))
    return population, states, [reference_member(population, states, i) for i in range(len(pairs))]


def body_part(seed: Seed) -> nn.Module:
    """A seed without its gate."""
    return ReferenceSeed(seed.seed, Blend.ADD) if isinstance(seed, ReferenceSeed) else seed


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), spoil=st.sampled_from(SPOILS))
def test_seed_gradients_are_those_of_each_seed_alone(world: World, seed: int, spoil: float) -> None:
    population, states, members = world
    view = population.read_slots(states)
    plan = PlanSpec(training_rows(view), view).pack().to(CPU)
    network, live = population.network, plan.live.tolist()
    dice = torch.Generator().manual_seed(seed)
    scale = torch.tensor(SCALES)[torch.randint(len(SCALES), (len(live), network.part_width), generator=dice)]
    gradient = scale * torch.randn(scale.shape, generator=dice)
    if spoil:
        gradient[torch.rand(gradient.shape, generator=dice) < 0.01] = spoil
    by_group = gradient.split([group.live for group in plan.groups])
    found = measure_seeds(network, plan, by_group)
    for k, place in enumerate(live):
        member, slot = divmod(place, population.num_slots)
        if member >= population.num_members:  # a block of the host
            continue
        body = body_part(members[member].seed_at(slot))
        flat = used_columns(population, body, slot, gradient[k]).double()
        norms = [float(part.norm()) for part in flat.split([p.numel() for p in body.parameters()])]
        vanishing = sum(norm < VANISHING_NORM for norm in norms) / len(norms)
        exploding = sum(not norm <= EXPLODING_NORM for norm in norms) / len(norms)
        assert float(found.vanishing[member, slot]) == pytest.approx(vanishing)
        assert float(found.exploding[member, slot]) == pytest.approx(exploding)
        health = gradient_health(torch.tensor(vanishing), torch.tensor(exploding))
        assert float(found.health[member, slot]) == pytest.approx(float(health))
        if math.isfinite(sum(norms)) and sum(norms) < 1e15:
            total = math.hypot(*norms)
            assert float(found.norm[member, slot]) == pytest.approx(total, rel=1e-4)
    untrained = torch.ones(view.shape, dtype=torch.bool)
    untrained.view(-1)[plan.live[plan.live < untrained.numel()]] = False
    assert found.norm[untrained].isnan().all()
    assert not found.norm[~untrained].isnan().any()
