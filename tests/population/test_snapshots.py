"""Rows saved and restored one by one and all together, and what a measurement is made of."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock
from esper.population.metrics import cross_entropy
from esper.population.plan import graphs
from esper.population.plan.rows import measurement_rows
from esper.population.population import Population
from tests.population.worlds import (
    CLOCK,
    WORLDS,
    every_pair,
    make_data,
    make_population,
    plant,
    record,
)


def living(world: str) -> SlotStates:
    """Seeds in every stage that holds one, and a member with none."""
    pairs = every_pair(world)
    rows: list[list[SlotRecord | None]] = [
        [record(Stage.GERMINATED, *pairs[0]), None],
        [record(Stage.TRAINING, *pairs[5]), record(Stage.FOSSILIZED, *pairs[2])],
        [record(Stage.BLENDING, *pairs[11], 0.5), record(Stage.HOLDING, *pairs[7])],
        [None, None],
    ]
    return SlotStates.from_records(rows)


def grown(world: str) -> tuple[Population, SlotStates]:
    states = living(world)
    population = make_population(world, 4)
    plant(population, states, awake=False)
    population.train_epoch(states, make_data(world, 4), CLOCK)
    return population, states


@pytest.mark.parametrize("world", WORLDS)
def test_a_restored_population_goes_on_to_the_same_bits(world: str) -> None:
    population, states = grown(world)
    data = make_data(world, 4)
    saved = population.snapshot()
    other = make_population(world, 4)
    other.begin_episode(3)
    other.restore(saved)
    for one in (population, other):
        one.germinate(torch.tensor([[False, True]] + [[False, False]] * 3), torch.full((4, 2), 3))
        one.train_epoch(states, data, Clock(0, 1, 10))
    for name, value in population.tensors().items():
        assert torch.equal(other.tensors()[name], value), name
    assert not torch.equal(saved["hosts.weights"], population.hosts.weights)  # a copy, not a view


@pytest.mark.parametrize("rows", [[0], [1], [2, 3], [0, 1, 2, 3], []])
def test_rows_come_back_one_by_one_and_no_other_moves(rows: list[int]) -> None:
    population, states = grown("signals")
    saved = population.snapshot()
    population.train_epoch(states, make_data("signals", 4), Clock(0, 1, 10))
    latest = population.snapshot()
    where = torch.zeros(4, dtype=torch.bool)
    where[rows] = True
    population.restore(saved, where)
    for name, value in population.tensors().items():
        mine = value.unflatten(0, (4, -1))
        assert torch.equal(mine[where], saved[name].unflatten(0, (4, -1))[where])
        assert torch.equal(mine[~where], latest[name].unflatten(0, (4, -1))[~where])


def test_a_saved_empty_slot_clears_a_live_one() -> None:
    population = make_population("vectors", 2)
    saved = population.snapshot()
    states = SlotStates.from_records([[record(Stage.HOLDING, Blueprint.MLP), None]] * 2)
    plant(population, states)
    population.train_epoch(states, make_data("vectors", 2), CLOCK)
    population.restore(saved, torch.tensor([True, False]))
    for value in population.seeds.tensors().values():
        assert value[:2].abs().max() == 0
        assert value[2].abs().max() > 0
    population.restore(saved)
    assert population.seeds.weights.abs().max() == 0


def test_bad_snapshots_say_what_does_not_fit() -> None:
    population = make_population("vectors", 3)
    saved = population.snapshot()
    with pytest.raises(ValueError, match=r"births is \(3,\) in the snapshot and \(2,\) here; restore into"):
        make_population("vectors", 2).restore(saved)
    with pytest.raises(ValueError, match=r"the snapshot holds \['births'\]; this population holds"):
        population.restore({"births": saved["births"]})
    with pytest.raises(
        ValueError, match=r"where is torch.bool of shape \(2,\); give one truth value per member"
    ):
        population.restore(saved, torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"where is torch.int64 of shape \(3,\)"):
        population.restore(saved, torch.tensor([0, 1, 2]))


def test_an_episode_begins_with_its_own_weights_and_nothing_left_over() -> None:
    population, _ = grown("vectors")
    population.begin_episode(1)
    first = population.snapshot()
    assert first["parts.0.weights"].abs().max() == first["hosts.first"].abs().max() == 0
    population.begin_episode(2)
    assert not torch.equal(population.hosts.weights, first["hosts.weights"])
    population.begin_episode(1)
    for name, value in population.tensors().items():
        assert torch.equal(value, first[name])


# ---- measurement by ablation -----------------------------------------------------------------------------


def accuracy_alone(population: Population, states: SlotStates, member: int, alphas: list[float]) -> float:
    """A separate pass: these alphas for one member, every heard slot else as it is."""
    stage = torch.tensor([Stage.HOLDING if a > 0 else Stage.DORMANT for a in alphas])
    changed = states.replace(stage=states.stage.clone(), alpha=states.alpha.clone())
    changed.stage[member], changed.alpha[member] = stage, torch.tensor(alphas)
    data = make_data("signals", population.num_members, samples=60)
    return float(population.validate(changed, data, ablate=False).accuracy[member])


def test_fused_ablation_equals_separate_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a smooth score, which shows small differences."""
    monkeypatch.setattr(graphs, "accuracy", lambda *given: torch.exp(-cross_entropy(*given)))
    names = [n for n, _ in every_pair("signals")[::4]]
    rows: list[list[SlotRecord | None]] = [
        [record(Stage.HOLDING, names[0], Style.GATED_GATE), record(Stage.BLENDING, names[1], 1, 0.5)],
        [record(Stage.HOLDING, names[2]), record(Stage.TRAINING, names[3], 1)],
        [record(Stage.TRAINING, names[5]), None],
        [None, None],
        [None, record(Stage.FOSSILIZED, names[6])],
    ]
    states = SlotStates.from_records(rows)
    population = make_population("signals", 5, validation_samples=60)
    plant(population, states)
    measured = population.validate(states, make_data("signals", 5, samples=60))
    for i, row in enumerate(rows):
        own = [0.0 if r is None or r.stage == Stage.TRAINING else r.alpha for r in row]
        base = accuracy_alone(population, states, i, own)
        assert float(measured.accuracy[i]) == pytest.approx(base, abs=1e-6)
        for s in (0, 1):
            without = accuracy_alone(population, states, i, [0.0 if k == s else a for k, a in enumerate(own)])
            wanted = 100 * (base - without) if own[s] > 0 else float("nan")
            assert float(measured.contribution[i, s]) == pytest.approx(wanted, abs=1e-3, nan_ok=True)
            seed, gain = row[s], float("nan")
            if seed is not None and seed.stage == Stage.TRAINING:
                alphas = [1.0 if k == s else a for k, a in enumerate(own)]
                gain = 100 * (accuracy_alone(population, states, i, alphas) - base)
            assert float(measured.shadow_gain[i, s]) == pytest.approx(gain, abs=1e-3, nan_ok=True)
    assert measured.contribution[0].abs().min() > 0.02  # well above the tolerance
    # own rows; two ablations; one and a shadow; a shadow; nothing; one.
    asked = measurement_rows(population.read_slots(states))
    assert len(asked.member) == 5 + 2 + 2 + 1 + 0 + 1


def test_an_ablation_that_is_not_asked_for_costs_nothing() -> None:
    population, states = grown("vectors")
    measured = population.validate(states, make_data("vectors", 4), ablate=False)
    assert len(measurement_rows(population.read_slots(states), ablate=False).member) == 4
    assert measured.contribution.isnan().all()
    assert measured.shadow_gain.isnan().all()
