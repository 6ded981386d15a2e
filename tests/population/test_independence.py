"""What no neighbour may change: members keep to themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.optimizer import rate_share
from esper.population.population import Population
from tests.population.worlds import (
    CLOCK,
    WORLDS,
    every_pair,
    make_data,
    make_population,
    outputs_of,
    plant,
    record,
    seeds_of,
)
from tests.slots import SlotRecord, states_from_records

# Signals run the code of images with one axis less.
KINDS = [world for world in WORLDS if "signals" not in world]

# ---- what no neighbour may change ------------------------------------------------------------------------


def mixed_states(world: str, members: int) -> SlotStates:
    """Members that differ in what they grow; member i is the same in any crowd."""
    pairs = every_pair(world)
    rows: list[list[SlotRecord | None]] = []
    for i in range(members):
        (a, style), (b, other) = pairs[(3 * i) % len(pairs)], pairs[(5 * i + 2) % len(pairs)]
        kinds: list[list[SlotRecord | None]] = [
            [record(Stage.BLENDING, a, style, 0.5), record(Stage.TRAINING, b, other)],
            [None, record(Stage.HOLDING, b, other)],
            [record(Stage.TRAINING, a, style), None],
            [record(Stage.FOSSILIZED, a, style), record(Stage.FOSSILIZED, b, other)],
            [record(Stage.GERMINATED, a, style), None],
        ]
        rows.append(kinds[i % len(kinds)])
    return states_from_records(rows)


def course(
    world: str, ids: list[int], everyone: SlotStates, **settings: int
) -> tuple[Population, list[Tensor]]:
    """Two epochs of the chosen members out of a crowd, each with its own task of three."""
    population = make_population(world, ids, **settings)
    states = everyone[ids]
    plant(population, states, awake=False)
    data = make_data(world, everyone.num_members, tasks=3)
    mine = MemberData(data.inputs, data.targets, data.task_of[ids])
    seen = []
    for epoch in range(2):
        trained = population.train_epoch(states, mine, Clock(0, epoch, 2))
        judged = population.validate(states, mine)
        seen += [trained.loss, judged.loss, judged.accuracy, judged.contribution]
    return population, seen


@pytest.mark.parametrize("world", KINDS)
def test_neither_the_number_of_members_nor_the_chunks_change_a_member(world: str) -> None:
    """To 1e-5 after two epochs: products of other sizes may add in another order."""
    crowd_of_seven = mixed_states(world, 7)
    whole, seen = course(world, list(range(7)), crowd_of_seven)
    for ids, chunk in (([4], 1), ([6, 5, 1, 2], 3)):
        part, found = course(world, ids, crowd_of_seven, rows_per_chunk=chunk)
        for here, there in zip(found, seen, strict=True):
            torch.testing.assert_close(here, there[ids], atol=1e-5, rtol=1e-5, equal_nan=True)
        everyone = whole.tensors()
        for name, mine in part.tensors().items():
            rows = everyone[name].unflatten(0, (7, -1))[ids].flatten(0, 1)
            torch.testing.assert_close(mine, rows, atol=1e-5, rtol=1e-5)
            assert not name.endswith("steps") or torch.equal(mine, rows)


@pytest.mark.parametrize("world", KINDS)
def test_what_is_not_finite_in_one_member_changes_no_other(world: str) -> None:
    twin, _, twin_judged = epoch_with(world, broken=None)
    for broken in ("data", "heard seed", "isolated seed", "host"):
        if world == "text" and broken == "data":  # tokens are whole numbers
            continue
        ours, trained, judged = epoch_with(world, broken)
        for name, value in twin.items():
            rows = value.shape[0] // 5
            assert torch.equal(ours[name][rows:], value[rows:]), (broken, name)
        for name in ("loss", "accuracy", "contribution", "shadow_gain"):
            here, there = getattr(judged, name)[1:], getattr(twin_judged, name)[1:]
            torch.testing.assert_close(here, there, atol=0, rtol=0, equal_nan=True)
        assert trained.seeds.health[0].nan_to_num(1.0).min() < 1.0, "the broken one is seen to be broken"
        if broken == "isolated seed":
            assert torch.equal(ours["hosts.weights"], twin["hosts.weights"])


def epoch_with(world: str, broken: str | None) -> tuple[dict[str, Tensor], TrainMetrics, ValidationMetrics]:
    """Five members after an epoch in which something of the first was not finite."""
    states, population, data = mixed_states(world, 5), make_population(world, 5), make_data(world, 5, tasks=5)
    plant(population, states)
    places = {
        "data": data.inputs,
        "heard seed": seeds_of(population).weights,
        "isolated seed": seeds_of(population).weights[1:],
        "host": population.hosts.weights,
    }
    if broken is not None:
        places[broken][0].fill_(float("nan"))
    trained = population.train_epoch(states, data, CLOCK)
    judged = population.validate(states, data)
    return population.snapshot(), trained, judged


@pytest.mark.parametrize("world", KINDS)
def test_a_host_neither_hears_nor_feels_a_seed_in_isolation(world: str) -> None:
    """What a twin with no seed has, from germination on and through TRAINING.

    To rounding: torch computes the last few elements of a SiLU one by one, and one more row moves them.
    """
    name, style = every_pair(world)[5]
    empty = SlotStates.empty(3, 2)
    born = states_from_records([[record(Stage.GERMINATED, name, style), None], [None, None], [None, None]])
    isolated = states_from_records([[record(Stage.TRAINING, name, style), None], [None, None], [None, None]])
    grown, bare = make_population(world), make_population(world)
    data = make_data(world, 3)
    inputs = data.inputs[0, :5]
    plant(grown, born, awake=False)
    for epoch, states in enumerate([born, isolated, isolated, isolated]):
        expected = [outputs_of(bare, empty, inputs), bare.train_epoch(empty, data, Clock(0, epoch, 4)).loss]
        found = [outputs_of(grown, states, inputs), grown.train_epoch(states, data, Clock(0, epoch, 4)).loss]
        expected += bare.hosts.tensors().values()
        found += grown.hosts.tensors().values()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert (seeds_of(grown).steps[0] > 0) == (states is isolated)


# ---- data and updates ------------------------------------------------------------------------------------


def test_a_pass_meets_every_sample_once_in_an_order_of_the_member() -> None:
    orders = [DataOrder(5, torch.tensor(ids), 24, 4) for ids in ([2], [0, 1, 2])]
    first, second = (
        [torch.cat([order.batch(0, b)[-1] for b in batches]) for order in orders]
        for batches in (range(6), range(6, 12))
    )
    assert sorted(first[0].tolist()) == sorted(second[0].tolist()) == list(range(24))
    assert torch.equal(*first)
    assert torch.equal(*second)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("cosine", [1.0, 0.5, 0.0955, 0.001]),
        ("one_cycle", [0.04, 0.6913, 0.1464, 0.001]),
        ("flat", [0.04, 1.0, 0.5, 0.0]),
    ],
)
def test_schedules_move_the_rate(schedule: str, shares: list[float]) -> None:
    config = PopulationConfig(schedule=schedule, warmup=0.2, decay=0.4)  # type: ignore[arg-type]
    found = rate_share(torch.tensor([0.0, 0.5, 0.8, 1.0]), config)
    assert found.tolist() == pytest.approx(shares, abs=1e-3)
    cold = config.model_copy(update={"warmup": 0.0})
    assert rate_share(torch.zeros(1), cold).item() == 1.0
