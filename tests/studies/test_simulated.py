"""The simulated world keeps the rules: what grows pays as the table says, and twins share their luck."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.rollout import play
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.scripted import Scheduled, Static
from studies.setting import GATES
from studies.simulated import EPOCHS, SPREAD, WORTH, SimulatedPopulation, make_trainer


@pytest.fixture(scope="module")
def bodies() -> SimulatedPopulation:
    population = make_trainer(["main-0"], members=64).environment.population
    assert isinstance(population, SimulatedPopulation)
    return population


def test_seeds_are_worth_what_the_table_says(bodies: SimulatedPopulation) -> None:
    found = []
    everywhere = torch.ones(bodies.num_members, bodies.num_slots, dtype=torch.bool)
    for episode in range(8):
        bodies.begin_episode(episode)
        bodies.germinate(everywhere, torch.full_like(everywhere, int(Blueprint.CONV_HEAVY), dtype=torch.long))
        found.append(bodies.worth)
    worth = torch.cat(found)
    error = 4 * SPREAD / worth.numel() ** 0.5
    assert worth.mean() == pytest.approx(WORTH[Blueprint.CONV_HEAVY], abs=error)
    bodies.prune(everywhere)
    assert (bodies.worth == 0).all()


def test_a_seed_is_heard_by_its_alpha_and_learns_with_its_age(bodies: SimulatedPopulation) -> None:
    bodies.begin_episode(0)
    slots = SlotStates.empty(bodies.num_members, bodies.num_slots)
    bodies.epoch = 10  # well away from 0 and 1
    before = bodies._accuracy(slots)
    grown = slots.replace(
        stage=torch.full_like(slots.stage, int(Stage.FOSSILIZED)),
        blueprint=torch.full_like(slots.blueprint, int(Blueprint.NORM)),
        alpha=torch.ones_like(slots.alpha),
    )
    bodies.worth = torch.full_like(bodies.worth, 0.02)
    bodies.age = torch.full_like(bodies.age, EPOCHS)
    gained = bodies._accuracy(grown) - before
    share = 1 - torch.exp(torch.tensor(-1.0))
    torch.testing.assert_close(gained, (bodies.num_slots * 0.02 * share).expand_as(gained))


def test_members_that_do_not_grow_are_the_same_in_every_block() -> None:
    trainer = make_trainer(["main-0"], members=6)
    blocks = Blocks({"twins": Static(), "others": Static()})
    record = play(trainer.environment, blocks, 3)
    assert (record.accuracy[:, :6] == record.accuracy[:, 6:]).all()
    assert record.accuracy[-1].std() > 0
    grown = play(trainer.environment, Blocks({"twins": Static(), "others": Scheduled(gates=GATES)}), 3)
    assert (grown.accuracy[:, :6] == record.accuracy[:, :6]).all()
    assert (grown.accuracy[-1, 6:] != record.accuracy[-1, 6:]).any()
