"""The population against the same members one after another, what learns, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from esper.lifecycle.actions import Blueprint, Style, selectable_blueprints
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock
from esper.population.metrics import cross_entropy
from esper.population.plan import graphs
from esper.population.plan.rows import measurement_rows
from esper.population.population import Population
from tests.population.lives import doubles
from tests.population.worlds import (
    CLOCK,
    WORLDS,
    OneAfterAnother,
    every_pair,
    fading,
    make_data,
    make_population,
    outputs_of,
    plant,
    record,
    seeds_of,
)
from tests.slots import SlotRecord, states_from_records

FLOAT64_TOLERANCE = 1e-9


def crowd(world: str, swapped: bool = False, stride: int = 1) -> SlotStates:
    """Every blueprint under every style, two to a member: one is heard, the other trains in isolation.

    Swapped, they change places. Every third heard seed is at half strength, every seventh fades out.
    """
    pairs = every_pair(world)
    rows = []
    for k in range(0, len(pairs) // 2, stride):
        isolated, heard = (0, 1) if swapped else (1, 0)
        name, style = pairs[2 * k + heard]
        loud = fading(name, style) if k % 7 == 6 else record(Stage.HOLDING, name, style)
        if k % 3 == 2:
            loud = record(Stage.BLENDING, name, style, alpha=0.5)
        row = {heard: loud, isolated: record(Stage.TRAINING, *pairs[2 * k + isolated])}
        rows.append([row[0], row[1]])
    return states_from_records(rows)


@pytest.mark.parametrize("world", WORLDS)
@doubles()
def test_four_steps_of_every_blueprint_and_style_equal_plain_adamw(world: str) -> None:
    states = crowd(world)
    population = make_population(world, states.num_members, batches_per_epoch=2, clip_norm=0.5)
    plant(population, states)
    before = population.snapshot()
    plain = OneAfterAnother(population, states)
    data = make_data(world, states.num_members, tasks=2)
    for epoch, swapped in enumerate((False, True)):
        states = crowd(world, swapped)
        clock = Clock(0, epoch, 2)
        plain.change(states)
        metrics = population.train_epoch(states, data, clock)
        losses = plain.epoch(data, clock)
        torch.testing.assert_close(metrics.loss, losses, atol=FLOAT64_TOLERANCE, rtol=0)
    plain.assert_equal(FLOAT64_TOLERANCE)
    assert (population.hosts.weights - before["hosts.weights"]).abs().amax(1).min() > 0.02
    inputs = data.inputs[0, :4]
    ours = outputs_of(population, states, inputs)
    for i, member in enumerate(plain.members):
        torch.testing.assert_close(ours[i], member(inputs).detach(), atol=FLOAT64_TOLERANCE, rtol=0)


# ---- what learns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING])
def test_a_gate_is_trained_from_the_moment_it_exists(world: str, stage: Stage) -> None:
    """Also when a seed that grew under another style is given GATE later."""
    name = max(selectable_blueprints(WORLDS[world][2]))
    born, late = Style.GATED_GATE, Style.LINEAR_ADD
    states = states_from_records([[record(stage, name, style, 0.5), None] for style in (born, late)])
    states = states.replace(alpha=states.alpha * (stage is Stage.BLENDING))
    population = make_population(world, 2)
    plant(population, states)
    slot = population.network.slots[0]
    end = slot.gate_start + slot.gate.layout.total
    gates = seeds_of(population).weights.unflatten(0, (2, 2))[:, 0, slot.gate_start : end]
    untouched = gates.clone()
    data = make_data(world, 2)
    population.train_epoch(states, data, CLOCK)
    moved = (gates - untouched).abs()
    assert moved[0].min() > 0
    assert seeds_of(population).second[2, slot.gate_start : end].max() == 0  # no gate yet
    gated = states.replace(style=torch.full_like(states.style, Style.GATED_GATE))
    before = gates.clone()
    population.train_epoch(gated, data, Clock(0, 1, 10))
    assert (gates - before).abs().min() > 1e-4
    assert population.parameter_counts(gated)[1] == population.parameter_counts(states)[1] + 4 + 1


def test_a_second_birth_in_the_same_slot_is_another_draw() -> None:
    states = states_from_records([[record(Stage.GERMINATED, Blueprint.MLP), None]] * 6)
    population = make_population("vectors", 6, seed_weights=8)
    draws = []
    for _ in range(3):
        plant(population, states, awake=False)
        draws.append(seeds_of(population).weights.unflatten(0, (6, 2))[:, 0].clone())
    assert (draws[0] != draws[1]).any(dim=1).any()
    assert len({tuple(row.tolist()) for row in torch.cat(draws)}) > 3


# ---- bad input -------------------------------------------------------------------------------------------


def restore(names: Sequence[str] = (), members: int = 3) -> None:
    saved = make_population("vectors", 3).snapshot()
    make_population("vectors", members).restore({name: saved[name] for name in names or saved})


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: restore(members=2),
            r"births of the snapshot is torch.int64 \(3,\); expected torch.int64 \(2,\)",
        ),
        (lambda: restore(["births"]), r"the snapshot lacks \['born', "),
    ],
)
def test_what_does_not_fit_is_named(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize("name", [Blueprint.NOOP, Blueprint.CONV_LIGHT])
def test_a_blueprint_that_does_not_fit_its_slot_is_named(name: Blueprint) -> None:
    states = states_from_records([[None, None], [None, record(Stage.TRAINING, name)]])
    population, data = make_population("vectors", 2), make_data("vectors", 2)
    population.germinate(states.blueprint >= 0, states.blueprint)
    with pytest.raises(ValueError, match=rf"{name.name}( is not for|; slots of this) mlp host"):
        population.train_epoch(states, data, CLOCK)


@pytest.mark.parametrize("world", ["signals", "residual images", "text"])
def test_bfloat16_changes_what_is_said_by_rounding_and_leaves_weights_in_float32(world: str) -> None:
    """Outputs to 4 % of their scale, and as much learned in ten steps."""
    said, learned = {}, {}
    for precision in ("float32", "bfloat16"):
        states = crowd(world, stride=3)
        population = make_population(world, states.num_members, precision=precision, batches_per_epoch=5)
        plant(population, states)
        data = make_data(world, population.num_members)
        said[precision] = outputs_of(population, states, data.inputs[0, :8])
        losses = [population.train_epoch(states, data, Clock(0, epoch, 2)).loss for epoch in range(2)]
        learned[precision] = losses[-1].mean()
        assert all(t.dtype is not torch.bfloat16 for t in population.tensors().values())
        assert learned[precision] < losses[0].mean()
    scale = said["float32"].std()
    assert (said["bfloat16"] - said["float32"]).abs().mean() < 0.04 * scale
    torch.testing.assert_close(learned["bfloat16"], learned["float32"], rtol=0.05, atol=0.02)


# ---- episodes and measurement ----------------------------------------------------------------------------


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
    states = states_from_records(rows)
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
    assert measured.contribution[0].abs().min() > 0.005  # several times the tolerance
    # own rows; two ablations; one and a shadow; a shadow; nothing; one.
    asked = measurement_rows(population.read_slots(states))
    assert len(asked.member) == 5 + 2 + 2 + 1 + 0 + 1
    unasked = population.validate(states, make_data("signals", 5, samples=60), ablate=False)
    assert unasked.contribution.isnan().all()
    assert unasked.shadow_gain.isnan().all()
