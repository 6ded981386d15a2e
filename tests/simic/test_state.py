"""What is known of members between two steps, and the reward, which is a potential and nothing else."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.metrics import SeedGradients, TrainMetrics, ValidationMetrics
from esper.simic.config import RewardConfig
from esper.simic.state import ValidationHistory, potential, update_evidence

NAN = math.nan
numbers = st.one_of(st.floats(0, 1, width=32), st.just(NAN), st.just(math.inf))


def padded(history: list[float]) -> list[float]:
    return ([NAN] * 5 + history)[-5:]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=3), min_size=1, max_size=10))
def test_what_one_member_measures_leaves_the_others_histories_alone(
    course: list[list[tuple[float, float]]],
) -> None:
    recent = ValidationHistory.empty(3, torch.device("cpu"))
    for epoch in course:
        recent = recent.append(*torch.tensor(epoch).unbind(1))
    for member in range(3):
        losses, accuracies = zip(*(epoch[member] for epoch in course), strict=True)
        for history, values in ((recent.loss_history, losses), (recent.accuracy_history, accuracies)):
            torch.testing.assert_close(history[member], torch.tensor(padded(list(values))), equal_nan=True)
    torch.testing.assert_close(recent.loss, recent.loss_history[:, -1], equal_nan=True)


# ---- evidence --------------------------------------------------------------------------------------------


def slots_in(stage: Stage) -> SlotStates:
    return SlotStates.empty(1, 1).replace(stage=torch.tensor([[int(stage)]]))


def measured(
    contribution: float = NAN, shadow: float = NAN, health: float = NAN
) -> tuple[TrainMetrics, ValidationMetrics]:
    def one(value: float) -> torch.Tensor:
        return torch.tensor([[value]])

    row = torch.zeros(1)
    seeds = SeedGradients(one(health), one(health), one(1 - health), one(0 * health))
    return (
        TrainMetrics(loss=row, seeds=seeds),
        ValidationMetrics(row, row, one(contribution), one(shadow)),
    )


def course(contributions: list[float]) -> SlotEvidence:
    evidence = SlotEvidence.unmeasured(1, 1)
    for value in contributions:
        evidence = update_evidence(evidence, slots_in(Stage.BLENDING), *measured(contribution=value))
    return evidence


def slow_velocity(contributions: list[float]) -> tuple[float, float, float]:
    """Contribution, velocity and age, one measurement at a time."""
    known, velocity, age = NAN, NAN, NAN
    for value in contributions:
        if math.isnan(value):
            age += 1
            continue
        if not math.isnan(known):
            change = (value - known) / (age + 1)
            velocity = change if math.isnan(velocity) else 0.7 * velocity + 0.3 * change
        known, age = value, 0.0
    return known, velocity, age


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(NAN)), max_size=10))
def test_contribution_velocity_and_age_equal_the_slow_ones(contributions: list[float]) -> None:
    evidence = course(contributions)
    expected = torch.tensor(slow_velocity(contributions))
    found = torch.stack(
        [evidence.contribution, evidence.contribution_velocity, evidence.contribution_age]
    ).flatten()
    torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_previous_health_is_the_one_before() -> None:
    evidence = SlotEvidence.unmeasured(1, 1)
    seen = []
    for health in (0.5, NAN, 0.75, 1.0):
        evidence = update_evidence(evidence, slots_in(Stage.TRAINING), *measured(health=health))
        seen.append((float(evidence.gradient_health), float(evidence.previous_health)))
    assert seen[0][0] == 0.5
    assert math.isnan(seen[0][1])
    assert seen[2:] == [(0.75, 0.5), (1.0, 0.75)]


def test_a_shadow_gain_ends_with_isolation() -> None:
    alone = update_evidence(SlotEvidence.unmeasured(1, 1), slots_in(Stage.TRAINING), *measured(shadow=3.0))
    assert float(alone.shadow_gain) == 3.0
    kept = update_evidence(alone, slots_in(Stage.TRAINING), *measured())
    assert float(kept.shadow_gain) == 3.0
    assert update_evidence(kept, slots_in(Stage.BLENDING), *measured()).shadow_gain.isnan().all()


def test_every_field_of_the_evidence_is_written() -> None:
    evidence = SlotEvidence.unmeasured(1, 1)
    for value in (1.0, 0.5):
        evidence = update_evidence(evidence, slots_in(Stage.TRAINING), *measured(value, value, value))
    written = [f.name for f in fields(SlotEvidence) if getattr(evidence, f.name).isfinite().all()]
    assert written == [f.name for f in fields(SlotEvidence) if f.name != "interaction"]


def test_potential_is_accuracy_less_rent() -> None:
    config = RewardConfig(rent_weight=0.1)
    phi = potential(torch.tensor([0.5, 0.9]), torch.tensor([1.0, math.e**2]), config)
    torch.testing.assert_close(phi, torch.tensor([0.5, 0.7]))
