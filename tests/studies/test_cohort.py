"""Agents that learn side by side learn what each would learn alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Head, Op
from esper.simic.agent.ppo import PPOConfig
from esper.simic.baseline import returns_to_go
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import play
from esper.tamiyo.controllers import Scene, Static
from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, SLOT_FEATURE_SIZE, column_slice
from esper.tamiyo.policy.network import TamiyoNetConfig, relevance
from studies.cohort import Cohort
from studies.variants import PROBES, VARIANTS, Pupil
from tests.simic.test_sync import Waits
from tests.simic.worlds import make_spec

STEPS = 6
SPEC = replace(make_spec(members=(3, 4, 5), steps=STEPS), gamma=1.0)
PPO = PPOConfig(gamma=1.0, epochs=2, minibatches=2, learning_rate=3e-3, target_kl=None)
POLICY = TamiyoNetConfig(width=16, embedding=4)


def make_pupil(name: str, ppo: PPOConfig = PPO) -> Pupil:
    variant = VARIANTS[name.rpartition("-")[0]]
    return Pupil(name, variant.agent(int(name[-1]), ppo, POLICY, "cpu"), variant, STEPS)


@pytest.fixture(scope="module")
def cohort() -> Cohort:
    """One round of every variant."""
    cohort = Cohort(SPEC, {name: make_pupil(name) for name in [f"{v}-0" for v in VARIANTS] + ["main-1"]})
    cohort.play_round(episode=2)
    return cohort


def steps_of(cohort: Cohort, name: str):  # type: ignore[no-untyped-def]
    return cohort.pupils[name].buffer.get_batched_sequences().steps


@pytest.mark.parametrize("name", ["main-1", "sparse_reward-0", "no_twin-0"])
def test_a_pupil_learns_what_it_would_learn_alone(cohort: Cohort, name: str) -> None:
    alone, world = make_pupil(name), GrowthEnvironment(SPEC)
    twins = play(world, Static(), episode=2)
    if alone.variant.beyond_twin:
        alone.expect(torch.from_numpy(twins.reward))
    play(world, alone, episode=2, on_step=alone.remember)
    alone.agent.update(alone.buffer)
    together = steps_of(cohort, name)
    torch.testing.assert_close(
        together.actions, alone.buffer.get_batched_sequences().steps.actions, rtol=0, atol=0
    )
    learned = cohort.pupils[name].agent.state_dict()
    for key, tensor in alone.agent.state_dict().items():
        torch.testing.assert_close(learned[key], tensor, rtol=1e-3, atol=1e-4)


def test_pupils_do_not_share_their_dice(cohort: Cohort) -> None:
    """Same weights and same members, and so the same first observation, yet other choices."""
    main, sparse = steps_of(cohort, "main-0"), steps_of(cohort, "sparse_reward-0")
    assert torch.equal(main.observation.features[:, 0], sparse.observation.features[:, 0])
    torch.testing.assert_close(main.value[:, 0], sparse.value[:, 0])
    assert not torch.equal(main.actions, sparse.actions)


def test_without_memory_every_step_is_a_reset(cohort: Cohort) -> None:
    assert steps_of(cohort, "no_memory-0").reset.all()
    assert steps_of(cohort, "main-0").reset.sum(1).tolist() == [1, 1, 1]


def test_without_shadow_gain_it_reads_as_unmeasured(cohort: Cohort) -> None:
    def shadow_gain(name: str) -> torch.Tensor:
        features = steps_of(cohort, name).observation.features[..., BASE_FEATURE_SIZE:]
        return features.unflatten(-1, (-1, SLOT_FEATURE_SIZE))[..., column_slice("shadow_gain")]

    assert (shadow_gain("no_shadow_gain-0") == -2).all()
    assert any((shadow_gain(name) > -2).any() for name in ("main-0", "main-1", "sparse_reward-0"))


def test_sparse_reward_is_all_paid_at_the_end() -> None:
    dense, sparse = make_pupil("main-0"), make_pupil("sparse_reward-0")
    sparse.name = dense.name  # the same dice, so the same episode
    for pupil in (dense, sparse):
        play(GrowthEnvironment(SPEC), pupil, episode=0, on_step=pupil.remember)
    paid = sparse.buffer.get_batched_sequences().steps.reward
    assert (paid[:, :-1] == 0).all()
    earned = dense.buffer.get_batched_sequences().steps.reward.sum(1)
    torch.testing.assert_close(paid[:, -1], earned, rtol=1e-5, atol=1e-6)


def test_deferred_pay_keeps_a_discounted_return() -> None:
    pupil = make_pupil("sparse_reward-0", PPO.model_copy(update={"gamma": 0.9}))
    play(GrowthEnvironment(replace(SPEC, gamma=0.9)), pupil, episode=0, on_step=pupil.remember)
    dense = make_pupil("main-0", pupil.agent.config)
    dense.name = pupil.name
    play(GrowthEnvironment(replace(SPEC, gamma=0.9)), dense, episode=0, on_step=dense.remember)
    first = [
        returns_to_go(p.buffer.get_batched_sequences().steps.reward.numpy().T, 0.9)[0] for p in (pupil, dense)
    ]
    np.testing.assert_allclose(*first, rtol=1e-4, atol=1e-6)


def test_without_causal_masks_every_head_is_judged_and_with_them_those_that_the_op_reads(
    cohort: Cohort,
) -> None:
    assert (steps_of(cohort, "no_causal_masks-0").log_prob != 0).any(dim=(0, 1)).all()
    main = steps_of(cohort, "main-0")
    assert not main.log_prob[~relevance(main.actions[..., Head.OP])].any()


def test_a_patient_policy_differs_by_the_bias_of_its_ops_alone() -> None:
    patient, hasty = (make_pupil(name).agent.policy.state_dict() for name in ("main-0", "no_patience-0"))
    assert [name for name in hasty if not torch.equal(patient[name], hasty[name])] == ["op_head.bias"]
    assert patient["op_head.bias"].argmax() == Op.ADVANCE
    assert patient["op_head.bias"].argmin() == Op.PRUNE


def test_a_probe_learns_by_other_settings() -> None:
    agent = PROBES["probe_fast"].agent(0, PPO, POLICY, "cpu")
    assert agent.config == PPO.model_copy(update={"learning_rate": agent.config.learning_rate})
    assert agent.config.learning_rate > PPO.learning_rate


def test_a_row_tells_what_an_agent_did(cohort: Cohort) -> None:
    rows = cohort.play_round(episode=3)
    assert list(rows) == list(cohort.pupils)
    for row in rows.values():
        assert sum(row["ops"].values()) == pytest.approx(1)
        assert sum(row["blueprints"].values()) == pytest.approx(row["seeds"])
        assert row["return"] - row["above_twin"] == pytest.approx(
            rows["main-0"]["return"] - rows["main-0"]["above_twin"]
        )


@pytest.mark.parametrize("name", ["main-0", "no_twin-0"])
def test_the_baseline_is_the_critic_and_the_twin_where_it_is_left_out(cohort: Cohort, name: str) -> None:
    """Whatever the baseline explains is missing from the variance of the advantages."""
    row = cohort.play_round(episode=5)[name]
    buffer = cohort.pupils[name].buffer
    buffer.compute_advantages_and_returns(gamma=1.0, lam=1.0)
    left = buffer.advantages.double().var(correction=0)
    paid = buffer.get_batched_sequences().steps.reward.numpy().T
    twins = play(GrowthEnvironment(SPEC), Static(), episode=5).reward if name == "main-0" else 0.0
    returns = returns_to_go(paid + twins, 1.0)
    assert row["explained_by_baseline"] == pytest.approx(1 - float(left) / returns.var(), rel=1e-3)


def test_deciding_and_teaching_read_nothing_back(cohort: Cohort) -> None:
    world, blocks = cohort.environment, cohort.blocks
    observation = world.reset(4)
    blocks.begin(Scene(world.members, world.num_slots, world.spec.seed, world.device, 4))
    masks = world.masks()
    with Waits() as deciding:
        actions = blocks.decide(observation, masks, 0)
    result = world.step(actions)
    with Waits() as teaching:
        cohort.teach(result)
    assert deciding.found + teaching.found == []


def test_returns_to_go() -> None:
    np.testing.assert_allclose(returns_to_go(np.array([[1.0], [2.0], [4.0]]), 0.5)[:, 0], [3.0, 4.0, 4.0])
