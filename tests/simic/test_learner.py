"""Learners side by side learn what each would learn alone, each in the way that its settings say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Head, Op
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import Transition
from esper.simic.bodies import TaskPopulation
from esper.simic.config import LearnerConfig, RewardConfig
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import Learner, make_policy
from esper.simic.rollout import play
from esper.simic.trainer import CONTROL, Trainer
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tamiyo.scripted import Static
from tests.simic.test_sync import Waits
from tests.simic.worlds import make_residual, make_spec

STEPS = 6
SPEC = replace(make_spec(members=(3, 4, 5), steps=STEPS), gamma=1.0)
PPO = PPOConfig(gamma=1.0, epochs=2, minibatches=2, learning_rate=3e-3, target_kl=None)
SHAPE = TamiyoNetConfig(width=16, embedding=4)
BEYOND = RewardConfig(control_variate=True)
WAYS: dict[str, tuple[LearnerConfig, RewardConfig]] = {
    "plain": (LearnerConfig(), BEYOND),
    "patient": (LearnerConfig(patience=1.0), BEYOND),
    "no_twin": (LearnerConfig(), RewardConfig()),
}


def make_learner(way: str, ppo: PPOConfig = PPO, name: str | None = None) -> Learner:
    config, reward = WAYS[way]
    torch.manual_seed(1)
    return Learner(name or way, PPOAgent(make_policy(SHAPE, config), ppo), STEPS, config, reward)


def make_trainer() -> Trainer:
    """All ways side by side, after two rounds."""
    trainer = Trainer([SPEC], [make_learner(way) for way in WAYS], rounds=9)
    trainer.rounds_done = 2
    return trainer


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """One round of every way."""
    trainer = make_trainer()
    trainer.play_round()
    return trainer


def steps_of(trainer: Trainer, name: str) -> Transition:
    return trainer.learners[name].buffer.get_batched_sequences().steps


@pytest.mark.parametrize("name", ["patient", "no_twin"])
def test_a_learner_learns_what_it_would_learn_alone(trainer: Trainer, name: str) -> None:
    alone = make_learner(name)
    control = torch.from_numpy(play(GrowthEnvironment(SPEC), Static(), episode=2).reward)
    earned = iter(control)

    def record_step(result):  # type: ignore[no-untyped-def]
        alone.record_step(result.reward, result.terminated, result.active, next(earned))

    play(GrowthEnvironment(SPEC), alone, episode=2, on_step=record_step)
    alone.agent.update(alone.buffer)
    stored = alone.buffer.get_batched_sequences().steps.actions
    torch.testing.assert_close(steps_of(trainer, name).actions, stored, rtol=0, atol=0)
    learned = trainer.learners[name].agent.state_dict()
    for key, tensor in alone.agent.state_dict().items():
        torch.testing.assert_close(learned[key], tensor, rtol=1e-3, atol=1e-4)


def test_learners_do_not_share_their_dice(trainer: Trainer) -> None:
    """Same weights and same members, and so the same first observation, yet other choices."""
    one, other = steps_of(trainer, "plain"), steps_of(trainer, "no_twin")
    assert torch.equal(one.observation.features[:, 0], other.observation.features[:, 0])
    torch.testing.assert_close(one.value[:, 0], other.value[:, 0])
    assert not torch.equal(one.actions, other.actions)


def test_a_patient_policy_differs_by_the_bias_of_its_ops_alone() -> None:
    patient, hasty = (make_learner(way).agent.policy.state_dict() for way in ("patient", "plain"))
    assert [name for name in hasty if not torch.equal(patient[name], hasty[name])] == ["op_head.bias"]
    assert patient["op_head.bias"].argmax() == Op.ADVANCE
    assert patient["op_head.bias"].argmin() == Op.PRUNE
    torch.manual_seed(1)
    assert torch.equal(TamiyoNet(SHAPE).op_head.bias, hasty["op_head.bias"])


def test_all_learners_are_told_beside_the_same_twins(trainer: Trainer) -> None:
    told = [round.summary for round in trainer.play_round().values()]
    control = [summary.return_mean - summary.extra["above_twin"] for summary in told]
    assert control == pytest.approx([control[0]] * len(WAYS))
    played = told[0].round - 2  # it began with the third
    assert {summary.member_epochs for summary in told} == {played * (len(WAYS) + 1) * 3 * STEPS}


def test_deciding_and_teaching_read_nothing_back(trainer: Trainer) -> None:
    world, blocks = trainer.environment, trainer.blocks
    observation = world.reset(4)
    blocks.begin(EpisodeInfo(world.members, world.num_slots, world.spec.seed, world.device, 4))
    masks = world.masks()
    with Waits() as deciding:
        actions = blocks.decide(observation, masks, 0)
    result = world.step(actions)
    spans = blocks.spans(world.num_members)
    assert list(spans) == [CONTROL, *WAYS]
    with Waits() as teaching:
        trainer.record_steps(result, spans)
    assert deciding.found + teaching.found == []


@pytest.mark.long
def test_while_it_imitates_a_teacher_acts_and_the_policy_comes_to_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 decisions of 96 minibatches: the rule of thumb widens and repeats; afterwards nobody tells."""
    monkeypatch.setattr(TaskPopulation, "batches", 96)
    config = LearnerConfig(imitate=5)
    world = replace(make_residual(members=range(4), steps=16, folds=2).spec, gamma=1.0)
    torch.manual_seed(1)
    ppo = PPO.model_copy(update={"learning_rate": 1e-2, "epochs": 8})
    learner = Learner("pupil", PPOAgent(make_policy(SHAPE, config), ppo), 16, config)
    trainer = Trainer([world], [learner], rounds=6)
    losses = []
    for round_ in range(5):
        assert learner.imitates
        played = trainer.play_round()["pupil"]
        losses.append(played.update.policy_loss)
        ops = played.record.choices[..., Head.OP]
        assert np.isin(ops, [Op.WAIT, Op.GERMINATE, Op.FOSSILIZE]).all(), round_
        assert np.isin(played.record.germinated.sum(axis=(0, 2)), [1, 2]).all()
    assert losses[-1] < 0.3 * losses[0]
    assert not learner.imitates
    own = trainer.play_round()["pupil"].record
    assert own.germinated.sum() >= 5, "of 8 that the teacher plants at most"
    assert own.pruned.sum() <= 2
