"""Compute as the budget: what a member spends, when it ends, and who is charged for what happens after."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.config import EpisodeConfig, RewardConfig
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.learner import Learner
from esper.simic.rollout import play
from esper.simic.trainer import CONTROL, Trainer
from esper.tamiyo.scripted import Static
from tests.scenes import nothing_is_empty
from tests.simic.worlds import GAMMA, make_agent, make_environment, make_residual, make_spec
from tests.slots import actions_of

WAIT: dict[Head, int] = {}
PLANT = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: Blueprint.MLP, Head.ALPHA_TARGET: 2, Head.TEMPO: 0}
ADVANCE = {Head.OP: Op.ADVANCE}
RAISE = (PLANT, ADVANCE, ADVANCE)
COMPUTE = EpisodeConfig(steps=8, clock="compute")


def live(environment: GrowthEnvironment, grows: bool = True, uses_metrics: bool = False) -> list[StepResult]:
    """An episode in which the first member raises a large seed at once, or nobody does."""
    environment.reset(0, uses_metrics=uses_metrics)
    results = []
    others = [WAIT] * (environment.num_members - 1)
    while not environment.done:
        first = RAISE if grows and environment.clock == 0 else (WAIT,)
        results.append(environment.step([actions_of([action, *others]) for action in first]))
    return results


def stacked(results: list[StepResult], name: str) -> Tensor:
    """One field of every step.  # [T, N]"""
    return torch.stack([getattr(result, name) for result in results])


def test_the_budget_of_one_member_ends_it_and_nobody_else() -> None:
    environment, calm = (make_environment(members=(0, 1, 2), episode=COMPUTE) for _ in range(2))
    results, bare = live(environment), live(calm, grows=False)
    ends = stacked(results, "terminated")
    last = ends.int().argmax(0)
    assert ends.sum(0).tolist() == [1, 1, 1], "everyone ends once"
    assert last.tolist()[1:] == [7, 7], "a bare host is paid for in full"
    assert last[0] < 7
    active = stacked(results, "active")
    assert torch.equal(active, torch.arange(len(results)).unsqueeze(1) <= last), "and lives until then"
    for mine, theirs in zip(results, bare, strict=True):
        torch.testing.assert_close(
            mine.observation.val_loss[1:], theirs.observation.val_loss[1:], rtol=1e-4, atol=1e-5
        )


def test_nothing_of_a_finished_member_changes_any_more() -> None:
    environment = make_environment(members=(0, 1), episode=COMPUTE)
    environment.reset(0, uses_metrics=False)
    environment.step([actions_of([action, WAIT]) for action in RAISE])
    while not environment.population.finished[0]:
        environment.step(Actions.wait(2))
    before, slots = environment.population.snapshot(), environment.slots
    spent, parameters = environment.flops.clone(), environment.derived.parameters.clone()
    result = environment.step(actions_of([{Head.OP: Op.SET_ALPHA_TARGET, Head.SLOT: 0}, WAIT]))
    assert result.active.tolist() == [False, True]
    assert (result.reward[0], result.terminated[0], result.panicked[0]) == (0, False, False)
    assert result.outcome.executed_op[0] == Op.WAIT
    for name, value in environment.population.tensors().items():
        rows = value.shape[0] // 2
        assert torch.equal(value[:rows], before[name][:rows]), name
    for name, value in environment.slots.tensors().items():
        assert torch.equal(value[0], slots.tensors()[name][0]), name
    assert environment.flops[0] == spent[0]
    assert environment.derived.parameters[0] == parameters[0]
    assert environment.flops[1] > spent[1]
    assert nothing_is_empty(environment.masks())


