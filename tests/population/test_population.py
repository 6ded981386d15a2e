"""The population against the same members one after another, what learns, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blueprint, Style, selectable_blueprints
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock, MemberData
from tests.population.worlds import (
    CLOCK,
    WORLDS,
    OneAfterAnother,
    every_pair,
    fading,
    flat_part,
    make_data,
    make_population,
    outputs_of,
    part_row,
    plant,
    record,
    reference_member,
    used_columns,
)

# A few steps of float32 in another order of summation; in float64 the same arithmetic agrees to 1e-9.
FLOAT32_TOLERANCE = 1e-4
FLOAT64_TOLERANCE = 1e-9
# One forward pass in float32.
OUTPUT_TOLERANCE = 1e-5


@pytest.fixture
def double() -> Iterator[None]:
    """Everything that is made in the test is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
    return SlotStates.from_records(rows)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("world", WORLDS)
def test_six_steps_of_every_blueprint_and_style_equal_plain_adamw(world: str) -> None:
    states = crowd(world)
    population = make_population(world, states.num_members, batches_per_epoch=3, clip_norm=0.5)
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


# Norms divide embeddings that begin with standard deviation 0.02 by it, and rounding grows as much.
GRADIENT_RTOL = 1e-3


@pytest.mark.parametrize(
    ("world", "way"),
    [
        ("signals", "grouped"),
        ("images", "product"),
        ("vectors", "auto"),
        ("residual signals", "product"),
        ("residual images", "grouped"),
        ("residual vectors", "auto"),
        ("text", "auto"),
    ],
)
def test_outputs_gradients_and_five_steps_equal_plain_sgd_in_float32(world: str, way: str) -> None:
    states = crowd(world, stride=3)
    settings = {"optimizer": "sgd", "convolution": way, "batches_per_epoch": 1, "clip_norm": 1e9}
    population = make_population(world, states.num_members, **settings)
    plant(population, states)
    plain = OneAfterAnother(population, states)
    data = make_data(world, states.num_members)
    inputs = data.inputs[0, :4]
    ours = outputs_of(population, states, inputs)
    for i, member in enumerate(plain.members):
        torch.testing.assert_close(ours[i], member(inputs).detach(), atol=OUTPUT_TOLERANCE, rtol=1e-4)

    population.train_epoch(states, data, CLOCK)
    plain.epoch(data, CLOCK)
    gradients = population.parts.first  # after one unclipped step, momentum is the gradient
    for i, member in enumerate(plain.members):
        host = gradient_of(member.trunk)
        torch.testing.assert_close(population.hosts.first[i], host, atol=OUTPUT_TOLERANCE, rtol=GRADIENT_RTOL)
        for s in (0, 1):
            links = [(k + 1, part) for k, part in enumerate(member.chains[s])]
            if states.alpha_mode[i, s] == 0:
                links.append((0, member.seed_at(s)))
            for place, part in links:
                found = used_columns(population, part, s, part_row(population, i, s, place, gradients))
                wanted = flat_part(population, part, s, gradient_of)
                torch.testing.assert_close(found, wanted, atol=OUTPUT_TOLERANCE, rtol=GRADIENT_RTOL)

    for epoch in range(1, 5):
        population.train_epoch(states, data, Clock(0, epoch, 10))
        plain.epoch(data, Clock(0, epoch, 10))
    plain.assert_equal(FLOAT32_TOLERANCE)


