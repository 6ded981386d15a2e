"""One decision step: its order, its clocks, and what no neighbour may change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.stages import COOLDOWN_STAGES, Stage
from esper.population.forms import NO_FORM
from esper.simic.agent.ppo import PPOAgent
from esper.simic.config import GovernorConfig, lifecycle_for
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import Learner
from esper.simic.rollout import play
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tamiyo.scripted import RandomLegal
from tests.simic.worlds import GAMMA, make_agent, make_environment
from tests.slots import actions_of

PLANT = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: Blueprint.MLP_SMALL, Head.ALPHA_TARGET: 2, Head.TEMPO: 0}
ADVANCE = {Head.OP: Op.ADVANCE}
# Sums over other numbers of rows may be taken in another order; everything is a few epochs of float32.
TOLERANCE = 1e-4


def everyone(environment: GrowthEnvironment, action: dict[Head, int]) -> Actions:
    return actions_of([action] * environment.num_members)


def poison(environment: GrowthEnvironment, row: int) -> None:
    """Break one member's host."""
    environment.population.hosts.weights[row] = math.nan


def test_reset_measures_before_any_training() -> None:
    environment = make_environment()
    observation = environment.reset(3)
    measured = environment.population.run_validation(environment.slots)
    assert torch.equal(observation.val_accuracy, measured.accuracy)
    assert torch.equal(observation.val_loss, measured.loss)
    assert (environment.population.hosts.steps == 0).all()
    assert (observation.progress == 0).all()
    assert (observation.last_op == -1).all()
    assert observation.loss_history[:, :-1].isnan().all()
    assert torch.equal(observation.loss_history[:, -1], observation.val_loss)
    assert (observation.parameter_ratio == 1).all()


def test_an_action_meets_the_evidence_of_the_validation_before_it() -> None:
    environment = make_environment(steps=8)
    environment.reset(0)
    environment.step(everyone(environment, PLANT))
    result = environment.step(everyone(environment, ADVANCE))
    # one epoch in isolation: gradients are measured, a contribution is not
    assert result.observation.evidence.gradient_health.isfinite()[:, 0].all()
    assert result.observation.evidence.shadow_gain.isfinite()[:, 0].all()
    assert result.observation.evidence.contribution.isnan().all()
    result = environment.step(everyone(environment, ADVANCE))
    assert result.outcome.succeeded.all()
    assert result.observation.evidence.contribution.isfinite()[:, 0].all()
    assert (result.observation.evidence.contribution_age[:, 0] == 0).all()
    assert result.observation.evidence.shadow_gain.isnan().all()


def test_what_is_pruned_is_forgotten_and_has_no_body() -> None:
    environment = make_environment(steps=8)
    environment.reset(0)
    for action in (PLANT, ADVANCE, {Head.OP: Op.PRUNE}):
        result = environment.step(everyone(environment, action))
    assert result.outcome.pruned[:, 0].all()
    assert all(value[:, 0].isnan().all() for value in result.observation.evidence.tensors().values())
    assert (environment.population.forms[:, :, 0] == NO_FORM).all()
    assert (result.observation.parameter_ratio == 1).all()
    assert Stage(int(environment.slots.stage[0, 0])) in COOLDOWN_STAGES


def test_the_last_step_is_terminal_and_no_other() -> None:
    environment = make_environment(steps=3)
    environment.reset(0)
    ends = [environment.step(Actions.wait(4)).terminated.tolist() for _ in range(3)]
    assert ends == [[False] * 4, [False] * 4, [True] * 4]
    assert (environment.observe().progress == 1).all()
    with pytest.raises(RuntimeError, match="ended after 3 steps"):
        environment.step(Actions.wait(4))


# ---- what no neighbour may change ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["spirals", "digits"])
def test_a_member_does_not_depend_on_how_many_there_are(name: str) -> None:
    few = make_environment((3, 1), 6, name)
    many = make_environment((0, 1, 2, 3, 4, 5, 6), 6, name)
    small, large = (play(environment, RandomLegal(0.8), 2) for environment in (few, many))
    rows = [3, 1]
    np.testing.assert_array_equal(small.choices, large.choices[:, rows])
    np.testing.assert_array_equal(small.stage, large.stage[:, rows])
    np.testing.assert_array_equal(small.flops, large.flops[rows])
    np.testing.assert_allclose(small.loss, large.loss[:, rows], atol=TOLERANCE)
    np.testing.assert_allclose(small.reward, large.reward[:, rows], atol=TOLERANCE)
    np.testing.assert_allclose(
        few.population.hosts.weights.numpy(), many.population.hosts.weights.numpy()[rows], atol=TOLERANCE
    )
    assert (large.germinated.sum(axis=(0, 2))[rows] > 0).any()  # something grew


