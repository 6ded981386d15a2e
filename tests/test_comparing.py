"""Arms on equal footing: the same members, the same compute, and nobody chosen by the test split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.builders import make_specs
from esper.comparing import (
    ControllerRun,
    Experiment,
    as_comparison,
    best_of,
    compare,
    fit_schedule,
    from_the_start,
    prices_of,
    run_controller,
    run_fixed,
)
from esper.config import load_config
from esper.controllers import Arm, Fixed, arms_of, conditions_of
from esper.lifecycle.stages import Stage
from esper.runs.schema import json_values
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import play
from esper.tamiyo.config import STUDY, differences
from esper.tamiyo.controller import Controller
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import RandomLegal, Static
from esper.utils.gather import Gather
from tests.controllers import Scheduled
from tests.shards import on_processes
from tests.simic.worlds import make_agent, make_environment
from tests.tiny import TINY


@pytest.fixture(scope="module")
def environment() -> GrowthEnvironment:
    return make_environment(steps=8)


@pytest.fixture(scope="module")
def runs(environment: GrowthEnvironment) -> dict[str, ControllerRun]:
    arms: dict[str, Arm] = {
        "static": Fixed(),
        "scheduled": Scheduled(range(0, 99, 3)),
        "learned": LearnedController(make_agent(), deterministic=True),
        "nobody": Static(),
        "final": Fixed(of="scheduled"),
        "best": Fixed(restarts=3),
    }
    return {run.name: run for run in compare(environment, arms)}


def test_every_arm_begins_with_the_same_weights(runs: dict[str, ControllerRun]) -> None:
    assert list(runs) == ["static", "scheduled", "learned", "nobody", "final", "best"]
    for name in ("scheduled", "learned", "nobody"):
        np.testing.assert_array_equal(runs[name].record.loss[0], runs["static"].record.loss[0])


def test_networks_that_never_change_spend_what_growth_spent(runs: dict[str, ControllerRun]) -> None:
    """To within half a minibatch; a bare host validates nothing, so it trains for longer."""
    spent = {name: run.record.flops.mean() for name, run in runs.items()}
    most = max(spent["scheduled"], spent["learned"], spent["nobody"])
    assert spent["static"] == pytest.approx(most, rel=0.03)
    assert spent["best"] == pytest.approx(most, rel=0.06)
    assert spent["final"] == pytest.approx(spent["scheduled"], rel=0.06)
    assert (np.diff(runs["best"].record.spent, axis=0) > 0).all()


def test_the_final_network_is_there_from_the_start(runs: dict[str, ControllerRun]) -> None:
    heard = (runs["scheduled"].record.final_slots.alpha > 0).numpy()
    assert heard.any()
    np.testing.assert_array_equal(runs["final"].record.stage[0] == Stage.FOSSILIZED, heard)


def test_a_comparison_tells_what_was_found(
    environment: GrowthEnvironment, runs: dict[str, ControllerRun]
) -> None:
    comparison = as_comparison(environment, [run.result() for run in runs.values()])
    assert comparison.task == "spirals"
    assert [c.name for c in comparison.controllers] == list(runs)
    assert comparison.controllers[0].members == [0, 1, 2, 3]
    assert comparison.controllers[0].parameters == [environment.host_parameters] * 4
    assert {d.baseline for d in comparison.differences} == {"static"}
    scheduled = runs["scheduled"]
    ratio = scheduled.record.parameter_ratio[-1]
    expected = scheduled.test.accuracy - environment.spec.reward.rent_weight * np.log(ratio)
    np.testing.assert_allclose(scheduled.potential, expected, rtol=1e-5)


def test_without_growth_a_fixed_arm_has_an_episode_of_its_own(environment: GrowthEnvironment) -> None:
    """And is then the static controller to the bit: no validation is charged to either."""
    (run,) = compare(environment, {"static": Fixed()})
    batches = environment.steps * environment.spec.population.batches_per_epoch
    np.testing.assert_allclose(run.record.flops, batches * prices_of(environment).batch)
    static = run_controller(environment, "static", Static())
    np.testing.assert_array_equal(run.test.accuracy, static.test.accuracy)
    np.testing.assert_allclose(static.record.flops, run.record.flops)


@given(st.floats(0.1, 5000), st.integers(1, 40), st.integers(1, 30))
def test_a_schedule_meets_its_minibatches(minibatches: float, steps: int, batches: int) -> None:
    found_steps, found_batches = fit_schedule(minibatches, steps, batches)
    wanted = max(1, round(minibatches))
    done = found_steps * found_batches
    assert abs(done - wanted) <= max(1, wanted // 20) or steps < 3  # few steps leave little to choose from
    assert abs(done - wanted) <= found_steps / 2
    assert min(steps, wanted) <= found_steps <= 2 * steps


@pytest.mark.parametrize(
    "controller", [Scheduled(range(0, 99, 3)), Schedule.parse("norm@0.2")], ids=["looks", "does not"]
)
def test_by_the_best_epoch_both_arms_choose_weights_alike_and_pay_for_it(controller: Controller) -> None:
    environment = make_environment(steps=8, best_epoch=True)
    grown, static = compare(environment, {"grown": controller, "static": Fixed()})
    price = prices_of(environment)
    per_step = np.diff(static.record.spent, axis=0)  # [T, N]
    minibatches = (per_step - price.validation) / price.batch
    np.testing.assert_allclose(minibatches, np.round(minibatches), err_msg="minibatches and one validation")
    assert static.record.flops.mean() == pytest.approx(grown.record.flops.mean(), rel=0.06)
    least = environment.spec.population.batches_per_epoch * price.batch + price.validation
    assert (np.diff(grown.record.spent, axis=0)[:-1] >= least - 1).all(), "a grown arm pays for it too"
    alone = run_controller(environment, "static", Static())
    np.testing.assert_allclose(
        alone.record.flops, environment.steps * least, err_msg="nothing to decide, nothing paid"
    )
    for run in (static, alone):
        np.testing.assert_array_equal(run.record.accuracy[-1], run.record.accuracy[1:].max(axis=0))


# ---- the best of several ---------------------------------------------------------------------------------


def test_the_best_is_chosen_by_validation_data_member_by_member(environment: GrowthEnvironment) -> None:
    several = [run_controller(environment, "static", Static(), episode=k) for k in range(3)]
    best = best_of(several)
    for n in range(environment.num_members):
        final = [run.record.accuracy[-1, n] for run in several]
        chosen = several[int(np.argmax(final))]
        assert best.record.accuracy[-1, n] == max(final)
        assert best.test.accuracy[n] == chosen.test.accuracy[n]
        assert best.potential[n] == chosen.potential[n]
        np.testing.assert_array_equal(best.record.loss[:, n], chosen.record.loss[:, n])


def test_choosing_costs_a_validation_of_each(environment: GrowthEnvironment) -> None:
    price = prices_of(environment)
    budget = float(20 * price.batch.mean())
    whole = run_fixed(environment, "static", budget)
    shared = run_fixed(environment, "best", budget, restarts=2)
    np.testing.assert_allclose(whole.record.flops, 20 * price.batch)
    minibatches = (shared.record.flops / 2 - price.validation) / price.batch
    np.testing.assert_allclose(minibatches, np.round(minibatches))
    assert (minibatches <= 10).all()


@pytest.mark.parametrize(("episodes", "restarts"), [(0.4, 1), (1.0, 1), (2.9, 3)])
def test_the_budget_says_how_often_to_restart(
    environment: GrowthEnvironment, episodes: float, restarts: int
) -> None:
    """As many as can train for an episode each, and at least one."""
    price = prices_of(environment)
    batches = environment.steps * environment.spec.population.batches_per_epoch
    budget = episodes * float((batches * price.batch + price.validation).mean())
    run = run_fixed(environment, "best", budget, restarts=0)
    assert run.record.flops.mean() == pytest.approx(budget, rel=0.2)
    assert run.epochs / environment.steps == pytest.approx(episodes, rel=0.2)
    same = run_fixed(environment, "best", budget, restarts=restarts)
    np.testing.assert_array_equal(run.record.accuracy, same.record.accuracy)


def test_from_the_start_keeps_what_is_heard_and_nothing_else(environment: GrowthEnvironment) -> None:
    record = play(environment, RandomLegal(0.9), 1)
    slots = from_the_start(record.final_slots)
    slots.check()
    heard = record.final_slots.alpha > 0
    assert torch.equal(slots.alpha == 1, heard)
    assert torch.equal(slots.blueprint[heard], record.final_slots.blueprint[heard])
    assert (slots.stage[~heard] == Stage.DORMANT).all()


# ---- a line-up by name -----------------------------------------------------------------------------------


def test_a_line_up_keeps_the_order_that_was_asked_for() -> None:
    config = load_config(overrides=TINY)
    arms = arms_of("habit, static,final:heuristic,best-of:3 ,random:0.5", config)
    final = "static-final of heuristic"
    assert list(arms) == ["habit", "static", "heuristic", final, "best-of:3", "random:0.5"]
    assert arms["static"] == Fixed()
    assert arms[final] == Fixed(of="heuristic")
    assert arms["best-of:3"] == Fixed(restarts=3)
    assert arms_of("best-of", config) == {"best-of": Fixed(restarts=0)}


@pytest.mark.parametrize("budget", ["episode.flops=null", "episode.flops=4e5"])  # the second pays for 8 steps
def test_an_experiment_says_how_far_it_is_and_pairs_its_seeds(budget: str) -> None:
    config = load_config(overrides=[*TINY, "task=spirals", "members=2", budget])
    experiment = Experiment(config, arms_of("static,habit,best-of:2", config), seeds=2)
    progress: list[float] = []
    comparison = experiment.run(progress.append)
    lanes = [(lanes.round, lanes.title) for lanes in experiment.lanes]
    assert lanes == [(1, "static"), (2, "habit"), (3, "best-of:2")]
    assert progress == sorted(progress)
    assert progress[-1] == 2 * 3
    assert [result.name for result in comparison.controllers] == ["static", "habit", "best-of:2"]
    assert comparison.controllers[2].members == [0, 1, 2, 3]


def test_processes_that_share_an_experiment_find_what_one_process_finds() -> None:
    """Budgets of fixed arms follow from what all members spent, wherever they were."""
    settings = ("task=spirals", "members=5", "shards=3", "episode.clock=compute")
    config = load_config(overrides=[*TINY, *settings])

    def work(gather: Gather | None) -> object:
        arms = arms_of("random,final:random,best-of:2", config)
        experiment = Experiment(config, arms, gather=gather)
        comparison = experiment.run()
        return json_values(comparison), [lanes.to_bytes() for lanes in experiment.lanes]

    alone = work(None)
    assert on_processes(2, work) == [alone, alone]


# ---- controllers outside of the conditions that they were trained in ---------------------------------------


STUDIED = ["task=spirals", "members=2", "episode.steps=4", "population.batch_size=128", "population.folds=1"]
STUDIED += ["population.batches_per_epoch=48", "population.host_lr=0.01", "population.schedule=flat"]
STUDIED += ["lifecycle.block_blueprints=[clone, widen_full]"]


def test_a_budget_in_flops_is_counted_in_minibatches_of_the_bare_host() -> None:
    (spec,) = make_specs(load_config(overrides=STUDIED))
    bare = GrowthEnvironment(spec).bare_cost
    for steps in (3.99, 4.0):
        asked = replace(spec, episode=spec.episode.model_copy(update={"flops": steps * bare}))
        assert conditions_of([asked]).minibatches[0] == pytest.approx(48 * steps)
        assert (differences(STUDY, conditions_of([asked])) == []) == (steps == 4.0)


def test_outside_of_its_conditions_a_controller_does_not_grow_and_says_so() -> None:
    config = load_config(overrides=[*STUDIED, "population.batch_size=64", "population.batches_per_epoch=1"])
    arms = arms_of("static,tamiyo,final:tamiyo,schedule,schedule:clone@0.1", config)
    experiment = Experiment(config, arms)
    (remark, by_rule) = experiment.remarks
    assert remark.startswith("tamiyo does not grow here, because it is outside the conditions")
    assert "population.batch_size is 64 (trained with 128)" in remark
    assert "--force" in remark
    assert by_rule.startswith("schedule does not grow here")
    comparison = experiment.run()
    results = {result.name: result for result in comparison.controllers}
    for name in ("tamiyo", "static-final of tamiyo", "schedule"):
        assert results[name].test_accuracy == results["static"].test_accuracy
    assert results["schedule:clone@0.1"].parameters > results["static"].parameters
    assert comparison.remarks == experiment.remarks
    assert Experiment(config, arms, force=True).arms["tamiyo"] is arms["tamiyo"]
