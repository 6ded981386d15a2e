"""Graphs that serve many plans: padding changes nothing, and what was captured is used again."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock
from esper.population.forms import NO_FORM
from esper.population.hosts import HOST_PRESETS
from esper.population.plan import graphs
from esper.population.plan.graphs import MAX_GRAPHS, GraphCache
from esper.population.plan.packing import LAUNCH_COST, Bucket, Group
from esper.population.population import Population
from esper.utils.graphs import TensorGraph
from esper.utils.rows import tensors_of
from tests.cpu_graphs import graphs_on_cpu
from tests.population.lives import Life, doubles
from tests.population.test_independence import mixed_states
from tests.population.worlds import WORLDS, make_data, make_population, plant, seeds_of


@pytest.fixture(scope="module")
def captures() -> Iterator[list[TensorGraph]]:
    with graphs_on_cpu() as made, patch.object(GraphCache, "release", lambda self: None):
        yield made


def assert_alike(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in there.items():
        torch.testing.assert_close(here[name], value, atol=tolerance, rtol=tolerance, equal_nan=True)


def without_padding(population: Population) -> dict[str, torch.Tensor]:
    """The tensors of a population, 0 in the columns that the form of a part does not use."""
    used = torch.zeros_like(population.parts.weights, dtype=torch.bool)
    for row, form in enumerate(population.forms.movedim(2, 0).flatten().tolist()):
        if form != NO_FORM:
            for columns in population.network.columns(Group(row % population.num_slots, 0, form, 1, 1)):
                used[row, columns] = True
    parts = {
        name: torch.where(used, value, 0.0)
        for name, value in population.parts.tensors().items()
        if value.ndim == 2
    }
    others = {name: value for name, value in population.tensors().items() if not name.startswith("parts")}
    return {**others, **parts, "steps": population.parts.steps}


@pytest.mark.parametrize("preset", HOST_PRESETS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_padding_changes_nothing(preset: str, seed: int, captures: list[TensorGraph]) -> None:
    """Random lives with every kind of seed, folds and members that finish, to rounding of float64."""
    with doubles():
        lives = [Life(preset, seed, members=4, mirrored=False) for _ in range(2)]
        lives[1].population._graphs.possible = True
        for life in lives:
            life.population.finished[int(life.rng.integers(4))] = True
        for step in range(3):
            found = []
            for life in lives:
                if step:
                    life.sow(stages=(Stage.TRAINING, Stage.BLENDING, Stage.HOLDING))
                trained = life.population.train_epoch(life.states, life.data, Clock(0, step, 10))
                judged = [life.population.validate(life.states, life.data, unfinished=True) for _ in range(2)]
                found.append({**tensors_of(trained), **tensors_of(judged[1])})
                if step:
                    life.fold_some()
                    life.population.read_slots(life.states)
            assert_alike(found[1], found[0], 1e-9)
            assert_alike(*(without_padding(life.population) for life in reversed(lives)), 1e-9)
        assert not lives[1].population.parts.weights[-1].any()  # nobody's row


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        ("residual vectors", {"width": 8, "depth": 2, "hidden": 16}),
        ("text", {"width": 8, "depth": 1, "heads": 2, "expansion": 2}),
    ],
)
def test_large_groups_are_updated_by_themselves(
    world: str, options: dict[str, int], precision: str, captures: list[TensorGraph]
) -> None:
    """To rounding, which norms over other widths differ by; in float32 also where seeds come in between."""
    found, blocks = [], []
    with patch.dict(WORLDS, {world: (*WORLDS[world][:3], options)}):
        for least in (1, 2**60):
            with patch.object(graphs, "LARGE_GROUP", least):
                population, data = make_population(world, precision=precision), make_data(world, 3)
                population._graphs.possible = True
                states = SlotStates.empty(3, population.num_slots)
                for step in range(4 if precision == "float32" else 1):
                    if step == 2:
                        states = plant(population, mixed_states(world, 3))
                    trained = population.train_epoch(states, data, Clock(0, step, 10))
                    if not step:
                        blocks.append(len(population._graphs._graphs[0].run.blocks))
                found.append({**population.tensors(), **tensors_of(trained)})
    assert blocks == [population.num_slots, 1]
    assert_alike(*found, tolerance=1e-4 if precision == "float32" else 1e-2)


def test_what_is_not_finite_in_a_neighbour_stays_there_despite_padding(captures: list[TensorGraph]) -> None:
    """Member 0, which spare rows repeat, is the sick one."""
    results = []
    for sick in (True, False):
        states, population = mixed_states("residual images", 5), make_population("residual images", 5)
        population._graphs.possible = True
        plant(population, states)
        if sick:
            population.hosts.weights[0] = float("nan")
            seeds_of(population).weights[:2] = float("nan")
        data = make_data("residual images", 5)
        population.train_epoch(states, data, Clock(0, 0, 3))
        results.append(population.tensors())
    for name, value in results[1].items():
        rows = value.shape[0] // 5  # of each member
        assert torch.equal(results[0][name][rows:], value[rows:]), name


def test_graphs_are_used_again_and_are_few(captures: list[TensorGraph]) -> None:
    """A crowd that changes from step to step settles in rooms that hold it."""
    life = Life("cnn", 3, members=12, mirrored=False)
    life.population._graphs.possible = True
    made = []
    for step in range(24):
        captures.clear()
        life.sow(share=0.5)
        life.population.train_epoch(life.states, life.data, Clock(0, step, 24))
        life.population.validate(life.states, life.data)
        life.population.prune(torch.ones_like(life.states.enabled))
        made.append(len(captures))
    assert len(life.population._graphs._graphs) <= MAX_GRAPHS
    assert sum(made[:8]) > 0
    assert sum(made[16:]) <= sum(made[:8]) / 3


def test_a_bucket_holds_what_is_no_larger_in_anything() -> None:
    small = Bucket(4, 3, (), (1, 0), {(0, 3): (2, 1)}, frozenset({(0, 0)}))
    other = Bucket(4, 3, (), (0, 2), {(0, 3): (1, 1), (1, 5): (3, 3)}, frozenset({(1, 2)}))
    both = small.merge(other)
    assert both is not None
    assert all(both.holds(part) for part in (small, other))
    assert not any((small.holds(other), other.holds(small)))
    assert both.cost == 4 + 3 + 5 + 2 * LAUNCH_COST
    assert small.with_margin().holds(small)
    assert small.merge(Bucket(5, 3, (), (1, 0), {}, frozenset())) is None
