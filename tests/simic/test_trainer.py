"""The run: it learns, it can be stopped and go on, and what it tells is what happened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Head, Op
from esper.population.extract import extract
from esper.runs.schema import Event, from_json, json_values
from esper.simic.agent.rollout_buffer import Transition
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import Learner
from esper.simic.rollout import evaluate_test, play
from esper.simic.telemetry import episode_events
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.scripted import RandomLegal, Static
from esper.tasks import load_task
from esper.utils.errors import UserError
from studies.growth.variants import permuted_labels
from tests.simic.worlds import make_agent, make_environment, make_spec, make_trainer, task


def masks_of_the_states_alone(environment: GrowthEnvironment) -> ActionMasks:
    """What is legal for one who does not know what was measured: gates will refuse some of it."""
    rules = environment.spec.lifecycle
    return compute_batch_masks(environment.slots, environment.slot_config, rules, environment.bodies.topology)


def steps_of(trainer: Trainer) -> Transition:
    """What the learner stored of the latest episode.  # [N, T, ...]"""
    return trainer.learners["agent"].buffer.get_batched_sequences().steps


def test_a_stopped_run_goes_on_to_the_same_bits() -> None:
    def trainer() -> Trainer:
        return make_trainer(rounds=3, steps=5, control=True, minibatches=2)

    whole = trainer()
    uninterrupted = [told["agent"] for told in whole.run()]
    first = trainer()
    first.play_round()
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    second = trainer()
    second.load_state_dict(saved)
    resumed = [told["agent"] for told in second.run()]
    assert [r.summary.round for r in resumed] == [2, 3]
    for a, b in zip(uninterrupted[1:], resumed, strict=True):
        np.testing.assert_array_equal(a.record.reward, b.record.reward)
        np.testing.assert_array_equal(a.record.choices, b.record.choices)
    end, again = whole.state_dict(), second.state_dict()
    for name in end:
        assert name == "seconds" or torch.equal(end[name], again[name]), name


def test_who_keeps_to_the_masks_is_never_refused() -> None:
    record = play(make_environment(members=tuple(range(8)), steps=12), RandomLegal(0.7), 3)
    assert (record.choices[:, :, Head.OP] == Op.ADVANCE).any()
    assert record.succeeded.all()


def test_what_was_asked_for_is_learned_from_whatever_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthEnvironment, "masks", masks_of_the_states_alone)
    trainer = make_trainer(steps=10, minibatches=2)
    result = trainer.play_round()["agent"]
    record, steps = result.record, steps_of(trainer)
    assert not record.succeeded.all()  # a gate refused something, and that counts as WAIT
    assert torch.equal(steps.actions.permute(1, 0, 2), torch.from_numpy(record.choices))
    assert steps.terminated.nonzero()[:, 1].tolist() == [9] * 4
    assert not steps.truncated.any()
    assert steps.reset.nonzero()[:, 1].tolist() == [0] * 4


def test_rollbacks_are_told() -> None:
    trainer = make_trainer(steps=4)
    learner, weights = trainer.learners["agent"], trainer.environment.population.hosts.weights
    decide = learner.decide

    def sabotage(observation, masks, step):  # type: ignore[no-untyped-def]
        if step == 2:
            weights[1] = float("nan")
        return decide(observation, masks, step)

    learner.decide = sabotage  # type: ignore[method-assign]
    result = trainer.play_round()["agent"]
    assert result.summary.anomalies == ["the governor rolled 1 of 4 members back, 1 times"]
    told = [e for e in episode_events(result.record, 1) if e.kind == "rolled_back"]
    assert [(e.step, e.member) for e in told] == [(2, 1)]
    assert "loss" not in told[0].numbers  # it was not finite
    assert told[0].numbers["restored_loss"] == pytest.approx(float(result.record.loss[2, 1]))


