"""What grew, in words."""

from __future__ import annotations

import pytest

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.extract import describe_growth
from esper.population.population import Population
from tests.population.worlds import WORLDS, make_population, plant, record

NOTHING = SlotStates.empty(1, 2)
CLONE, HALF, FULL = Blueprint.CLONE, Blueprint.WIDEN_HALF, Blueprint.WIDEN_FULL


def folded(population: Population, *rounds: tuple[Blueprint | None, Blueprint | None]) -> Population:
    """Seeds of these blueprints, folded in one round after the other."""
    for names in rounds:
        rows: list[SlotRecord | None] = [None if n is None else record(Stage.FOSSILIZED, n) for n in names]
        states = plant(population, SlotStates.from_records([rows]))
        population.fold(states.blueprint >= 0, states.style)
        population.read_slots(NOTHING)
    return population


@pytest.mark.parametrize("world", WORLDS)
def test_a_member_that_did_not_grow_has_nothing_to_say(world: str) -> None:
    population = make_population(world, 1)
    assert describe_growth(population, NOTHING, 0) == []
    isolated = SlotStates.from_records([[record(Stage.TRAINING, Blueprint.NORM), None]])
    assert describe_growth(population, plant(population, isolated), 0) == []


def test_repetitions_and_widths_are_named_by_block() -> None:
    population = folded(make_population("residual vectors", 1), (CLONE, HALF), (CLONE, HALF), (None, CLONE))
    assert describe_growth(population, NOTHING, 0) == [
        "block 1 repeated twice",
        "block 2 repeated once",
        "hidden units 6 → 12 in block 2",
        "hidden units 6 → 12 in copy 1 of block 2",
    ]


def test_layers_of_two_blocks_are_repeated_together() -> None:
    population = folded(make_population("text", 1), (HALF, FULL), (None, CLONE))
    assert describe_growth(population, NOTHING, 0) == [
        "heads 2 → 3 in block 1",
        "blocks 1 and 2 repeated once",
        "hidden units 8 → 16 in block 2",
        "hidden units 8 → 16 in copy 1 of block 2",
        "heads 2 → 3 in copy 1 of block 1",
    ]


def test_channels_grafts_and_half_heard_seeds() -> None:
    population = folded(make_population("residual images", 1), (FULL, Blueprint.NORM))
    seeds = [
        record(Stage.HOLDING, CLONE),
        record(Stage.BLENDING, Blueprint.CONV_LIGHT, Style.GATED_GATE, 0.5),
    ]
    states = plant(population, SlotStates.from_records([seeds]))
    assert describe_growth(population, states, 0) == [
        "block 1 repeated once",
        "channels 3 → 5 in block 1",
        "channels 3 → 5 in copy 1 of block 1",
        "NORM behind block 2",
        "CONV_LIGHT at block 2, heard at 50%",
    ]


def test_a_host_without_blocks_has_segments() -> None:
    population = folded(make_population("signals", 1), (None, Blueprint.CONV_SMALL))
    assert describe_growth(population, NOTHING, 0) == ["CONV_SMALL behind segment 2"]
