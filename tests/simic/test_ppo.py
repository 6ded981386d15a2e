"""PPO: rollout and update agree, padding is silent, the early stop acts, faults are told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.simic.agent.ppo import PPOAgent
from tests.simic.scenes import collect, evaluate, make_agent, prepared


def parameters(agent: PPOAgent) -> Tensor:
    return torch.cat([p.detach().flatten() for p in agent.policy.parameters()])


def test_nothing_relevant_at_all_is_a_quiet_update() -> None:
    agent = make_agent()
    buffer = collect(agent).buffer
    buffer.get_batched_sequences().steps.forced.fill_(True)
    metrics = agent.update(buffer)
    assert metrics.policy_loss == 0
    assert metrics.kl == 0
    assert all(math.isnan(value) for value in metrics.head_entropy.values())


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_ratio_at_unchanged_weights_is_1_across_a_reset_in_the_middle(recurrent: bool) -> None:
    agent = make_agent(recurrent=recurrent)
    rollout = collect(agent, members=5, steps=9, reset_at=(0, 4))
    values = torch.stack([made.value for made in rollout.transitions], dim=1)
    batch = prepared(agent, rollout.buffer)
    with torch.no_grad():
        output = evaluate(agent, batch)
    assert ((output.log_prob - batch.steps.log_prob).exp() - 1).abs().max() < 1e-5
    torch.testing.assert_close(agent.value_normalizer.denormalize(output.value), values, atol=1e-5, rtol=1e-4)


def test_garbage_behind_the_end_of_a_row_changes_nothing() -> None:
    clean, spoiled = make_agent(), make_agent()
    buffers = []
    for agent in (clean, spoiled):
        rollout = collect(agent, members=4, steps=6)
        rollout.buffer.step_counts.copy_(torch.tensor([6, 3, 1, 0]))
        steps = rollout.buffer.get_batched_sequences().steps
        for n, count in enumerate((6, 3, 1)):
            steps.terminated[n, count - 1] = True
        buffers.append(rollout.buffer)
    steps = buffers[1].get_batched_sequences().steps
    for tensor in (steps.reward, steps.value, steps.log_prob, steps.observation.features):
        tensor[1, 3:] = 77.0
        tensor[3] = -55.0
    clean.update(buffers[0])
    spoiled.update(buffers[1])
    torch.testing.assert_close(parameters(clean), parameters(spoiled), atol=1e-6, rtol=1e-5)


def test_values_are_denormalized_before_gae_and_returns_normalized_by_the_same_scale() -> None:
    agent = make_agent(epochs=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rollout = collect(agent, members=8, steps=6)
        buffer = rollout.buffer
        steps = buffer.get_batched_sequences().steps
        steps.reward.copy_(50 + 20 * torch.randn(steps.reward.shape, generator=generator))
        count = agent.value_normalizer.count.item()
        expected = replace(buffer.get_batched_sequences())
        batch = prepared(agent, buffer)
        assert agent.value_normalizer.count.item() == count + 48  # once per rollout
        # what is learned is the return in units of the head
        torch.testing.assert_close(
            agent.value_normalizer.denormalize(batch.returns), buffer.returns, atol=1e-3, rtol=1e-4
        )
        with torch.no_grad():  # the head was rewritten with the scale: V in units of reward has not moved
            output = evaluate(agent, batch)
        torch.testing.assert_close(
            agent.value_normalizer.denormalize(output.value), expected.steps.value, atol=1e-2, rtol=1e-3
        )


def test_a_non_finite_row_changes_no_other_row() -> None:
    """A member whose reward is not a number is left out; the rest learn as if it were not there."""
    with_it, without = make_agent(minibatches=1), make_agent(minibatches=1)
    spoiled = collect(with_it, members=5, steps=6).buffer
    spoiled.get_batched_sequences().steps.reward[2] = float("nan")
    absent = collect(without, members=5, steps=6).buffer
    absent.step_counts[2] = 0
    metrics = with_it.update(spoiled)
    without.update(absent)
    assert metrics.steps_dropped == 6
    assert metrics.steps_learned == 24
    assert with_it.value_normalizer.count == 24
    torch.testing.assert_close(parameters(with_it), parameters(without), atol=1e-6, rtol=1e-5)


def test_the_early_stop_acts_before_the_step_that_it_would_veto() -> None:
    agent = make_agent(learning_rate=0.03, target_kl=1e-4, epochs=5, minibatches=1)
    buffer = collect(agent, members=8, steps=8).buffer
    metrics = agent.update(buffer)
    assert metrics.epochs_done == 1  # the first step is free (KL 0); the second look vetoes
    reference = make_agent(learning_rate=0.03, target_kl=None, epochs=1, minibatches=1)
    reference.update(collect(reference, members=8, steps=8).buffer)
    torch.testing.assert_close(parameters(agent), parameters(reference), rtol=0, atol=0)


def test_leaving_the_loop_and_running_no_ops_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the loop is left; on a device the remaining steps are refused. Same weights, same report."""
    config = {"learning_rate": 0.01, "target_kl": 2e-3, "epochs": 5, "minibatches": 2}
    leaves, refuses = make_agent(**config), make_agent(**config)
    monkeypatch.setattr(refuses, "_may_read", False)
    reports = [agent.update(collect(agent, members=8, steps=8).buffer) for agent in (leaves, refuses)]
    assert 0 < reports[0].epochs_done < 5
    assert reports[0] == reports[1]
    for name, tensor in leaves.state_dict().items():
        assert torch.equal(tensor, refuses.state_dict()[name]), name