def test_rounds_take_turns_on_several_tasks() -> None:
    """Whatever a task looks like; each has a buffer that fits it."""
    learner = Learner("agent", make_agent(), steps=3)
    specs = [make_spec(steps=3), make_spec(steps=3, name="digits")]
    trainer = Trainer(specs, [learner], rounds=4)
    parameters = [told["agent"].record.host_parameters for told in trainer.run()]
    assert parameters[:2] == parameters[2:]
    assert parameters[0] != parameters[1]
    assert [e.spec.task.name for (e,) in trainer.environments] == ["spirals", "digits"]
    assert learner.agent.updates == 4


# ---- the test split --------------------------------------------------------------------------------------


def test_the_whole_test_split_is_measured() -> None:
    environment = make_environment(members=(0, 1), steps=1)
    play(environment, Static(), 0)
    split = environment.spec.task.test()
    model = extract(environment.population, environment.slots, 1)
    with torch.no_grad():
        outputs = model(split.inputs)
        accuracy = (outputs.argmax(-1) == split.targets).float().mean()
        loss = torch.nn.functional.cross_entropy(outputs, split.targets)
    assert len(split) > environment.spec.population.validation_samples
    measured = evaluate_test(environment)
    assert measured.accuracy[1] == pytest.approx(float(accuracy), abs=1e-6)
    assert measured.loss[1] == pytest.approx(float(loss), abs=1e-5)


def test_members_with_tasks_of_their_own_are_tested_on_them() -> None:
    """Labels turned round: the same network scores the other half of the points."""
    one = task()
    turned = (permuted_labels(one, seed) for seed in range(20))
    other = next(t for t in turned if not torch.equal(t.train.targets, one.train.targets))
    environment = make_environment(members=(0, 1, 2), steps=1, variants=(one, other))
    environment.reset(0)
    environment.population.hosts.weights.copy_(environment.population.hosts.weights[:1].expand(3, -1).clone())
    accuracy = evaluate_test(environment).accuracy
    assert accuracy[0] == accuracy[2]
    assert accuracy[1] == pytest.approx(1.0 - accuracy[0], abs=1e-6)


def test_tasks_of_different_shapes_or_classes_share_no_population() -> None:
    spirals, more = task(), load_task("synthetic")
    with pytest.raises(UserError, match=r"spirals has \[2\] and 2, synthetic has \[8\] and 4"):
        make_environment(variants=(spirals, more))
    with pytest.raises(UserError, match=r"has \[2\] and 2, spirals has \[2\] and 3"):
        make_environment(variants=(spirals, replace(spirals, num_classes=3)))


# ---- events ----------------------------------------------------------------------------------------------


def test_events_tell_everything_that_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthEnvironment, "masks", masks_of_the_states_alone)
    environment = make_environment(members=tuple(range(8)), steps=12, name="spirals")
    record = play(environment, RandomLegal(0.7), 3)
    events = episode_events(record, round=4)
    counts = {kind: sum(e.kind == kind for e in events) for kind in ("germinated", "pruned", "gate_refused")}
    assert counts["germinated"] == record.germinated.sum() > 0
    assert counts["pruned"] == record.pruned.sum() > 0
    assert counts["gate_refused"] == (record.refused_by >= 0).sum() > 0
    assert [(e.step, e.member) for e in events] == sorted((e.step, e.member) for e in events)
    assert {e.round for e in events} == {4}
    moved = [(e.stage_from, e.stage_to) for e in events if e.kind == "stage_changed"]
    assert moved
    assert set(moved) <= {
        ("GERMINATED", "TRAINING"),
        ("TRAINING", "BLENDING"),
        ("BLENDING", "HOLDING"),
        ("HOLDING", "BLENDING"),
    }
    for event in events:
        assert from_json(Event, json_values(event), "events.jsonl") == event
        if event.kind in ("germinated", "pruned"):
            assert event.blueprint is not None
            assert event.numbers["parameters"] > 0
