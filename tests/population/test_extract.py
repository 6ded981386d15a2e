"""A member read out of a population: plain in substance, and what grew in it in words."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import nn

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.extract import describe_growth, extract
from esper.population.network import RowNetwork
from esper.population.population import Population
from esper.population.row_module import RowModule
from tests.population.worlds import WORLDS, make_population, plant, record
from tests.slots import SlotRecord, states_from_records

NOTHING = SlotStates.empty(1, 2)
CLONE, HALF, FULL = Blueprint.CLONE, Blueprint.WIDEN_HALF, Blueprint.WIDEN_FULL


def test_nothing_of_the_population_is_left_in_the_module() -> None:
    seeds = [record(Stage.HOLDING, Blueprint.NORM, Style.GATED_GATE), record(Stage.BLENDING, 3, alpha=0.7)]
    states = states_from_records([seeds] * 2)
    population = make_population("images", 2)
    plant(population, states)
    module = extract(population, states, 1)
    assert not any(isinstance(thing, Population | RowNetwork | RowModule) for thing in reachable(module))
    for value in module.state_dict().values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()  # no view of rows
    saved = io.BytesIO()
    torch.save(module, saved)
    assert saved.tell() < 60_000
    before = [p.detach().clone() for p in module.parameters()]
    population.begin_episode(1)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert all(p.requires_grad for p in module.parameters())
    assert not module.training


def reachable(root: object) -> list[object]:
    """Everything that hangs on an object, classes, functions and modules of code left aside."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        thing = queue.pop()
        code = isinstance(thing, type) or (callable(thing) and not isinstance(thing, nn.Module))
        if code or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, nn.Module):
            queue.extend(vars(thing).values())
        elif isinstance(thing, dict | list | tuple | set):
            queue.extend(gc.get_referents(thing))
    return list(seen.values())


def folded(population: Population, *rounds: tuple[Blueprint | None, Blueprint | None]) -> Population:
    """Seeds of these blueprints, folded in one round after the other."""
    for names in rounds:
        rows: list[SlotRecord | None] = [None if n is None else record(Stage.FOSSILIZED, n) for n in names]
        states = plant(population, states_from_records([rows]))
        population.fold(states.blueprint >= 0, states.style)
        population.read_slots(NOTHING)
    return population


@pytest.mark.parametrize("world", WORLDS)
def test_a_member_that_did_not_grow_has_no_changes(world: str) -> None:
    population = make_population(world, 1)
    assert describe_growth(population, NOTHING, 0) == []
    isolated = states_from_records([[record(Stage.TRAINING, Blueprint.NORM), None]])
    assert describe_growth(population, plant(population, isolated), 0) == []


@pytest.mark.parametrize(
    ("world", "rounds", "lines"),
    [
        (
            "residual vectors",
            [(CLONE, HALF), (CLONE, HALF), (None, CLONE)],
            [
                "block 1 repeated twice",
                "block 2 repeated once",
                "hidden units 6 → 12 in block 2",
                "hidden units 6 → 12 in copy 1 of block 2",
            ],
        ),
        (
            "text",
            [(HALF, FULL), (None, CLONE)],
            [
                "heads 2 → 3 in block 1",
                "blocks 1 and 2 repeated once",
                "hidden units 8 → 16 in block 2",
                "hidden units 8 → 16 in copy 1 of block 2",
                "heads 2 → 3 in copy 1 of block 1",
            ],
        ),
        ("signals", [(None, Blueprint.CONV_SMALL)], ["CONV_SMALL behind segment 2"]),
    ],
)
def test_what_was_folded_in_is_named_by_block(
    world: str, rounds: list[tuple[Blueprint | None, Blueprint | None]], lines: list[str]
) -> None:
    assert describe_growth(folded(make_population(world, 1), *rounds), NOTHING, 0) == lines


def test_channels_grafts_and_half_heard_seeds() -> None:
    population = folded(make_population("residual images", 1), (FULL, Blueprint.NORM))
    half = record(Stage.BLENDING, Blueprint.CONV_LIGHT, Style.GATED_GATE, 0.5)
    states = plant(population, states_from_records([[record(Stage.HOLDING, CLONE), half]]))
    assert describe_growth(population, states, 0) == [
        "block 1 repeated once",
        "channels 3 → 5 in block 1",
        "channels 3 → 5 in copy 1 of block 1",
        "NORM behind block 2",
        "CONV_LIGHT at block 2, heard at 50%",
    ]