def gradient_of(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


# ---- what learns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_every_parameter_of_host_and_seeds_learns_in_the_rows(world: str) -> None:
    """Newborn seeds at alpha 1 in both slots: each element has met a gradient within two steps."""
    pairs = every_pair(world)
    rows = [
        [record(Stage.HOLDING, *pair), record(Stage.HOLDING, *pairs[-k - 1])] for k, pair in enumerate(pairs)
    ]
    states = SlotStates.from_records(rows)
    population = make_population(world, len(rows), batch_size=16)
    plant(population, states, awake=False)
    population.train_epoch(states, make_data(world, len(rows)), CLOCK)
    for i, member_rows in enumerate(rows):
        member = reference_member(population, states, i)
        for s in range(len(member_rows)):
            links = [(0, member.seed_at(s)), *enumerate(member.chains[s], start=1)]
            for place, part in links:
                row = part_row(population, i, s, place, population.parts.second)
                square = used_columns(population, part, s, row)
                sizes = [p.numel() for p in part.parameters()]
                assert all(tensor.max() > 0 for tensor in square.split(sizes)), (i, s, place)
        sizes = [p.numel() for p in member.trunk.parameters()]
        assert all(tensor.max() > 0 for tensor in population.hosts.second[i].split(sizes)), i


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING])
def test_a_gate_is_trained_from_the_moment_it_exists(world: str, stage: Stage) -> None:
    """Also when a seed that grew under another style is given GATE later."""
    name = max(selectable_blueprints(WORLDS[world][2]))
    born, late = Style.GATED_GATE, Style.LINEAR_ADD
    states = SlotStates.from_records([[record(stage, name, style, 0.5), None] for style in (born, late)])
    states = states.replace(alpha=states.alpha * (stage is Stage.BLENDING))
    population = make_population(world, 2)
    plant(population, states)
    slot = population.network.slots[0]
    end = slot.gate_start + slot.gate.layout.total
    gates = population.seeds.weights.unflatten(0, (2, 2))[:, 0, slot.gate_start : end]
    untouched = gates.clone()
    data = make_data(world, 2)
    population.train_epoch(states, data, CLOCK)
    moved = (gates - untouched).abs()
    assert moved[0].min() > 0
    assert population.seeds.second[2, slot.gate_start : end].max() == 0  # no gate yet
    gated = states.replace(style=torch.full_like(states.style, Style.GATED_GATE))
    before = gates.clone()
    population.train_epoch(gated, data, Clock(0, 1, 10))
    assert (gates - before).abs().min() > 1e-4
    assert population.parameter_counts(gated)[1] == population.parameter_counts(states)[1] + 4 + 1


def test_a_reused_row_starts_clean() -> None:
    """A successor moves as the first seed of a slot would, whatever was there before it."""
    here = SlotStates.from_records([[record(Stage.HOLDING, Blueprint.MLP, Style.GATED_GATE), None]])
    there = SlotStates.from_records([[record(Stage.TRAINING, Blueprint.LORA), None]])
    data = make_data("vectors", 1)
    used, fresh = make_population("vectors", 1), make_population("vectors", 1)
    plant(used, here)
    used.train_epoch(here, data, CLOCK)
    assert used.seeds.first[0].abs().max() > 0
    used.prune(here.blueprint >= 0)
    used.hosts.put(torch.arange(1), fresh.hosts)
    used.births.copy_(fresh.births)
    for population in (used, fresh):
        plant(population, there, awake=False)
        population.train_epoch(there, data, Clock(0, 1, 10))
    for name, value in fresh.tensors().items():
        assert torch.equal(used.tensors()[name], value), name


def test_a_second_birth_in_the_same_slot_is_another_draw() -> None:
    states = SlotStates.from_records([[record(Stage.GERMINATED, Blueprint.MLP), None]] * 6)
    population = make_population("vectors", 6, seed_weights=8)
    draws = []
    for _ in range(3):
        plant(population, states, awake=False)
        draws.append(population.seeds.weights.unflatten(0, (6, 2))[:, 0].clone())
    assert (draws[0] != draws[1]).any(dim=1).any()
    assert len({tuple(row.tolist()) for row in torch.cat(draws)}) > 3


def test_a_fading_seed_keeps_every_bit_and_its_host_goes_on() -> None:
    states = SlotStates.from_records([[fading(Blueprint.CONV_SMALL), record(Stage.HOLDING, Blueprint.NORM)]])
    population = make_population("images", 1)
    plant(population, states)
    before = population.snapshot()
    population.train_epoch(states, make_data("images", 1), CLOCK)
    for name in ("weights", "first", "second", "steps"):
        assert torch.equal(getattr(population.seeds, name)[0], before[f"parts.0.{name}"][0])
    assert not torch.equal(population.seeds.weights[1], before["parts.0.weights"][1])
    assert not torch.equal(population.hosts.weights, before["hosts.weights"])


