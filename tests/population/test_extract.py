"""A member taken out of the population: equal in output, plain in substance."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import nn

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import FORWARD_STAGES, Stage
from esper.population.extract import extract
from esper.population.network import RowNetwork
from esper.population.population import Population
from esper.population.row_module import RowModule
from tests.population.worlds import (
    CLOCK,
    RESIDUAL,
    WORLDS,
    every_pair,
    make_data,
    make_population,
    outputs_of,
    plant,
    record,
)

STAGES = [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]


def in_every_stage(world: str) -> SlotStates:
    """A member for each stage and style, another seed beside it."""
    pairs = every_pair(world)
    rows: list[list[SlotRecord | None]] = [[None, None]]
    for k, stage in enumerate(STAGES):
        for style in Style:
            name = pairs[(4 * (k + style)) % len(pairs)][0]
            beside = record(Stage.FOSSILIZED, *pairs[(7 * k + style) % len(pairs)]) if k % 2 else None
            rows.append([record(stage, name, style, 0.7 if stage is Stage.BLENDING else None), beside])
    return SlotStates.from_records(rows)


def modules_of_seeds(world: str, states: SlotStates) -> list[int]:
    """How many modules the heard seeds of each member add: none that widen a block, two that repeat two."""
    each = torch.where(states.blueprint >= Blueprint.WIDEN_HALF, 0, 1)
    if world == "text":
        each[:, 1] += (states.blueprint[:, 1] == Blueprint.CLONE) & (states.alpha[:, 1] == 1.0)
    heard = torch.isin(states.stage, torch.tensor([int(s) for s in FORWARD_STAGES]))
    return (heard * each).sum(1).tolist()


@pytest.mark.parametrize("world", WORLDS)
def test_an_extracted_member_says_what_it_said_in_the_population(world: str) -> None:
    """Every blend in every stage, after some training; float32, to 1e-5."""
    states = in_every_stage(world)
    members = states.num_members
    population = make_population(world, members)
    plant(population, states)
    data = make_data(world, members)
    population.train_epoch(states, data, CLOCK)
    inputs = data.inputs[0, :5]
    ours = outputs_of(population, states, inputs)
    heard = modules_of_seeds(world, states)
    blocks = population.num_slots if world in RESIDUAL else 0
    for i in range(members):
        module = extract(population, states, i)
        assert not module.training
        trunk = sum(part is not None for part in population.network.trunk)
        assert len(module) == trunk + blocks + heard[i]  # the host and the seeds that are heard
        torch.testing.assert_close(module(inputs), ours[i], atol=1e-5, rtol=1e-5)


def test_nothing_of_the_population_is_left_in_the_module() -> None:
    states = in_every_stage("images")
    population = make_population("images", states.num_members)
    plant(population, states)
    module = extract(population, states, states.num_members - 1)
    reached = reachable(module)
    assert not any(isinstance(thing, Population | RowNetwork | RowModule) for thing in reached)
    for value in module.state_dict().values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()  # no view of rows
    saved = io.BytesIO()
    torch.save(module, saved)
    assert saved.tell() < 60_000
    before = [p.detach().clone() for p in module.parameters()]
    population.begin_episode(1)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert all(p.requires_grad for p in module.parameters())
    kept = population.hosts.weights.clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(population.hosts.weights, kept)


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


@pytest.mark.parametrize("member", [-1, 2, 99])
def test_a_member_out_of_range_is_named(member: int) -> None:
    states = SlotStates.from_records([[record(Stage.HOLDING, Blueprint.NORM), None]] * 2)
    population = make_population("vectors", 2)
    with pytest.raises(
        IndexError, match=rf"member {member} is out of range; this population has members 0..1"
    ):
        extract(population, states, member)
