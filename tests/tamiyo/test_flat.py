"""The plain policy: any sizes of heads, masks, memory on demand."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from esper.tamiyo.policy.flat import FlatMasks, FlatObservation, FlatPolicy, FlatPolicyConfig, padded_choices

SIZES = (2, 5, 3)
ROWS, STEPS, FEATURES = 6, 4, 7


def scene(recurrent: bool) -> tuple[FlatPolicy, FlatObservation, FlatMasks, torch.Tensor]:
    torch.manual_seed(0)
    policy = FlatPolicy(FEATURES, SIZES, FlatPolicyConfig(width=16, recurrent=recurrent))
    with torch.no_grad():
        policy.heads.weight.mul_(100)
    masks = FlatMasks(padded_choices(SIZES).expand(ROWS, STEPS, -1, -1))
    resets = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    return policy, FlatObservation(torch.randn(ROWS, STEPS, FEATURES)), masks, resets


def test_padded_choices_are_the_sizes_of_the_heads() -> None:
    assert padded_choices(SIZES).sum(-1).tolist() == list(SIZES)
    assert padded_choices(SIZES).shape == (3, 5)


@pytest.mark.parametrize("recurrent", [False, True])
def test_log_probs_are_those_of_independent_categoricals(recurrent: bool) -> None:
    policy, observation, masks, resets = scene(recurrent)
    state = policy.initial_state(ROWS)
    with torch.no_grad():
        output = policy.sequence(observation, masks, state, resets, uniforms=torch.rand(ROWS, STEPS, 3))
        memory, _ = policy._remember(observation, state, resets)
        logits = policy.heads(memory).unflatten(-1, (3, 5))
    for head, size in enumerate(SIZES):
        reference = Categorical(logits=logits[..., head, :size])
        assert (output.actions[..., head] < size).all()
        expected = reference.log_prob(output.actions[..., head])
        torch.testing.assert_close(output.log_prob[..., head], expected, atol=1e-5, rtol=1e-4)
    assert output.relevant.all()
    assert not output.forced.any()
    assert output.value.shape == (ROWS, STEPS)


def test_a_step_is_forced_when_no_head_has_a_choice() -> None:
    policy, observation, masks, resets = scene(recurrent=False)
    single = masks.legal.clone()
    single[0, 0] = False
    single[0, 0, :, 0] = True
    output = policy.sequence(observation, FlatMasks(single), policy.initial_state(ROWS), resets)
    assert output.forced[0, 0]
    assert output.forced.sum() == 1
    assert (output.log_prob[0, 0] == 0).all()


def test_without_memory_the_state_is_empty_and_the_order_of_steps_is_nothing() -> None:
    policy, observation, _, resets = scene(recurrent=False)
    assert policy.initial_state(ROWS).shape == (ROWS, 0)
    backwards = FlatObservation(observation.features.flip(1))
    first = policy.value(observation, policy.initial_state(ROWS), resets)
    second = policy.value(backwards, policy.initial_state(ROWS), resets)
    torch.testing.assert_close(first, second.flip(1))
    with_memory, observation, _, resets = scene(recurrent=True)
    state = with_memory.initial_state(ROWS)
    assert not torch.allclose(
        with_memory.value(observation, state, resets), with_memory.value(backwards, state, resets).flip(1)
    )


def test_a_floor_that_the_widest_head_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="5 choices cannot all have"):
        FlatPolicy(FEATURES, SIZES, FlatPolicyConfig(floor=0.25))
