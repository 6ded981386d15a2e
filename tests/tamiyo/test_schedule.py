"""Growth by the clock: what a schedule may say, and what it grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Actions, Blueprint, Head, Op, relevance
from esper.lifecycle.stages import Stage
from esper.simic.bodies import TaskPopulation
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import EpisodeRecord, play
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import BY_BUDGET, PacedSchedule, Schedule, ScheduleLine
from esper.utils.errors import UserError
from tests.simic.worlds import make_environment, make_residual
from tests.slots import SlotRecord, states_from_records

CLONE = Blueprint.CLONE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clone", "'clone' is no line of a schedule; write clone@0.3, or clone@0.3x2 for two in a row"),
        ("clone@0.1+", "'' is no line"),
        ("clone@early", "is no line"),
        ("clone@-0.1", "is no line"),
        ("copy@0.3", "blueprints are conv_light, .*clone, widen_half, widen_full"),
        ("clone@1.0", "its share lies from 0 to below 1"),
        ("clone@0.3x0", "its times are at least 1"),
        ("clone@0.5+clone@0.2", r"shares are \[0.5, 0.2\]; sort them"),
    ],
)
def test_a_text_that_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Schedule.parse(text)


def test_a_schedule_is_read_from_its_text_and_knows_its_slots() -> None:
    lines = [ScheduleLine(0.0, CLONE), ScheduleLine(0.3, Blueprint.MLP, 2)]
    assert Schedule.parse("CLONE@0+mlp@.3x2").events == lines
    scene = EpisodeInfo(torch.arange(2), 3, 0, torch.device("cpu"))
    with pytest.raises(UserError, match=r"names slots \[1, 3\]; this host has slots 0\.\.2"):
        Schedule([ScheduleLine(0.5, CLONE, slots=(1, 3))]).begin(scene)


def blocks_of(environment: GrowthEnvironment) -> list[list[int]]:
    """How many blocks stand ahead of each slot of each member."""
    counts: list[list[int]] = (
        (environment.population.forms >= environment.population.network.codes.block).sum(2).tolist()
    )
    return counts


def test_one_block_becomes_two_and_four() -> None:
    environment = make_residual(members=(0, 1), steps=10, folds=3)
    seen = []
    schedule = Schedule.parse("clone@0.2+clone@0.5x2")
    play(environment, schedule, 0, on_step=lambda result: seen.append(blocks_of(environment)))
    assert seen == [[[n], [n]] for n in (1, 1, 2, 2, 2, 3, 4, 4, 4, 4)]
    assert (environment.slots.stage == Stage.DORMANT).all(), "every fossil is host by now"
    assert (environment.slots.room == 0).all()
    assert (environment.derived.parameters > environment.host_parameters).all()


def test_every_slot_is_planted_and_raised_within_one_step() -> None:
    environment = make_residual(members=(0,), steps=4, folds=1, depth=3)
    record = play(environment, Schedule([ScheduleLine(0.25, CLONE, slots=(0, 2))]), 0)
    assert record.germinated.nonzero()[0].tolist() == [1, 1], "both at the second decision"
    assert (record.stage[1] == [Stage.FOSSILIZED, Stage.DORMANT, Stage.FOSSILIZED]).all()
    assert blocks_of(environment) == [[2, 1, 2]]


def test_fresh_seeds_take_their_ramp_and_stay() -> None:
    environment = make_environment(members=(0, 1), steps=8)
    record = play(environment, Schedule([ScheduleLine(0.0, Blueprint.MLP_SMALL, slots=(0,))]), 0)
    np.testing.assert_allclose(record.alpha[:, 0, 0], [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1], atol=1e-6)
    assert (record.stage[2, :, 0] == Stage.BLENDING).all()
    assert (environment.slots.stage[:, 0] == Stage.FOSSILIZED).all()
    assert (record.choices[0, :, Head.OP] == Op.GERMINATE).all()


@pytest.mark.parametrize("clock", ["steps", "compute"])
def test_a_schedule_follows_the_share_that_is_spent(clock: str) -> None:
    """With compute as the clock a member that has grown comes to its second line in fewer steps."""

    def births(*at: float) -> list[int]:
        environment = make_residual(members=(0,), steps=12, folds=4, clock=clock)
        shares: list[float] = []
        record: EpisodeRecord = play(
            environment,
            Schedule([ScheduleLine(share, CLONE) for share in at]),
            0,
            on_step=lambda result: shares.append(float(result.observation.progress[0])),
        )
        found: list[int] = record.germinated[:, 0, 0].nonzero()[0].tolist()
        for step, share in zip(found, at, strict=True):
            assert shares[step - 1] >= share, "not before its share"
            assert step == 1 or shares[step - 2] < share, "and not after it"
        return found

    alone, second = births(0.6), births(0.1, 0.6)
    assert (second[1] < alone[0]) is (clock == "compute")


@pytest.mark.parametrize(
    ("batches", "grown"),
    [
        (23, []),
        (24, [(2, Blueprint.WIDEN_FULL)]),
        (95, [(2, Blueprint.WIDEN_FULL)]),
        (96, [(1, Blueprint.WIDEN_FULL), (4, CLONE)]),
    ],
)
def test_the_rule_of_thumb_grows_by_what_the_budget_pays_for(
    batches: int, grown: list[tuple[int, Blueprint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 decisions of so many minibatches each; a second episode, of the richest, is as the first."""
    monkeypatch.setattr(TaskPopulation, "batches", batches)
    environment = make_residual(members=(0, 1), steps=16, folds=2, clock="steps")
    schedule = Schedule(BY_BUDGET)
    for episode in range(2 if batches == 96 else 1):
        record = play(environment, schedule, episode)
        steps = record.germinated[:, 0].nonzero()[0]
        planted = [(int(t), Blueprint(int(record.choices[t, 0, Head.BLUEPRINT]))) for t in steps]
        assert planted == grown


