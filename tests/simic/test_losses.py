"""The PPO objective against a loop over members, steps and heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from esper.simic.agent.losses import approximate_kl, explained_variance, ppo_loss, standardize
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import Sequences
from esper.tamiyo.policy.network import PolicyOutput
from tests.simic.scenes import HEAD_SIZES, collect, evaluate, make_agent, prepared

HEADS = len(HEAD_SIZES)


def scalar_loss(output: PolicyOutput, batch: Sequences, clip: float) -> tuple[float, float]:
    """Policy loss and KL of the whole action, one number at a time."""
    surrogates: list[float] = []
    estimates: list[float] = []
    acting = 0
    for n in range(batch.valid.shape[0]):
        for t in range(batch.valid.shape[1]):
            if not batch.valid[n, t] or batch.steps.forced[n, t]:
                continue
            acting += bool(output.relevant[n, t].any())
            for h in range(HEADS):
                if output.relevant[n, t, h]:
                    shift = float(output.log_prob[n, t, h] - batch.steps.log_prob[n, t, h])
                    ratio, advantage = math.exp(shift), float(batch.advantages[n, t])
                    clipped = min(max(ratio, 1 - clip), 1 + clip)
                    surrogates.append(min(ratio * advantage, clipped * advantage))
                    estimates.append(ratio - 1 - shift)
    loss = -sum(surrogates) / max(acting, 1)
    whole = sum(estimates) / max(acting, 1)
    return loss, whole


def moved_batch(agent: PPOAgent, seed: int = 0) -> Sequences:
    """A rollout with forced steps, ragged rows, and weights that have moved since."""
    rollout = collect(agent, members=6, steps=8, seed=seed)
    batch = prepared(agent, rollout.buffer)
    generator = torch.Generator().manual_seed(seed)
    forced = torch.rand(6, 8, generator=generator) < 0.2
    valid = torch.arange(8) < torch.randint(1, 9, (6, 1), generator=generator)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return replace(batch, steps=replace(batch.steps, forced=forced), valid=valid)


def judge(agent: PPOAgent, batch: Sequences, seed: int = 0) -> PolicyOutput:
    """What the present weights say, as if the sampled ops had read a random part of the heads."""
    output = evaluate(agent, batch)
    read = torch.rand(output.relevant.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    return replace(output, relevant=read)


@pytest.mark.parametrize("seed", range(3))
def test_means_run_over_relevant_steps(seed: int) -> None:
    agent = make_agent(seed=seed, clip=0.1 * (seed + 1))
    batch = moved_batch(agent, seed)
    with torch.no_grad():
        output = judge(agent, batch, seed)
    terms = ppo_loss(output, batch, agent.config, 0.01)
    policy_loss, kl = scalar_loss(output, batch, agent.config.clip)
    assert terms.policy_loss.item() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert terms.kl.item() == pytest.approx(kl, rel=1e-4, abs=1e-6)


def test_a_head_without_relevant_steps_is_finite_and_has_no_gradient() -> None:
    agent = make_agent(recurrent=False)
    batch = moved_batch(agent)
    output = judge(agent, batch)
    output.relevant[..., 1] = False
    terms = ppo_loss(output, batch, agent.config, 0.01)
    assert terms.loss.isfinite()
    assert terms.kl.isfinite()
    assert terms.head_used.tolist() == [True, False, True]
    terms.loss.backward()
    gradient = agent.policy.heads.weight.grad.unflatten(0, (HEADS, max(HEAD_SIZES)))
    assert (gradient[1] == 0).all()
    assert (gradient[0] != 0).any()


def test_kl_is_exact_against_the_categorical_kl_in_expectation() -> None:
    """Many samples of two known distributions: the estimator's mean is their KL divergence."""
    old = torch.tensor([0.5, 0.3, 0.2])
    new = torch.tensor([0.4, 0.4, 0.2])
    actions = torch.multinomial(old, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    shift = (new.log() - old.log())[actions].view(-1, 1, 1)
    weight = torch.ones_like(shift, dtype=torch.bool)
    kl = approximate_kl(shift, weight)
    exact = (old * (old / new).log()).sum()
    assert kl.item() == pytest.approx(exact.item(), rel=0.02)


def test_an_imitator_raises_the_log_probability_of_what_was_done_whatever_it_earned() -> None:
    agent = make_agent(seed=2)
    batch = moved_batch(agent, seed=2)
    output = judge(agent, batch)
    terms = ppo_loss(output, batch, agent.config, 0.0, imitate=True)
    acting = batch.valid & ~batch.steps.forced
    read = output.relevant & acting.unsqueeze(-1)
    expected = -torch.where(read, output.log_prob, 0.0).sum() / read.any(-1).sum()
    torch.testing.assert_close(terms.policy_loss, expected.detach())
    assert float(terms.kl) == 0.0, "so that no early stop ends it"
    weights = torch.tensor([0.0, 3.0, 1.0, 0.5, 0.0, 1.5])
    terms = ppo_loss(output, replace(batch, weights=weights), agent.config, 0.0, imitate=True)
    weighed = torch.where(read, output.log_prob, 0.0).sum((1, 2)) @ weights
    torch.testing.assert_close(terms.policy_loss, -(weighed / read.any(-1).sum()).detach())


def test_a_floor_of_entropy_pushes_back_the_heads_that_are_below_it_alone() -> None:
    agent = make_agent(seed=1)
    batch = moved_batch(agent, seed=1)
    with torch.no_grad():
        output = judge(agent, batch)
    plain = ppo_loss(output, batch, agent.config, 0.01)
    for floor in (0.0, 0.5, 0.9, 0.99):
        config = agent.config.model_copy(update={"entropy_floor": floor})
        missing = sum(max(0.0, floor - float(entropy)) for entropy in plain.head_entropy)
        loss = ppo_loss(output, batch, config, 0.01).loss
        assert loss.item() == pytest.approx(plain.loss.item() + missing, abs=1e-5)
    assert missing > 0.0
    unread = replace(output, relevant=output.relevant & torch.tensor([True, False, True]))
    config = agent.config.model_copy(update={"entropy_floor": 0.99})
    two = ppo_loss(unread, batch, config, 0.01).loss - ppo_loss(unread, batch, agent.config, 0.01).loss
    assert two.item() == pytest.approx(
        sum(max(0.0, 0.99 - float(plain.head_entropy[h])) for h in (0, 2)), abs=1e-5
    )


def test_standardised_advantages_and_explained_variance() -> None:
    values = torch.randn(20, 30) * 7 + 3
    weight = torch.rand(20, 30) < 0.5
    normal = standardize(values, weight)
    assert normal[weight].mean().item() == pytest.approx(0, abs=1e-5)
    assert normal[weight].std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert not normal[~weight].any()
    assert explained_variance(values, values, weight).item() == pytest.approx(1, abs=1e-6)
    assert explained_variance(torch.zeros_like(values), values, weight).item() == pytest.approx(0, abs=1e-5)
    constant = standardize(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool))
    assert not constant.any()
