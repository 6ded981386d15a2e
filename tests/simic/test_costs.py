"""Counted operations against the rows of work that the population really runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.lifecycle.actions import STYLE_BLEND, Blend, Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.extract import extract
from esper.population.hosts import HOST_PRESETS
from esper.population.plan.rows import Rows, measurement_rows, training_rows
from esper.population.population import Population
from esper.simic.costs import ForwardCosts, Work, _count, _count_once
from tests.population.lives import Life
from tests.simic.worlds import make_environment, task


def slow_rows(found: ForwardCosts, population: Population, states: SlotStates, rows: Rows) -> np.ndarray:
    """One forward pass of each row from its fork on, added up for its member.

    A row forks behind what was folded in at its slot and ahead of the seed there.
    """
    forms, blends, total = population.forms, population.folded_blends, np.zeros(states.num_members)

    def part(m: int, s: int, place: int) -> float:
        form = int(forms[m, s, place])
        blend = int(blends[m, s, place - 1]) if place else int(STYLE_BLEND[Style(int(states.style[m, s]))])
        gated = form < Blueprint.CLONE and blend == Blend.GATE
        return float(found.parts[s, form]) + gated * float(found.gates[s])

    for m, alphas, fork in zip(rows.member.tolist(), rows.alpha, rows.fork.tolist(), strict=True):
        total[m] += float(found.trunk[fork + 1 :].sum())
        for s in range(max(fork, 0), states.num_slots):
            folded = [p for p in range(1, population.positions) if forms[m, s, p] >= 0 and s > fork]
            total[m] += sum(part(m, s, place) for place in folded + [0] * bool(alphas[s] > 0))
    return total


def grown(preset: str, seed: int) -> tuple[Life, ForwardCosts]:
    """A random population after two rounds of seeds that were folded in, with new seeds of every kind."""
    life = Life(preset, seed, members=4, mirrored=False).grow(rounds=2)
    bodies = life.population.network
    return life, ForwardCosts.of(bodies, life.inputs[:1], torch.device("cpu"))


LIVES = {"preset": st.sampled_from(sorted(HOST_PRESETS)), "seed": st.integers(0, 2**20)}


@settings(max_examples=4, deadline=None)
@given(**LIVES, ablate=st.booleans())
def test_work_costs_what_its_rows_cost(preset: str, seed: int, ablate: bool) -> None:
    """An epoch, what each network itself does, and births and folds that wait."""
    life, found = grown(preset, seed)
    assert_rows_are_counted(life, found, ablate)
    assert_own_rows_cost_what_the_extracted_network_costs(life, found)
    assert_what_waits_is_charged_as_if_it_were_done(life, found)


def assert_rows_are_counted(life: Life, found: ForwardCosts, ablate: bool) -> None:
    """Forks, seeds, gates and folded parts of every row, added up one by one."""
    population, states = life.population, life.states
    view = population.read_slots(states)
    expected = 3 * 32 * slow_rows(found, population, states, training_rows(view))
    expected += 48 * slow_rows(found, population, states, measurement_rows(view, ablate))
    work = Work(training=32, validation=48, ablate=ablate)
    counted = found.epoch(states, population, work)
    np.testing.assert_allclose(counted.numpy(), expected, rtol=1e-12)
    assert counted.dtype == torch.float64


def assert_own_rows_cost_what_the_extracted_network_costs(life: Life, found: ForwardCosts) -> None:
    """Counted by torch on a plain module, for mixtures of every blueprint, folded in or alive."""
    work = Work(training=0, validation=1, ablate=False)
    counted = found.epoch(life.states, life.population, work)
    for i in range(life.population.num_members):
        module = extract(life.population, life.states, i)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(life.inputs[:1])
        assert float(counted[i]) == counter.get_total_flops()


def assert_what_waits_is_charged_as_if_it_were_done(life: Life, found: ForwardCosts) -> None:
    """Births and folds that the next look carries out cost the same before and after it."""
    work, population = Work(training=8, validation=4), life.population
    life.fold_some()
    before = found.epoch(life.states, population, work)
    population.read_slots(life.states)
    torch.testing.assert_close(found.epoch(life.states, population, work), before, rtol=1e-12, atol=0)
    fits = population.growable()
    name = torch.where(
        fits.any(2), fits.shape[2] - 1 - fits.flip(2).int().argmax(2), -1
    )  # the last that fits
    states = life.states.replace(
        stage=torch.where(name >= 0, int(Stage.HOLDING), life.states.stage),
        blueprint=name,
        alpha=torch.where(name >= 0, 1.0, 0.0),
    )
    population.germinate(name >= 0, name)
    before = found.epoch(states, population, work)
    population.read_slots(states)
    torch.testing.assert_close(found.epoch(states, population, work), before, rtol=1e-12, atol=0)


def test_counting_leaves_the_bodies_as_they_were() -> None:
    environment = make_environment(members=(0,), steps=1, name="digits")
    bodies = environment.population.network
    before = [p.clone() for p in bodies.host.parameters()]
    ForwardCosts.of(bodies, task("digits").train.inputs[:1], torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, bodies.host.parameters(), strict=True))
    assert bodies.host.training


class Repeated(nn.Linear):
    """A layer that tells nobody how often it runs."""

    def __init__(self, times: int) -> None:
        super().__init__(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


def test_equal_modules_are_counted_once_and_those_of_others_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[nn.Module] = []

    def count(module: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        counted.append(module)
        return _count(module, x)

    monkeypatch.setattr("esper.simic.costs._counted", {})
    monkeypatch.setattr("esper.simic.costs._count", count)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5), Repeated(1), Repeated(3)]
    assert [_count_once(layer, torch.zeros(1, 4)) for layer in layers] == [32, 32, 40, 32, 96]
    assert counted == [layers[0], *layers[2:]]
    assert _count_once(layers[0], torch.zeros(1, 3, 4)) == 96, "another shape"
