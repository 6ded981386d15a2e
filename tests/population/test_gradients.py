"""The health of seeds' gradients against a plain loop over seeds and their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.gradients import EXPLODING_NORM, VANISHING_NORM, gradient_health, measure_seeds
from esper.population.plan import SlotView, build_plan, training_rows
from esper.population.population import Population
from tests.population.worlds import every_pair, make_population, record

CPU = torch.device("cpu")
SCALES = (0.0, 1e-9, 1e-3, 1.0, 1e3)
SPOILS = (0.0, math.nan, math.inf, -math.inf, 1e25)


@pytest.fixture(scope="module", params=["signals", "vectors", "text"])
def world(request: pytest.FixtureRequest) -> tuple[Population, SlotStates]:
    """Every blueprint under every style, two of three isolated."""
    pairs = every_pair(request.param)
    population = make_population(request.param, len(pairs))
    stages = (Stage.TRAINING, Stage.HOLDING, Stage.TRAINING)
    records = [
        [record(stages[(i + s) % 3], *pairs[(i + 3 * s) % len(pairs)]) for s in range(population.num_slots)]
        for i in range(len(pairs))
    ]
    return population, SlotStates.from_records(records)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), spoil=st.sampled_from(SPOILS))
def test_seed_gradients_are_those_of_each_seed_alone(
    world: tuple[Population, SlotStates], seed: int, spoil: float
) -> None:
    population, states = world
    view = SlotView.of(states)
    plan = build_plan(training_rows(view), view, CPU)
    bodies, live = population.bodies, plan.live_seeds.tolist()
    dice = torch.Generator().manual_seed(seed)
    scale = torch.tensor(SCALES)[torch.randint(len(SCALES), (len(live), bodies.seed_width), generator=dice)]
    gradient = scale * torch.randn(scale.shape, generator=dice)
    if spoil:
        gradient[torch.rand(gradient.shape, generator=dice) < 0.01] = spoil
    host_norm = torch.rand(population.num_members, generator=dice)
    found = measure_seeds(bodies, plan, gradient, host_norm, view.shape)
    for k, place in enumerate(live):
        member, slot = divmod(place, population.num_slots)
        layout = bodies.slots[slot].seeds[int(states.blueprint[member, slot])].layout
        parts = gradient[k, : layout.total].double().split(layout.sizes)
        norms = [float(part.norm()) for part in parts]
        vanishing = sum(norm < VANISHING_NORM for norm in norms) / len(norms)
        exploding = sum(not norm <= EXPLODING_NORM for norm in norms) / len(norms)
        assert float(found.vanishing[member, slot]) == pytest.approx(vanishing)
        assert float(found.exploding[member, slot]) == pytest.approx(exploding)
        health = gradient_health(torch.tensor(vanishing), torch.tensor(exploding))
        assert float(found.health[member, slot]) == pytest.approx(float(health))
        if math.isfinite(sum(norms)) and sum(norms) < 1e15:
            total = math.hypot(*norms)
            assert float(found.norm[member, slot]) == pytest.approx(total, rel=1e-4)
            size = math.sqrt(bodies.host_width / layout.total)
            ratio = total / (float(host_norm[member]) + 1e-12) * size
            assert float(found.ratio[member, slot]) == pytest.approx(ratio, rel=1e-3)
    untrained = torch.ones(view.shape, dtype=torch.bool)
    untrained.view(-1)[plan.live_seeds] = False
    assert found.norm[untrained].isnan().all()
    assert not found.norm[~untrained].isnan().any()