def test_a_line_that_is_due_while_nothing_may_be_planted_waits() -> None:
    environment = make_residual(members=(0, 1), steps=8, folds=1, depth=2)
    cooling, empty = SlotRecord(stage=Stage.EMBARGOED, room=1), SlotRecord(room=1)
    environment.reset(0, states_from_records([[empty, cooling], [empty, empty]]))
    schedule = Schedule.parse("clone@0")
    schedule.begin(EpisodeInfo(environment.members, 2, 0, environment.device))
    planted = []
    for step in range(6):
        result = environment.step(schedule.decide(environment.observe(), environment.masks(), step))
        planted.append(result.outcome.germinated.any(dim=1).tolist())
    assert [step for step, each in enumerate(planted) if each[1]] == [0]
    (late,) = (step for step, each in enumerate(planted) if each[0])
    assert late > 0
    assert blocks_of(environment) == [[2, 2], [2, 2]]


class OnlyLegal(PacedSchedule):
    """Asserts that every choice of every head that is read is legal."""

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        actions = super().decide(observation, masks, step)
        choices, op = actions.choices, actions.choices[:, Head.OP]
        for head in Head:
            chosen = masks.head(head).gather(1, choices[:, head].unsqueeze(1)).squeeze(1)
            assert (chosen | ~relevance(op)[:, head].bool()).all(), head
        there = masks.slot_by_op[torch.arange(len(op)), op, choices[:, Head.SLOT]]
        assert (there | (op == Op.WAIT)).all()
        return actions


def test_a_paced_schedule_grows_what_the_schedule_grows_by_one_legal_action_a_step() -> None:
    environment = make_residual(members=(0, 1, 2), steps=24, folds=2, depth=2)
    record = play(environment, OnlyLegal.parse("widen_full@0.1+clone@0.4"), 0)
    assert (record.germinated.sum(axis=2) <= 1).all()
    ops, slot = record.choices[..., Head.OP], record.choices[..., Head.SLOT]
    for s in range(2):
        kept = ((ops == Op.FOSSILIZE) & (slot == s)).any(axis=0)  # [N] else its slot never was free again
        assert (record.germinated[:, :, s].sum(axis=0) == 1 + kept).all()
        assert record.germinated[:6, :, s].any(axis=0).all(), "all slots grow early"
    assert (ops == Op.FOSSILIZE).any()
    assert np.isin(ops, [Op.WAIT, Op.GERMINATE, Op.FOSSILIZE]).all()
    measured = record.contribution[:-1]  # before each action
    for step, member in zip(*(ops == Op.FOSSILIZE).nonzero(), strict=True):
        assert measured[step, member, record.choices[step, member, Head.SLOT]] > 0