def test_the_last_step_may_cost_more_than_is_left_and_is_charged_up_to_the_budget() -> None:
    environment = make_environment(members=(0, 1), episode=COMPUTE)
    environment.reset(0, uses_metrics=False)
    environment.step([actions_of([action, WAIT]) for action in RAISE])
    unbounded = environment.flops.clone()
    while not environment.population.finished[0]:
        assert unbounded[0] < environment.budget[0] * (1 - 1e-9), "nobody goes on without a budget"
        left = environment.observe().steps_left[0]
        unbounded = unbounded + environment.bare_cost * environment.observe().step_cost.double()
        environment.step(Actions.wait(2))
    assert left == 1, "the last step was announced"
    assert unbounded[0] > environment.budget[0]
    assert environment.flops[0] == environment.budget[0]
    assert environment.derived.spent[0] == 1


def test_budgets_are_dealt_to_the_members_by_their_ids() -> None:
    environment = make_environment(members=(4, 1, 0), episode=COMPUTE, budgets=(0.5, 1.0))
    assert (environment.budget / environment.bare_cost).tolist() == [4, 8, 4]
    assert environment.steps == 8
    record = play(environment, Static(), 0)
    np.testing.assert_allclose(record.spent[-1], environment.budget.numpy())
    np.testing.assert_allclose(record.spent[4], 4 * environment.bare_cost)
    assert environment.observe().progress.tolist() == [1, 1, 1]


def test_flops_may_be_given_and_a_bare_host_gets_the_steps_that_they_pay_for() -> None:
    bare = make_environment(members=(0,), episode=COMPUTE).bare_cost
    for flops, steps in ((3.0 * bare, 3), (2.5 * bare, 3), (0.2 * bare, 1)):
        environment = make_environment(members=(0,), episode=COMPUTE.model_copy(update={"flops": flops}))
        assert environment.steps == steps
        assert len(live(environment, grows=False)) == steps
        assert environment.derived.spent.tolist() == [1.0]


def test_only_those_who_look_pay_for_measurements() -> None:
    blind, metric_users = (make_environment(members=(0, 1), episode=COMPUTE) for _ in range(2))
    assert len(live(blind, grows=False)) == 8
    assert len(live(metric_users, grows=False, uses_metrics=True)) < 8
    mixed = make_environment(members=(0, 1), episode=COMPUTE)
    mixed.reset(0, uses_metrics=torch.tensor([True, False]))
    mixed.step(Actions.wait(2))
    assert mixed.flops[0] > mixed.flops[1] == pytest.approx(mixed.bare_cost)
    assert mixed.observe().steps_left[0] < mixed.observe().steps_left[1] == 7


def test_a_saved_episode_goes_on_with_the_same_budget_and_eyes() -> None:
    first, second = (make_environment(members=(0, 1), episode=COMPUTE) for _ in range(2))
    first.reset(0, uses_metrics=torch.tensor([True, False]))
    for _ in range(3):
        first.step(Actions.wait(2))
    second.load_state_dict(first.state_dict())
    for environment in (first, second):
        while not environment.done:
            environment.step(Actions.wait(2))
    assert first.clock == second.clock
    assert torch.equal(first.flops, second.flops)
    assert torch.equal(first.population.hosts.weights, second.population.hosts.weights)
    again = make_environment(members=(0, 1), episode=COMPUTE)
    again.load_state_dict(first.state_dict())
    assert again.done


# ---- learning ----------------------------------------------------------------------------------------------


def test_all_that_the_twins_earn_is_charged_to_the_steps_of_a_member() -> None:
    """Σ γ^t of what is stored is the member's own return less the whole return of its twin, exactly."""
    learner = Learner("agent", make_agent(), 8, reward=RewardConfig(control_variate=True))
    spec = replace(make_spec(members=(0, 1, 2)), episode=COMPUTE)
    trainer = Trainer([spec], [learner], rounds=1)
    with mock.patch.object(trainer, "record_steps", wraps=trainer.record_steps) as recorded:
        trainer.play_round()
    results: list[StepResult] = [call.args[0] for call in recorded.call_args_list]
    spans = trainer.blocks.spans(trainer.environment.num_members)
    paid, active = stacked(results, "reward").double(), stacked(results, "active")
    discount = GAMMA ** torch.arange(len(results), dtype=torch.float64)
    returns = discount @ paid
    counts = active[:, spans["agent"]].sum(0)
    assert (counts < active[:, spans[CONTROL]].sum(0)).all(), "those who look end before their twins"
    assert torch.equal(learner.buffer.step_counts, counts), "rows are as long as their members lived"
    steps = learner.buffer.get_batched_sequences().steps
    stored = steps.reward.double()  # [N, T]
    charged = stored @ discount[: stored.shape[1]]
    torch.testing.assert_close(
        charged, returns[spans["agent"]] - returns[spans[CONTROL]], rtol=1e-4, atol=1e-5
    )
    last = counts.unsqueeze(1) - 1
    assert steps.terminated.gather(1, last).all()
    assert steps.terminated.sum(1).tolist() == [1, 1, 1]
    assert (stored.masked_fill(learner.buffer.valid_mask[:, : stored.shape[1]], 0.0) == 0).all()