# ---- bad input -------------------------------------------------------------------------------------------


def test_bad_populations_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"shape \(0,\); give whole numbers, at least one: torch.arange"):
        make_population("vectors", 0)
    with pytest.raises(ValueError, match=r"convolution is fused, which needs a GPU, but the device is cpu"):
        make_population("images", 2, convolution="fused")


def test_states_and_data_of_other_members_are_refused() -> None:
    population = make_population("vectors", 3)
    with pytest.raises(ValueError, match=r"slot states are \(2, 2\); this population has \(3, 2\)"):
        population.train_epoch(SlotStates.empty(2, 2), make_data("vectors", 3), CLOCK)
    with pytest.raises(ValueError, match=r"slot states are \(3, 4\)"):
        population.validate(SlotStates.empty(3, 4), make_data("vectors", 3))
    with pytest.raises(ValueError, match="the data are for 2 members; this population has 3"):
        population.validate(SlotStates.empty(3, 2), make_data("vectors", 2))
    with pytest.raises(ValueError, match="training split has 24 samples, fewer than one minibatch of 64"):
        make_population("vectors", 1, batch_size=64).train_epoch(
            SlotStates.empty(1, 2), make_data("vectors", 1), CLOCK
        )


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.HOLDING])
@pytest.mark.parametrize("name", [Blueprint.NOOP, Blueprint.CONV_LIGHT])
def test_a_blueprint_without_a_body_at_its_slot_is_named(stage: Stage, name: Blueprint) -> None:
    states = SlotStates.from_records([[None, None], [None, record(stage, name)]])
    population, data = make_population("vectors", 2), make_data("vectors", 2)
    allowed = "in slot 1; the blueprints of this mlp host there are NORM, LORA"
    with pytest.raises(ValueError, match=f"member 1 has no seed that fits {allowed}"):
        population.train_epoch(states, data, CLOCK)
    population.germinate(states.blueprint >= 0, states.blueprint)
    with pytest.raises(ValueError, match=f"member 1 has {name.name} {allowed}"):
        population.train_epoch(states, data, CLOCK)


@pytest.mark.parametrize(
    ("inputs", "targets", "tasks", "message"),
    [
        ((1, 8, 5), (1, 7), [0], r"inputs are \(1, 8, 5\) and targets \(1, 7\); both must begin"),
        ((2, 8, 5), (2, 8), [0, 2], r"a member asks for task 2, but there are tasks 0..1"),
        ((2, 8, 5), (2, 8), [0, -1], r"a member asks for task -1"),
        ((1, 0, 5), (1, 0), [0], r"no samples; bring at least one per task"),
    ],
)
def test_data_that_do_not_fit_are_named(
    inputs: tuple[int, ...], targets: tuple[int, ...], tasks: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MemberData.of(torch.zeros(inputs), torch.zeros(targets, dtype=torch.long), torch.tensor(tasks))


@pytest.mark.parametrize("world", ["signals", "residual images", "residual vectors", "text"])
def test_bfloat16_changes_what_is_said_by_rounding_and_leaves_weights_in_float32(world: str) -> None:
    """Outputs to 4 % of their scale, and as much learned in fifteen steps."""
    said, learned = {}, {}
    for precision in ("float32", "bfloat16"):
        states = crowd(world, stride=3)
        population = make_population(world, states.num_members, precision=precision, batches_per_epoch=5)
        plant(population, states)
        data = make_data(world, population.num_members)
        said[precision] = outputs_of(population, states, data.inputs[0, :8])
        losses = [population.train_epoch(states, data, Clock(0, epoch, 3)).loss for epoch in range(3)]
        learned[precision] = losses[-1].mean()
        assert all(t.dtype is not torch.bfloat16 for t in population.tensors().values())
        assert learned[precision] < losses[0].mean()
    scale = said["float32"].std()
    assert (said["bfloat16"] - said["float32"]).abs().mean() < 0.04 * scale
    torch.testing.assert_close(learned["bfloat16"], learned["float32"], rtol=0.05, atol=0.02)
