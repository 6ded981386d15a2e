"""Blocks, clones, widenings and folds over random hosts and random lives, against plain modules."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population import surgery
from esper.population.data import Clock
from esper.population.extract import Grafted, extract
from esper.population.hosts import HOST_PRESETS
from esper.population.population import Population
from esper.population.row_module import flatten
from tests.population.lives import Life, doubles
from tests.population.worlds import (
    CLOCK,
    RESIDUAL,
    WORLDS,
    OneAfterAnother,
    make_data,
    make_population,
    outputs_of,
    plant,
    record,
    seeds_of,
)
from tests.slots import states_from_records

LIVES = {"preset": st.sampled_from(sorted(HOST_PRESETS)), "seed": st.integers(0, 2**20)}
LIFE_TOLERANCE = 1e-7  # 100 lives were within 1e-11; a wrong part is off by 1e-3


@settings(max_examples=6, deadline=None)
@given(**LIVES)
def test_a_life_of_growth_equals_plain_modules_trained_one_after_another(preset: str, seed: int) -> None:
    """Outputs, and every weight of trunks, blocks, folded parts and seeds, isolated or heard."""
    with doubles():
        life = Life(preset, seed).grow(rounds=2)
        life.train()
        assert life.plain is not None
        life.plain.assert_equal(LIFE_TOLERANCE)
        ours = outputs_of(life.population, life.states, life.inputs)
        for i, member in enumerate(life.plain.members):
            torch.testing.assert_close(ours[i], member(life.inputs).detach(), atol=LIFE_TOLERANCE, rtol=0)


# ---- what a seed changes when it begins, blends in and is folded -----------------------------------------


@settings(max_examples=6, deadline=None)
@given(**LIVES)
def test_at_alpha_0_nothing_changes_and_alpha_is_heard_in_proportion(preset: str, seed: int) -> None:
    """Bit-equal at 0; a seed at 2⁻¹⁸ changes 256 times as much as one at 2⁻²⁶."""
    with doubles():
        life = Life(preset, seed, mirrored=False).grow(rounds=1)
        population, states = life.population, life.states
        held = states.blueprint >= 0

        def at(alpha: float) -> torch.Tensor:
            stage = torch.where(held, int(Stage.BLENDING), states.stage)
            heard = torch.where(held, alpha, 0.0).to(states.alpha.dtype)
            return outputs_of(population, states.replace(stage=stage, alpha=heard), life.inputs)

        nothing, silent = at(0.0), SlotStates.empty(*states.stage.shape)
        assert torch.equal(nothing, outputs_of(population, silent, life.inputs))
        large, small = at(2**-18) - nothing, at(2**-26) - nothing
        assert (256 * small - large).abs().max() <= 0.05 * large.abs().max() + 1e-12


@settings(max_examples=5, deadline=None)
@given(**LIVES)
def test_a_fold_is_exact(preset: str, seed: int) -> None:
    """Outputs before and after agree, and so do parameters; a slot is free again."""
    with doubles():
        life = Life(preset, seed, mirrored=False).grow(rounds=1)
        population = life.population
        life.train()
        states, twin = life.states, copy.deepcopy(population)
        where = life.fold_some(share=0.8)
        empty, life.states = life.states, states
        full = life.at_full_strength(where)
        twin.prune((states.blueprint >= 0) & ~where)
        before, after = outputs_of(twin, full, life.inputs), outputs_of(population, empty, life.inputs)
        torch.testing.assert_close(after, before, atol=1e-12, rtol=0)
        assert torch.equal(population.parameter_counts(empty), twin.parameter_counts(full))
        assert (population.forms[:, :, 0] == -1).all()


@pytest.mark.parametrize("world", RESIDUAL)
def test_a_clone_begins_as_its_origin_and_differs_from_it_after_one_step(world: str) -> None:
    states = states_from_records([[None, record(Stage.HOLDING, Blueprint.CLONE)]] * 2)
    population, data = make_population(world, 2, batches_per_epoch=1), make_data(world, 2)
    for epoch in range(5):  # the first step of any optimizer is one of signs: let the host be further on
        population.train_epoch(SlotStates.empty(2, 2), data, Clock(0, epoch, 10))
    plant(population, states, awake=False)
    blocks = 2 if world == "text" else 1  # that a clone repeats
    for expected in (True, False):
        for i in (0, 1):
            *modules, _ = extract(population, states, i)
            pair = modules[-2 * blocks : -blocks], modules[-blocks:]
            origin, clone = (flatten(nn.Sequential(*part)) for part in pair)
            differs = (origin - clone).abs() > 1e-6
            assert (not differs.any()) if expected else differs.float().mean() > 0.5
        population.train_epoch(states, data, Clock(0, 5, 10))


# ---- the grown network -----------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(**LIVES)
def test_an_extracted_member_is_plain_and_equal(preset: str, seed: int) -> None:
    """Blocks and layers of torch at full strength, grafts only of other blueprints; as many parameters."""
    with doubles():
        life = Life(preset, seed, mirrored=False).grow(rounds=2)
        life.train()
        population, states = life.population, life.states
        ours = outputs_of(population, states, life.inputs)
        heard = (states.blueprint >= 0) & (states.stage != Stage.TRAINING)
        counts = population.parameter_counts(
            states.replace(blueprint=states.blueprint.masked_fill(~heard, -1))
        )
        for i in range(states.num_members):
            module = extract(population, states, i)
            torch.testing.assert_close(module(life.inputs).detach(), ours[i], atol=1e-10, rtol=0)
            full = life.at_full_strength(heard)
            plain = extract(population, full, i)
            names = [b for s, b, _ in life.folds[i]] + full.blueprint[i][heard[i]].tolist()
            grafts = [part for part in plain if isinstance(part, Grafted)]
            assert len(grafts) == sum(name < Blueprint.CLONE for name in names)
            whole = extract(population, life.at_full_strength(states.blueprint >= 0), i)
            assert sum(p.numel() for p in whole.parameters()) == int(counts[i])


# ---- members that are finished ---------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(**LIVES)
def test_a_finished_member_keeps_every_bit_and_changes_nobody(preset: str, seed: int) -> None:
    with doubles():
        life = Life(preset, seed, members=4, mirrored=False).grow(rounds=1)
        population, twin = life.population, copy.deepcopy(life.population)
        population.finished[1] = True
        before = population.snapshot()
        trained = population.train_epoch(life.states, life.data, CLOCK)
        judged = population.validate(life.states, life.data, unfinished=True)
        there = twin.train_epoch(life.states, life.data, CLOCK)
    assert trained.loss[1].isnan()
    assert judged.accuracy[1].isnan()
    others = torch.tensor([0, 2, 3])
    torch.testing.assert_close(trained.loss[others], there.loss[others], atol=1e-9, rtol=0)
    for name, value in population.tensors().items():
        mine, theirs = value.unflatten(0, (4, -1)), twin.tensors()[name].unflatten(0, (4, -1))
        assert torch.equal(mine[1], before[name].unflatten(0, (4, -1))[1]), name
        if name != "finished":
            torch.testing.assert_close(mine[others], theirs[others], atol=1e-6, rtol=0)


def test_when_everyone_is_finished_nothing_is_left_to_do() -> None:
    population, data = make_population("residual vectors", 2), make_data("residual vectors", 2)
    population.finished.fill_(True)
    before = population.snapshot()
    assert population.train_epoch(SlotStates.empty(2, 2), data, CLOCK).loss.isnan().all()
    assert population.validate(SlotStates.empty(2, 2), data, unfinished=True).loss.isnan().all()
    assert all(torch.equal(value, before[name]) for name, value in population.tensors().items())
    population.begin_episode(1)
    assert population.train_epoch(SlotStates.empty(2, 2), data, CLOCK).loss.isfinite().all()


# ---- neighbours, snapshots, what waits -------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(**LIVES)
def test_a_snapshot_holds_folded_parts_and_what_waits(preset: str, seed: int) -> None:
    """Taken while births and folds wait, it goes on to the same bits in another population."""
    life = Life(preset, seed, mirrored=False).grow(rounds=1)
    population = life.population
    life.fold_some()
    fits = population.growable()
    waiting = torch.where(fits.any(2), fits.float().argmax(2), -1)
    free = (population.forms[:, :, 0] == -1) & (waiting >= 0)
    population.germinate(free, waiting)
    population.finished[0] = True
    saved = population.snapshot()
    other = Population(population.network.make_host, population.config, population.members, population.seed)
    other.begin_episode(5)
    other.restore(saved)
    for one in (population, other):
        for epoch in range(2):
            one.train_epoch(life.states, life.data, Clock(0, 20 + epoch, 100))
    for name, value in population.tensors().items():
        assert torch.equal(other.tensors()[name], value), name
    population.restore(saved, torch.tensor([False, True, False]))
    for name, value in population.tensors().items():
        mine, then = value.unflatten(0, (3, -1)), saved[name].unflatten(0, (3, -1))
        now = other.tensors()[name].unflatten(0, (3, -1))
        assert torch.equal(mine[1], then[1]), name
        assert torch.equal(mine[[0, 2]], now[[0, 2]]), name


@pytest.mark.parametrize("world", RESIDUAL)
def test_a_clone_may_be_born_and_folded_in_one_step(world: str) -> None:
    """As a schedule does it: every block repeated at once, exactly."""
    clones = states_from_records([[record(Stage.HOLDING, Blueprint.CLONE)] * 2] * 2)
    slow, fast, nothing = make_population(world, 2), make_population(world, 2), SlotStates.empty(2, 2)
    plant(slow, clones, awake=False)
    inputs = make_data(world, 2).inputs[0, :5]
    before = outputs_of(slow, clones, inputs)
    slow.fold(clones.blueprint >= 0, clones.style)
    fast.germinate(clones.blueprint >= 0, clones.blueprint)
    fast.fold(clones.blueprint >= 0, clones.style)
    torch.testing.assert_close(outputs_of(fast, nothing, inputs), before)
    slow.read_slots(nothing)
    for name, value in slow.tensors().items():
        assert torch.equal(fast.tensors()[name], value), name


def test_two_blocks_are_cloned_only_where_both_are_there() -> None:
    """A seed folded in behind the attention parts it from the perceptron, which can still be widened."""
    population = make_population("text", 2)
    states = states_from_records([[record(Stage.HOLDING, Blueprint.LORA), None], [None, None]])
    plant(population, states)
    population.fold(states.blueprint >= 0, states.style)
    population.read_slots(SlotStates.empty(2, 2))
    fits = population.growable()
    assert fits[:, 1, Blueprint.CLONE].tolist() == [False, True]
    assert fits[:, 1, Blueprint.WIDEN_HALF].all()
    assert not fits[0, 0, [Blueprint.CLONE, Blueprint.WIDEN_HALF]].any()


def test_a_block_is_widened_up_to_its_limit() -> None:
    population = make_population("residual vectors", 1, widest=2)
    widths = []
    for _ in range(3):
        states = states_from_records([[record(Stage.HOLDING, Blueprint.WIDEN_HALF), None]])
        widths.append(population.growable()[0, 0, [Blueprint.WIDEN_HALF, Blueprint.WIDEN_FULL]].tolist())
        if widths[-1][0]:
            plant(population, states)
            population.fold(states.blueprint >= 0, states.style)
            population.read_slots(SlotStates.empty(1, 2))
    assert widths == [[True, True], [True, False], [False, False]]
    block = extract(population, SlotStates.empty(1, 2), 0)[1]
    assert block.branch.units == 2 * WORLDS["residual vectors"][3]["hidden"]


def test_a_slot_without_a_place_for_another_part_says_so() -> None:
    population = make_population("residual vectors", 1, folds=1)
    states = states_from_records([[record(Stage.HOLDING, Blueprint.CLONE), None]])
    for _ in range(2):
        plant(population, states)
        population.fold(states.blueprint >= 0, states.style)
        if int((population.forms[0, 0, 1:] != -1).sum()) == 1:
            population.read_slots(SlotStates.empty(1, 2))
    with pytest.raises(ValueError, match=r"member 0 has a slot full of 2 parts; raise population.folds"):
        population.read_slots(SlotStates.empty(1, 2))


# ---- learning rates of each row --------------------------------------------------------------------------


RATES = {  # with a warm-up over .1 and, for flat, a decay over .4
    "flat": lambda done: max(0.0, min(1.0, 0.04 + done / 0.1, (1 - done) / 0.4)),
    "one_cycle": lambda done: (
        0.04 + 0.48 * (1 - math.cos(math.pi * done / 0.1))
        if done < 0.1
        else max(1e-3, 0.5 + 0.5 * math.cos(math.pi * (done - 0.1) / 0.9))
    ),
}


@pytest.mark.parametrize("world", ["residual images", "text"])
@pytest.mark.parametrize("schedule", RATES)
def test_the_rate_of_each_member_follows_what_it_has_spent(world: str, schedule: str) -> None:
    """Against members one after another, each at its own share of the budget; rates are float32."""
    with doubles():
        states = states_from_records(
            [
                [record(Stage.HOLDING, Blueprint.CLONE), None],
                [None, record(Stage.TRAINING, Blueprint.WIDEN_FULL)],
                [None, None],
            ]
        )
        population = make_population(world, 3, schedule=schedule, warmup=0.1, decay=0.4)
        plant(population, states)
        plain = OneAfterAnother(population, states, rate=RATES[schedule])
        share, spent = torch.tensor([0.3, 0.2, 0.05]), torch.zeros(3)
        for epoch in range(4):
            clock = Clock(0, epoch, 100, spent, share)
            population.train_epoch(states, make_data(world, 3), clock)
            plain.epoch(make_data(world, 3), clock)
            spent = (spent + share).clamp(max=1.0)
        plain.assert_equal(1e-6)


# ---- first weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_an_episode_begins_with_its_own_weights_whether_they_were_kept_or_drawn_again(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    if not keeps:
        monkeypatch.setattr(surgery, "HOST_BYTES", 0)
    population = make_population("residual vectors", 3, initial_weights=10**9)
    population.begin_episode(0)
    first = population.snapshot()
    population.begin_episode(1)
    assert not torch.equal(population.hosts.weights, first["hosts.weights"])
    states = states_from_records([[record(Stage.HOLDING, Blueprint.MLP), None]] * 3)
    population.train_epoch(plant(population, states), make_data("residual vectors", 3), CLOCK)
    population.begin_episode(0)
    assert seeds_of(population).weights.abs().max() == population.hosts.first.abs().max() == 0, (
        "nothing is left"
    )
    for name, value in population.tensors().items():
        assert torch.equal(value, first[name]), name


def test_slots_of_one_kind_share_first_weights_within_the_bytes_of_their_bank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = make_population("residual vectors", 2).network.part_width
    monkeypatch.setattr(surgery, "SEED_BYTES", 3 * 4 * row)
    population = make_population("residual vectors", 2, seed_weights=10**6)
    states = states_from_records([[record(Stage.HOLDING, Blueprint.MLP)] * 2] * 2)
    plant(population, states, awake=False)
    assert len({tuple(row.tolist()) for row in seeds_of(population).weights}) <= 3