# ---- copies, folds and what fits ---------------------------------------------------------------------------

CLONE = {Head.OP: Op.GERMINATE, Head.BLUEPRINT: Blueprint.CLONE, Head.ALPHA_TARGET: 2, Head.TEMPO: 0}
FOSSILISE = {Head.OP: Op.FOSSILIZE}


WIDEN = CLONE | {Head.BLUEPRINT: Blueprint.WIDEN_FULL}


def test_new_units_train_a_step_with_a_count_of_their_own_before_they_are_folded_in() -> None:
    environment = make_residual(folds=2)
    environment.reset(0, uses_metrics=False)
    environment.step([actions_of([action, WAIT]) for action in (WIDEN, FOSSILISE)])
    assert environment.slots.stage[0, 0] == Stage.FOSSILIZED
    population = environment.population
    stopped = mock.patch.object(population, "run_training", side_effect=KeyboardInterrupt)
    with stopped as train, pytest.raises(KeyboardInterrupt):  # ahead of the epoch
        environment.step(Actions.wait(2))
    states: SlotStates = train.call_args.args[0]
    population.read_slots(states)
    assert states.stage[0, 0] == Stage.DORMANT
    size = population.network.slots[0].body(int(population.forms[0, 0, 1])).parameters
    moments = population.parts.second[2, :size]  # of the first member's block, as wide as it is now
    assert (moments > 0).all(), "none of Adam's moments is 0 under the older count of the block"


def test_a_rollback_gives_the_room_of_a_fold_back() -> None:
    environment = make_residual(members=(0, 1), steps=9, folds=2)
    environment.reset(0, uses_metrics=False)
    environment.population.hosts.weights[0] = torch.nan
    result = environment.step([actions_of([action] * 2) for action in (CLONE, FOSSILISE)])
    assert result.panicked.tolist() == [True, False]
    assert environment.slots.room.tolist() == [[2], [1]]
    assert environment.slots.stage[:, 0].tolist() == [Stage.DORMANT, Stage.DORMANT]
    assert environment.derived.parameters[0] == environment.host_parameters
    environment.step(Actions.wait(2))


def test_a_round_counts_the_steps_in_which_members_decided() -> None:
    spec = replace(make_spec(), episode=COMPUTE, budgets=(1.0, 0.25))
    trainer, decided = Trainer([spec], [Learner("one", make_agent(), 8)], rounds=3), list[int]()
    for rounds in trainer.run():
        summary, record = rounds["one"].summary, rounds["one"].record
        decided.append(int((np.diff(record.spent, axis=0) > 0).sum()))
        assert decided[-1] < record.reward.size, "members ended apart"
        assert summary.member_epochs == sum(decided)
        assert sum(summary.op_shares.values()) == pytest.approx(1.0)
        waited = ((record.executed_op == Op.WAIT) & (np.diff(record.spent, axis=0) > 0)).sum()
        assert summary.op_shares["WAIT"] == pytest.approx(waited / decided[-1])
        np.testing.assert_allclose(np.sum(summary.op_shares_by_step, axis=1), 1.0)
    again = Trainer([spec], [Learner("one", make_agent(), 8)], rounds=4)
    again.load_state_dict(trainer.state_dict())
    assert again.member_epochs == sum(decided)
