"""Counted operations against the rows of work that the population really runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import STYLE_BLEND, Blend, Style, selectable_blueprints
from esper.lifecycle.slot_states import SlotStates
from esper.population.plan import Rows, SlotView, measurement_rows, training_rows
from esper.simic.costs import ForwardCosts, Work
from esper.simic.rollout import play
from esper.tamiyo.scripted import Static
from tests.lifecycle.strategies import random_members, to_states
from tests.simic.worlds import SMALL, make_environment, task


def costs(name: str) -> ForwardCosts:
    return make_environment(members=(0,), steps=1, name=name).costs


def states_for(name: str, num_slots: int, seed: int, members: int = 40) -> SlotStates:
    """Random states with blueprints that fit the host."""
    rng = np.random.default_rng(seed)
    states = to_states(random_members(rng, members, num_slots))
    fitting = torch.tensor(sorted(selectable_blueprints(task(name).topology)))
    drawn = fitting[torch.from_numpy(rng.integers(0, len(fitting), states.stage.shape))]
    return states.replace(blueprint=torch.where(states.blueprint >= 0, drawn, states.blueprint))


def slow_rows(found: ForwardCosts, states: SlotStates, rows: Rows) -> np.ndarray:
    """One forward pass of each row from its fork on, added up for its member."""
    total = np.zeros(states.num_members)
    for m, alphas, fork in zip(rows.member.tolist(), rows.alpha, rows.fork.tolist(), strict=True):
        flops = float(found.segments[fork + 1 :].sum())
        for s in [s for s in np.nonzero(alphas > 0)[0] if s >= fork]:
            flops += float(found.seeds[s, states.blueprint[m, s]])
            if STYLE_BLEND[Style(int(states.style[m, s]))] is Blend.GATE:
                flops += float(found.gates[s])
        total[m] += flops
    return total


@pytest.mark.parametrize("name", ["digits", "spirals"])
@pytest.mark.parametrize(("ablate", "pairs"), [(True, False), (True, True), (False, False)])
def test_an_epoch_costs_what_its_rows_cost(name: str, ablate: bool, pairs: bool) -> None:
    found = costs(name)
    states = states_for(name, len(found.gates), seed=3)
    view = SlotView.of(states)
    training = training_rows(view)
    measuring = measurement_rows(view, ablate, pairs).rows
    expected = 3 * 32 * slow_rows(found, states, training)
    expected += 48 * slow_rows(found, states, measuring)
    counted = found.epoch(states, Work(training=32, validation=48, ablate=ablate, pairs=pairs))
    np.testing.assert_allclose(counted.numpy(), expected, rtol=1e-12)
    assert counted.dtype == torch.float64


def test_an_mlp_host_costs_two_operations_per_weight() -> None:
    environment = make_environment(members=(0,), steps=1)
    weights = sum(p.numel() for p in environment.population.bodies.host.parameters() if p.ndim == 2)
    assert float(environment.costs.host) == 2 * weights


def test_a_convolution_costs_two_operations_per_weight_and_place() -> None:
    host = make_environment(members=(0,), steps=1, name="digits").population.bodies.host
    found = costs("digits")
    expected = 0
    for segment, shape in zip(host.segments, host.joint_shapes, strict=True):
        expected += 2 * segment[0].weight.numel() * int(np.prod(shape[1:]))
    expected += 2 * host.head[-1].weight.numel()
    assert float(found.host) == expected


def test_an_ungrown_episode_costs_its_epochs() -> None:
    environment = make_environment(members=(0, 1), steps=3)
    record = play(environment, Static(), 0)
    per_epoch = float(environment.costs.host) * (3 * 2 * SMALL.batch_size + SMALL.validation_samples)
    np.testing.assert_array_equal(record.flops, [3 * per_epoch] * 2)


def test_counting_leaves_the_bodies_as_they_were() -> None:
    environment = make_environment(members=(0,), steps=1, name="digits")
    bodies = environment.population.bodies
    before = [p.clone() for p in bodies.host.parameters()]
    ForwardCosts.of(bodies, task("digits").train.inputs[:1], torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, bodies.host.parameters(), strict=True))
    assert bodies.host.training