def test_a_broken_member_changes_no_other() -> None:
    sick, well = make_environment(steps=4), make_environment(steps=4)
    outcomes = []
    for environment in (sick, well):
        environment.reset(0)
        environment.step(everyone(environment, PLANT))
        if environment is sick:
            poison(environment, 1)
        result = environment.step(everyone(environment, ADVANCE))
        outcomes.append((result, environment.masks()))
    others = torch.tensor([0, 2, 3])
    (broken, broken_masks), (fine, fine_masks) = outcomes
    assert broken.panicked.tolist() == [False, True, False, False]
    assert torch.equal(broken.reward[others], fine.reward[others])
    for name, value in fine_masks.tensors().items():
        assert torch.equal(getattr(broken_masks, name)[others], value[others])
    for a, b in (
        (broken.observation.loss_history, fine.observation.loss_history),
        (broken.observation.val_accuracy, fine.observation.val_accuracy),
        (broken.observation.evidence.gradient_health, fine.observation.evidence.gradient_health),
        (sick.population.hosts.weights, well.population.hosts.weights),
    ):
        assert torch.equal(a[others].nan_to_num(-7.0), b[others].nan_to_num(-7.0))


# ---- the reward ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 2, 4])
def test_the_penalty_of_a_rollback_reaches_the_step_that_caused_it(when: int) -> None:
    environment = make_environment(steps=5, governor=GovernorConfig(penalty=7.0))
    controller = Learner("agent", make_agent(), steps=5)
    observation = environment.reset(0)
    controller.begin(EpisodeInfo(environment.members, environment.num_slots, 5, environment.device))
    for t in range(5):
        actions = controller.decide(observation, environment.masks(), t)
        if t == when:
            poison(environment, 2)
        before = environment.derived.potential
        result = environment.step(actions)
        controller.record_step(result.reward, result.terminated, result.active)
        owed = GAMMA * environment.derived.potential - before
        owed[2] -= 7.0 * (t == when)
        torch.testing.assert_close(result.reward, owed)
        observation = result.observation
    stored = controller.buffer.get_batched_sequences().steps.reward  # [N, T]
    assert (stored < -5).nonzero().tolist() == [[2, when]]


def test_dwell_times_follow_the_length_of_an_episode() -> None:
    assert lifecycle_for(30).gates.training_epochs == 3
    assert lifecycle_for(5).gates.training_epochs == 1
    assert lifecycle_for(1000).gates.training_epochs == 10


# ---- saving ----------------------------------------------------------------------------------------------


def test_a_state_of_another_environment_is_refused() -> None:
    environment, others, more = (make_environment(members=m, steps=4) for m in ((0, 1), (2, 3), (0, 1, 2)))
    for begun in (environment, others, more):
        begun.reset(1)
    before = environment.population.hosts.weights.clone()
    with pytest.raises(ValueError, match=r"belongs to members \[2, 3\]"):
        environment.load_state_dict(others.state_dict())
    with pytest.raises(ValueError, match="restore into the same members, host, slots"):
        environment.load_state_dict(more.state_dict())
    with pytest.raises(ValueError, match="lacks "):
        environment.load_state_dict({})
    damaged = environment.state_dict()
    damaged["state.slots.stage"] = torch.full_like(damaged["state.slots.stage"], 5)
    with pytest.raises(ValueError, match="5 is retired"):
        environment.load_state_dict(damaged)
    assert torch.equal(before, environment.population.hosts.weights)


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_decision_step_waits_for_the_device_in_its_two_epochs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but `train_epoch` and `validate` runs under an error for every synchronisation."""
    environment = make_environment(steps=8, device="cuda")
    controller = Learner("agent", make_agent_on("cuda"), steps=8)
    for name in ("train_epoch", "validate"):
        monkeypatch.setattr(environment.population, name, allowed(getattr(environment.population, name)))
    play(
        environment, controller, 0, on_step=lambda r: controller.record_step(r.reward, r.terminated, r.active)
    )  # tables and buffers are made once
    observation = environment.reset(1)
    controller.begin(EpisodeInfo(environment.members, environment.num_slots, 5, environment.device, 1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(8):
            result = environment.step(controller.decide(observation, environment.masks(), t))
            controller.record_step(result.reward, result.terminated, result.active)
            observation = result.observation
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert environment.done


def make_agent_on(device: str) -> PPOAgent:
    torch.manual_seed(0)
    return PPOAgent(TamiyoNet(TamiyoNetConfig(width=16)), device=device)


def allowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, free to look at the device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return call
