"""Features: a slow reference, ranges, sentinels, permutations, and the cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.lifecycle.slot_states import SlotConfig, SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo.policy.features import (
    BASE_COLUMNS,
    BASE_FEATURE_SIZE,
    COLUMNS,
    SLOT_COLUMNS,
    SLOT_FEATURE_SIZE,
    Observation,
    batch_obs_to_features,
    schema_hash,
)
from tests.operations import count_operations
from tests.scenes import plain_observation as observe
from tests.scenes import random_observation, random_states
from tests.slots import SlotRecord, states_from_records
from tests.tamiyo.features_by_element import column_slice, features_one_by_one, to_reports

RNG_SEEDS = st.integers(0, 2**32 - 1)
NAN, INF = float("nan"), float("inf")
MEASURED = {  # evidence field -> its column
    "contribution": "contribution",
    "contribution_velocity": "contribution_velocity",
    "contribution_age": "contribution_freshness",
    "interaction": "interaction",
    "shadow_gain": "shadow_gain",
    "gradient_norm": "gradient_norm",
    "gradient_health": "gradient_health",
    "previous_health": "previous_health",
    "vanishing": "vanishing",
    "exploding": "exploding",
}


def blocks(features: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    base, rest = features[:, :BASE_FEATURE_SIZE], features[:, BASE_FEATURE_SIZE:]
    return base, rest.view(len(features), slots, SLOT_FEATURE_SIZE)


def column(observation: Observation, name: str) -> Tensor:
    """The values of one column, [N, width] or [N, S, width]."""
    base, slots = blocks(batch_obs_to_features(observation)[0], observation.num_slots)
    block = base if name in {c.name for c in BASE_COLUMNS} else slots
    return block[..., column_slice(name)]


@settings(deadline=None, max_examples=40)
@given(RNG_SEEDS, st.integers(1, 12), st.integers(1, 9))
def test_features_equal_the_nested_loops_of_the_finding(seed: int, members: int, slots: int) -> None:
    observation = random_observation(np.random.default_rng(seed), members, slots)
    config = SlotConfig.grid(1, slots)
    features, blueprints = batch_obs_to_features(observation)
    expected = features_one_by_one(to_reports(observation, config), config)
    torch.testing.assert_close(features, expected, atol=2e-6, rtol=0)
    assert features.shape == (members, BASE_FEATURE_SIZE + SLOT_FEATURE_SIZE * config.num_slots)
    assert features.dtype == torch.float32
    assert torch.equal(blueprints, observation.slots.blueprint)
    assert blueprints.dtype == torch.int64


@settings(deadline=None, max_examples=20)
@given(RNG_SEEDS, st.integers(1, 512), st.integers(1, 25))
def test_the_batch_equals_each_member_alone(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    observation = random_observation(rng, members, slots)
    batch, _ = batch_obs_to_features(observation)
    for member in rng.choice(members, min(members, 8), replace=False).tolist():
        alone, _ = batch_obs_to_features(observation[member])
        assert torch.equal(alone[0], batch[member])


SEEDED = states_from_records([[SlotRecord(Stage.HOLDING, 3, alpha=1.0, alpha_target=1.0, age=9)]])


@pytest.mark.parametrize("field", MEASURED)
def test_unmeasured_measured_zero_and_fresh_read_differently(field: str) -> None:
    def read(value: float) -> float:
        evidence = SlotEvidence.unmeasured(1, 1).replace(**{field: torch.tensor([[value]])})
        return column(observe(SEEDED, evidence), MEASURED[field]).item()

    schema = next(c for c in COLUMNS if c.name == MEASURED[field])
    assert read(NAN) == schema.unknown
    assert read(0.0) == (1.0 if field == "contribution_age" else 0.0)
    assert schema.unknown is not None
    for value in (-1e30, -INF, -5.0, 1e-9, 0.3, 7.0, 1e30, INF):
        assert read(value) != schema.unknown or (field == "gradient_norm" and value < 0), value


def test_a_broken_member_changes_no_other_row() -> None:
    observation = random_observation(np.random.default_rng(5), 8, 3)
    before, _ = batch_obs_to_features(observation)
    sick_row = torch.tensor([3])
    for poison in (NAN, INF, -INF, 1e38):
        sick = dataclasses.replace(
            observation,
            **{
                name: getattr(observation, name).index_fill(0, sick_row, poison)
                for name in ("progress", "val_loss", "val_accuracy", "loss_history", "accuracy_history",
                             "parameter_ratio")
            },
            evidence=SlotEvidence(
                **{n: t.index_fill(0, sick_row, poison) for n, t in observation.evidence.tensors().items()}
            ),
        )  # fmt: skip
        after, _ = batch_obs_to_features(sick)
        others = [i for i in range(8) if i != 3]
        assert torch.equal(after[others], before[others])
        assert bool(after.isfinite().all())


ANY_FLOAT = st.sampled_from([NAN, INF, -INF, 1e30, -1e30, 3.4e38, -1.0, -0.0, 0.0, 1e-30, 0.5, 2.0, 150.0])


@settings(deadline=None, max_examples=25)
@given(RNG_SEEDS, st.data())
def test_every_column_stays_in_its_range_for_any_input(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    n, s = 3, 2

    def anything(*shape: int) -> Tensor:
        size = int(np.prod(shape))
        values = data.draw(st.lists(ANY_FLOAT, min_size=size, max_size=size))
        return torch.tensor(values).view(shape)

    states = random_states(rng, n, s)
    wild = states.replace(
        alpha=anything(n, s),
        alpha_target=anything(n, s),
        alpha_steps_total=torch.from_numpy(rng.choice([0, 1, 8, 10**9, -3], (n, s))),
        alpha_steps_done=torch.from_numpy(rng.choice([0, 1, 8, 10**9, -3], (n, s))),
        age=torch.from_numpy(rng.choice([0, 5, 10**12, -7], (n, s))),
        epochs_in_stage=torch.from_numpy(rng.choice([0, 5, 10**12, -7], (n, s))),
    )
    evidence = SlotEvidence(**{name: anything(n, s) for name in SlotEvidence.unmeasured(1, 1).tensors()})
    observation = observe(
        wild, evidence,
        progress=anything(n), step_cost=anything(n), steps_left=anything(n),
        val_loss=anything(n), val_accuracy=anything(n), loss_history=anything(n, 5),
        accuracy_history=anything(n, 5), parameter_ratio=anything(n),
        last_op=torch.from_numpy(rng.choice([-1, 0, 5, 6, 99, -40], n)),
    )  # fmt: skip
    for schema in COLUMNS:
        values, (low, high) = column(observation, schema.name), schema.range
        assert bool(((values >= low) & (values <= high)).all()), (schema.name, values)
        if schema.unknown is not None:
            assert bool(((values >= schema.low) | (values == schema.unknown)).all()), (schema.name, values)


@settings(deadline=None, max_examples=25)
@given(RNG_SEEDS, st.integers(1, 6), st.integers(2, 9))
def test_permuting_slots_permutes_blocks_and_nothing_else(seed: int, members: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    observation = random_observation(rng, members, slots)
    order = torch.from_numpy(rng.permutation(slots))
    shuffled = dataclasses.replace(
        observation,
        slots=SlotStates(**{n: t[:, order] for n, t in observation.slots.tensors().items()}),
        evidence=SlotEvidence(**{n: t[:, order] for n, t in observation.evidence.tensors().items()}),
    )
    base, block = blocks(batch_obs_to_features(observation)[0], slots)
    other_base, other_block = blocks(batch_obs_to_features(shuffled)[0], slots)
    assert torch.equal(base, other_base)
    assert torch.equal(block[:, order], other_block)


def test_the_schema_is_the_layout() -> None:
    for block, size in ((BASE_COLUMNS, BASE_FEATURE_SIZE), (SLOT_COLUMNS, SLOT_FEATURE_SIZE)):
        covered = [i for c in block for i in range(*column_slice(c.name).indices(size))]
        assert covered == list(range(size))
    assert len({c.name for c in COLUMNS}) == len(COLUMNS)
    assert all(c.formula for c in COLUMNS)
    assert all(c.unknown is None or c.unknown < c.low for c in COLUMNS), "no sentinel is a measurement"


def test_the_hash_is_stable_and_sees_every_part_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.tamiyo.policy import features

    original = schema_hash()
    assert original == schema_hash()
    assert len(original) == 64
    first = COLUMNS[0]
    changes = (
        {"name": "x"}, {"formula": "x"}, {"low": -0.5}, {"high": 2.0}, {"unknown": -3.0}, {"width": 2},
        {"divisor": 2.0},
    )  # fmt: skip
    for change in changes:
        altered = (dataclasses.replace(first, **change), *COLUMNS[1:])
        monkeypatch.setattr(features, "COLUMNS", altered)
        assert schema_hash() != original, change


def test_operations_do_not_depend_on_members_or_slots_and_are_few() -> None:
    def operations(members: int, slots: int) -> int:
        observation = random_observation(np.random.default_rng(0), members, slots)
        batch_obs_to_features(observation)  # builds the constant tables
        return count_operations(lambda: batch_obs_to_features(observation))

    counts = {operations(n, s) for n, s in ((1, 1), (16, 3), (128, 25), (512, 9))}
    assert len(counts) == 1
    assert counts.pop() <= 120


@pytest.mark.gpu
def test_the_device_agrees_and_is_never_waited_for() -> None:
    here = random_observation(np.random.default_rng(0), 64, 9)
    there = here.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        features, _ = batch_obs_to_features(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(features.cpu(), batch_obs_to_features(here)[0], atol=1e-6, rtol=0)
