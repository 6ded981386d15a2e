"""Masks: golden answers, a slow reference, one member against many, and the cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from esper.lifecycle.actions import Blueprint, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.slot_states import SlotConfig, SlotEvidence, SlotStates
from esper.tamiyo.policy.action_masks import ActionMasks, SlotMaskState, compute_batch_masks
from tests.lifecycle import reference as ref
from tests.lifecycle.strategies import random_members, random_rules, to_config, to_states
from tests.operations import count_operations
from tests.scenes import nothing_is_empty, random_states
from tests.tamiyo.masks_by_member import masks_one_by_one, to_mask_states

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "masks.npz")
RNG_SEEDS = st.integers(0, 2**32 - 1)


def golden(slots: int, field: str) -> torch.Tensor:
    values = GOLDEN[f"s{slots}_{field}"]
    return torch.from_numpy(values if values.dtype == bool else values.astype(np.int64))


def assert_equal(masks: ActionMasks, expected: dict[str, torch.Tensor]) -> None:
    for name, value in masks.tensors().items():
        assert value.dtype == torch.bool
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("slots", [1, 3, 9, 25])
def test_golden_masks_match_exactly(slots: int) -> None:
    stage = golden(slots, "stage")
    seeds = torch.isin(stage, torch.tensor([2, 3, 4, 6, 7]))
    states = SlotStates.empty(*stage.shape).replace(
        stage=stage,
        blueprint=torch.where(seeds, 1, -1),
        age=golden(slots, "age"),
        alpha_mode=golden(slots, "alpha_mode"),
        enabled=golden(slots, "enabled"),
    )
    settings_of = torch.stack(
        [golden(slots, f).long() for f in ("max_seeds", "transformer", "disable_advance")], 1
    )
    seen = 0
    for setting in settings_of.unique(dim=0):
        rows = (settings_of == setting).all(dim=1)
        max_seeds, transformer, disable_advance = setting.tolist()
        rules = LifecycleConfig(max_seeds=max_seeds, allow_advance=not disable_advance)
        topology = "transformer" if transformer else "cnn"
        masks, at_rest = (
            compute_batch_masks(given[rows], SlotConfig.grid(1, slots), rules, topology)
            for given in (states, states.replace(alpha_mode=torch.zeros_like(stage)))
        )
        # These answers let a governor prune while alpha moves; there PRUNE is what it is at rest.
        leave = golden(slots, "governor_override")[rows]
        for ours, without in ((masks.op, at_rest.op), (masks.slot_by_op, at_rest.slot_by_op)):
            ours[leave, Op.PRUNE] = without[leave, Op.PRUNE]
        answers = {name: golden(slots, name)[rows] for name in masks.tensors()}
        younger = masks.blueprint.shape[1] - answers["blueprint"].shape[1]  # blueprints that need a block
        answers["blueprint"] = pad(answers["blueprint"], (0, younger))
        assert_equal(masks, answers)
        seen += int(rows.sum())
    assert seen == len(stage)


@settings(deadline=None, max_examples=60)
@given(RNG_SEEDS, st.integers(1, 12), st.integers(1, 9))
def test_masks_equal_the_slow_reference(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    population, rules = random_members(rng, members, slots), random_rules(rng)
    masks = compute_batch_masks(to_states(population), config=to_config(rules), topology=rules.topology)
    expected = [ref.masks(member, rules) for member in population]
    assert_equal(masks, {name: torch.tensor([e[name] for e in expected]) for name in expected[0]})
    assert nothing_is_empty(masks)


@settings(deadline=None, max_examples=25)
@given(RNG_SEEDS, st.integers(1, 32), st.integers(1, 9))
def test_arrays_objects_and_the_shape_of_the_finding_agree(seed: int, members: int, slots: int) -> None:
    states = random_states(np.random.default_rng(seed), members, slots)
    objects, config = to_mask_states(states), SlotConfig.grid(1, slots)
    expected = masks_one_by_one(objects, config)
    assert_equal(compute_batch_masks(states, config), expected)
    assert_equal(compute_batch_masks(objects, config), expected)


@settings(deadline=None, max_examples=25)
@given(RNG_SEEDS, st.integers(1, 12), st.integers(1, 6))
def test_seeds_begin_where_something_fits_with_what_fits_there(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    states = random_states(rng, members, slots)
    fits = torch.from_numpy(rng.random((members, slots, len(Blueprint))) < 0.1)
    plain, fitting = compute_batch_masks(states), compute_batch_masks(states, fits=fits)
    for n in range(members):
        expected = [
            s for s in range(slots) if plain.slot_by_op[n, Op.GERMINATE, s] and bool(fits[n, s].any())
        ]
        assert fitting.slot_by_op[n, Op.GERMINATE].nonzero().flatten().tolist() == expected
        blueprints = {b for s in expected for b in fits[n, s].nonzero().flatten().tolist()}
        if expected:
            assert set(fitting.blueprint[n].nonzero().flatten().tolist()) == blueprints
        else:
            assert torch.equal(fitting.blueprint[n], plain.blueprint[n]), "a head that is not read stays open"
    assert nothing_is_empty(fitting)
    others = [op for op in Op if op is not Op.GERMINATE]
    assert torch.equal(fitting.slot_by_op[:, others], plain.slot_by_op[:, others])


def test_wrong_sizes_and_topologies_are_errors() -> None:
    states = SlotStates.empty(2, 3)
    with pytest.raises(ValueError, match=r"the states have 3 slots and slot_config has 2 \(r0c0, r0c1\)"):
        compute_batch_masks(states, SlotConfig.grid(1, 2))
    with pytest.raises(ValueError, match="topology is 'rnn'; allowed are cnn, transformer, mlp"):
        compute_batch_masks(states, topology="rnn")
    with pytest.raises(ValueError, match=r"members have \[1, 2\] slots"):
        compute_batch_masks([[None], [None, None]])
    with pytest.raises(ValueError, match=r"members have \[\] slots"):
        compute_batch_masks([])
    with pytest.raises(ValueError, match="member 0 has no enabled slot"):
        compute_batch_masks([[SlotMaskState(enabled=False)]])


def test_operations_do_not_depend_on_members_or_slots_and_are_few() -> None:
    def operations(members: int, slots: int) -> int:
        states = random_states(np.random.default_rng(0), members, slots)
        known = {"evidence": SlotEvidence.unmeasured(members, slots), "steps_left": 9}
        config = LifecycleConfig(max_seeds=2)
        compute_batch_masks(states, config=config, **known)  # builds the constant tables
        return count_operations(lambda: compute_batch_masks(states, config=config, **known))

    counts = {operations(n, s) for n, s in ((1, 1), (16, 3), (128, 25), (512, 9))}
    assert len(counts) == 1
    assert counts.pop() <= 62


@pytest.mark.gpu
def test_the_device_agrees_and_is_never_waited_for() -> None:
    states = random_states(np.random.default_rng(0), 64, 9)
    here = compute_batch_masks(states, evidence=SlotEvidence.unmeasured(64, 9), steps_left=9)
    there, known = states.to("cuda"), SlotEvidence.unmeasured(64, 9, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        masks = compute_batch_masks(there, evidence=known, steps_left=9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(here, {name: value.cpu() for name, value in masks.tensors().items()})