def test_a_non_finite_gradient_vetoes_its_step() -> None:
    agent = make_agent(minibatches=1, epochs=2)
    buffer = collect(agent).buffer
    buffer.get_batched_sequences().steps.log_prob[0, 0] = -float("inf")
    before = agent.state_dict()
    metrics = agent.update(buffer)
    assert metrics.epochs_done == 0
    assert metrics.steps_vetoed == 2
    for name, tensor in agent.state_dict().items():
        if name.startswith("optimizer"):
            assert torch.equal(tensor, before[name])
        assert tensor.isfinite().all()


def test_an_all_masked_row_raises_in_the_update() -> None:
    agent = make_agent(minibatches=1)
    rollout = collect(agent, members=4, steps=3)
    rollout.buffer.get_batched_sequences().steps.masks.legal[3, 1, 2] = False
    before = [p.detach().clone() for p in agent.policy.heads.parameters()]
    with pytest.raises(ValueError, match="member 3, head 'head 2' has no legal choice"):
        agent.update(rollout.buffer)
    assert all(map(torch.equal, agent.policy.heads.parameters(), before))


def test_a_buffer_with_an_open_row_changes_nothing_and_hides_no_later_update() -> None:
    agent = make_agent(minibatches=1)
    buffer = collect(agent, members=4, steps=3).buffer
    steps = buffer.get_batched_sequences().steps
    steps.terminated[1], steps.masks.legal[3, 1, 2] = False, False
    before = agent.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(ValueError, match="the row of member 1 ends in neither"):
        agent.update(buffer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())
    agent.update(collect(agent, members=4, steps=3).buffer)


def test_the_entropy_coefficient_anneals() -> None:
    agent = make_agent(entropy_start=0.05, entropy_end=0.01, entropy_updates=4)
    found = []
    for _ in range(6):
        found.append(agent.entropy_coefficient)
        agent.update(collect(agent, members=2, steps=2).buffer)
    assert found == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01, 0.01])


@pytest.mark.parametrize(("members", "minibatches"), [(4, 3), (4, 7), (9, 3), (9, 4)])
def test_minibatches_are_whole_rows_and_every_row_is_seen_once_per_epoch(
    members: int, minibatches: int
) -> None:
    agent, parts = make_agent(minibatches=minibatches, epochs=2), min(minibatches, members)
    drawn = [rows.tolist() for rows in agent._minibatches(members) if rows is not None]
    assert len(drawn) == 2 * parts
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1
    for epoch in (drawn[:parts], drawn[parts:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(members))
    assert drawn[:parts] != drawn[parts:]


def test_equal_seeds_give_equal_bits_and_a_checkpoint_goes_on_as_if_nothing_had_happened() -> None:
    config = {"minibatches": 2}
    whole = make_agent(seed=1, **config)
    part = make_agent(seed=1, **config)
    for agent in (whole, part):
        for seed in range(2):
            agent.update(collect(agent, seed=seed).buffer)
    saved = part.state_dict()
    assert all(isinstance(tensor, Tensor) for tensor in saved.values())
    resumed = make_agent(seed=7, **config)
    resumed.load_state_dict(saved)
    for agent in (whole, resumed):
        agent.update(collect(agent, seed=5).buffer)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_state_of_another_network_is_refused_before_anything_changes() -> None:
    agent, other = make_agent(recurrent=True), make_agent(recurrent=False)
    before = agent.state_dict()
    with pytest.raises(ValueError, match="lacks"):
        agent.load_state_dict(other.state_dict())
    wrong = before | {"policy.value_head.weight": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=r"policy.value_head.weight of the agent's state is .* \(1, 3\)"):
        agent.load_state_dict(wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())
