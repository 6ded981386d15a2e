"""Arms on equal footing: the same members, the same compute, and nobody chosen by the test split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.builders import make_specs
from esper.comparing import (
    ControllerRun,
    as_comparison,
    compare,
    fit_schedule,
    prepare,
    run_controller,
    step_costs,
    trajectories_of,
)
from esper.config import load_config, preset_names
from esper.controllers import Arm, Fixed, arms_of, conditions_of
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.tamiyo.config import STUDY, differences
from esper.tamiyo.controller import Controller
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import Static
from tests.controllers import Scheduled
from tests.simic.worlds import make_agent, make_environment
from tests.tiny import TINY


@pytest.fixture(scope="module")
def environment() -> GrowthEnvironment:
    return make_environment(steps=6)


@pytest.fixture(scope="module")
def runs(environment: GrowthEnvironment) -> dict[str, ControllerRun]:
    arms: dict[str, Arm] = {
        "static": Fixed(),
        "scheduled": Scheduled(range(0, 99, 3)),
        "learned": LearnedController(make_agent(), deterministic=True),
        "nobody": Static(),
    }
    return {run.name: run for run in compare(environment, arms)}


def test_every_arm_begins_with_the_same_weights(runs: dict[str, ControllerRun]) -> None:
    assert list(runs) == ["static", "scheduled", "learned", "nobody"]
    for name in ("scheduled", "learned", "nobody"):
        np.testing.assert_array_equal(runs[name].record.loss[0], runs["static"].record.loss[0])


def test_networks_that_never_change_spend_what_growth_spent(runs: dict[str, ControllerRun]) -> None:
    """To within half a minibatch; a bare host validates nothing, so it trains for longer."""
    spent = {name: run.record.flops.mean() for name, run in runs.items()}
    most = max(spent["scheduled"], spent["learned"], spent["nobody"])
    assert spent["static"] == pytest.approx(most, rel=0.03)


def test_a_comparison_tells_what_was_found(
    environment: GrowthEnvironment, runs: dict[str, ControllerRun]
) -> None:
    comparison = as_comparison(environment, list(runs.values()))
    assert comparison.task == "spirals"
    assert [c.name for c in comparison.controllers] == list(runs)
    assert comparison.controllers[0].members == [0, 1, 2, 3]
    assert comparison.controllers[0].parameters == [environment.host_parameters] * 4
    assert {d.baseline for d in comparison.differences} == {"static"}
    scheduled = runs["scheduled"]
    ratio = scheduled.record.parameter_ratio[-1]
    expected = scheduled.test.accuracy - environment.spec.reward.rent_weight * np.log(ratio)
    np.testing.assert_allclose(scheduled.potential, expected, rtol=1e-5)


def test_a_fixed_arm_has_its_size_where_every_member_has_a_table_of_its_own() -> None:
    settings = ["members=3", "device=cpu", "episode.steps=2", "population.batches_per_epoch=1"]
    config = load_config(preset="demo", overrides=settings)
    environment, arms, _ = prepare(config, {"static": Fixed(), "wide": Fixed({"hidden": 6})})
    assert len(environment.spec.variants) > 1
    static, wide = (run.result() for run in compare(environment, arms))
    blocks, width, units = 2, config.host.width, 6 - 2
    assert config.host.hidden == 2
    # Each hidden unit of a block has a row, a column and a bias.
    assert wide.parameters == [n + blocks * units * (2 * width + 1) for n in static.parameters]
    assert wide.test_accuracy != static.test_accuracy


def test_without_growth_a_fixed_arm_has_an_episode_of_its_own(environment: GrowthEnvironment) -> None:
    """And is then the static controller to the bit: no validation is charged to either."""
    (run,) = compare(environment, {"static": Fixed()})
    batches = environment.steps * environment.spec.population.batches_per_epoch
    np.testing.assert_allclose(run.record.flops, batches * step_costs(environment)[0])
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
    environment = make_environment(steps=6, best_epoch=True)
    grown, static = compare(environment, {"grown": controller, "static": Fixed()})
    batch, validation = step_costs(environment)
    per_step = np.diff(static.record.spent, axis=0)  # [T, N]
    minibatches = (per_step - validation) / batch
    np.testing.assert_allclose(minibatches, np.round(minibatches), err_msg="minibatches and one validation")
    assert static.record.flops.mean() == pytest.approx(grown.record.flops.mean(), rel=0.06)
    least = environment.spec.population.batches_per_epoch * batch + validation
    assert (np.diff(grown.record.spent, axis=0)[:-1] >= least - 1).all(), "a grown arm pays for it too"
    alone = run_controller(environment, "static", Static())
    np.testing.assert_allclose(
        alone.record.flops, environment.steps * least, err_msg="nothing to decide, nothing paid"
    )
    for run in (static, alone):
        np.testing.assert_array_equal(run.record.accuracy[-1], run.record.accuracy[1:].max(axis=0))


@pytest.mark.parametrize("budget", ["episode.flops=null", "episode.flops=4e5"])  # the second pays for 8 steps
def test_arms_keep_the_order_that_was_asked_for_and_say_how_far_they_are(budget: str) -> None:
    config = load_config(overrides=[*TINY, "task=spirals", "members=2", budget])
    names = ["heuristic", "static", "fixed:hidden=9", "random:0.5"]
    arms = arms_of("heuristic, static,fixed:hidden=9 ,random:0.5", config)
    assert list(arms) == names
    assert (arms["static"], arms["fixed:hidden=9"]) == (Fixed(), Fixed(host={"hidden": 9}))
    environment, arms, _ = prepare(config, arms)
    progress: list[float] = []
    runs = compare(environment, arms, progress.append)
    assert [(one.round, one.title) for one in trajectories_of(environment, runs)] == [*enumerate(names, 1)]
    assert progress == sorted(progress)
    assert progress[-1] == 4


# ---- controllers outside of the conditions that they were trained in ---------------------------------------


STUDIED = ["task=spirals", "members=2", "episode.steps=4", "population.batch_size=128", "population.folds=1"]
STUDIED += ["population.batches_per_epoch=48", "population.host_lr=0.01", "population.seed_lr=0.01"]
STUDIED += ["population.schedule=flat"]
STUDIED += ["lifecycle.block_blueprints=[clone, widen_full]"]


def test_a_budget_in_flops_is_counted_in_minibatches_of_the_bare_host() -> None:
    (spec,) = make_specs(load_config(overrides=STUDIED))
    bare = GrowthEnvironment(spec).bare_cost
    for steps in (3.99, 4.0):
        asked = replace(spec, episode=spec.episode.model_copy(update={"flops": steps * bare}))
        assert conditions_of([asked]).minibatches[0] == pytest.approx(48 * steps)
        assert (differences(STUDY, conditions_of([asked])) == []) == (steps == 4.0)


def test_outside_of_its_conditions_a_controller_does_not_grow_and_says_so() -> None:
    changed = ["population.batch_size=64", "population.batches_per_epoch=1", "population.optimizer=sgd"]
    config = load_config(overrides=[*STUDIED, *changed, "population.seed_lr=0.02"])
    arms = arms_of("static,tamiyo,schedule,schedule:clone@0.1", config)
    environment, allowed, remarks = prepare(config, arms)
    (remark, by_rule) = remarks
    assert remark.startswith("tamiyo does not act here, because it is outside the conditions")
    assert "population.batch_size is 64 (trained with 128)" in remark
    assert "population.optimizer is sgd (trained with adamw)" in remark
    assert "population.seed_lr / population.host_lr is 2 (trained with 1)" in remark
    assert "--force" in remark
    assert by_rule.startswith("schedule does not act here")
    comparison = as_comparison(environment, compare(environment, allowed), remarks)
    results = {result.name: result for result in comparison.controllers}
    for name in ("tamiyo", "schedule"):
        assert results[name].test_accuracy == results["static"].test_accuracy
    assert results["schedule:clone@0.1"].parameters > results["static"].parameters
    assert comparison.remarks == remarks
    assert prepare(config, arms, force=True)[1]["tamiyo"] is arms["tamiyo"]


@pytest.mark.parametrize("preset", preset_names())
def test_shipped_controllers_act_with_the_preset_of_their_training_alone(preset: str) -> None:
    config = load_config(preset=preset, overrides=["members=2", "device=cpu", "task=spirals"])
    remarks = prepare(config, arms_of("static,tamiyo,rates", config))[2]
    at_home = {"compute": "tamiyo", "demo": "rates"}.get(preset)
    refused = {remark.split(" does not act here")[0] for remark in remarks}
    assert refused == {"tamiyo", "rates"} - {at_home}
