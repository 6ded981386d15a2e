"""Tamiyo's network: a set of slots, one code path, op → slot → details."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from esper.lifecycle.actions import HEADS_READ, Head, Op, head_sizes
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, SLOT_FEATURE_SIZE, batch_obs_to_features
from esper.tamiyo.policy.network import PolicyOutput, TamiyoInputs, TamiyoNet, TamiyoNetConfig
from esper.utils.rows import map_tensors
from tests.scenes import random_observation

MEMBERS, STEPS = 12, 6


def make_net(seed: int = 0, **config: object) -> TamiyoNet:
    torch.manual_seed(seed)
    net = TamiyoNet(TamiyoNetConfig.model_validate({"width": 32, **config}))
    with torch.no_grad():  # louder heads than at birth, so that a wrong condition shows
        for head in (net.op_head, net.detail_heads):
            head.weight.mul_(100)
    return net


def scene(
    slots: int, seed: int = 0, members: int = MEMBERS, steps: int = STEPS
) -> tuple[TamiyoInputs, ActionMasks]:
    """Random rows of steps in the middle of growth.  # [N, T, ...]"""
    observation = random_observation(np.random.default_rng(seed), members * steps, slots)
    inputs = TamiyoInputs(*batch_obs_to_features(observation))
    masks = compute_batch_masks(observation.slots)
    return map_tensors(lambda t: t.unflatten(0, (members, steps)), inputs), map_tensors(
        lambda t: t.unflatten(0, (members, steps)), masks
    )


def no_resets(members: int = MEMBERS, steps: int = STEPS) -> Tensor:
    return torch.zeros(members, steps, dtype=torch.bool)


def draw(net: TamiyoNet, inputs: TamiyoInputs, masks: ActionMasks, seed: int = 0) -> PolicyOutput:
    members, steps = inputs.features.shape[:2]
    uniforms = torch.rand(members, steps, len(Head), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return net.sequence(
            inputs, masks, net.initial_state(members), no_resets(members, steps), uniforms=uniforms
        )


@pytest.mark.parametrize("slots", [1, 3, 9, 25])
def test_the_same_weights_run_with_any_number_of_slots_and_sample_only_legal_actions(slots: int) -> None:
    net = make_net()
    inputs, masks = scene(slots, seed=slots, members=64)
    output = draw(net, inputs, masks)
    assert not output.fault.any()
    sizes = head_sizes(slots)
    for member in range(64):
        for t in range(STEPS):
            action, op = output.actions[member, t], Op(int(output.actions[member, t, Head.OP]))
            assert masks.op[member, t, op]
            for head in Head:
                assert 0 <= action[head] < sizes[head]
                if head is Head.SLOT and head in HEADS_READ[op]:
                    assert masks.slot_by_op[member, t, op, action[head]]
                elif head in HEADS_READ[op]:
                    assert masks.head(head)[member, t, action[head]]


def test_log_probs_are_those_of_op_then_slot_then_details() -> None:
    """One member and one step at a time, with torch's Categorical."""
    net = make_net(3)
    inputs, masks = scene(5, seed=2)
    output = draw(net, inputs, masks)
    with torch.no_grad():
        seen = net._encode(inputs, net.initial_state(MEMBERS), no_resets())
        for member in range(MEMBERS):
            for t in range(STEPS):
                action, memory = output.actions[member, t], seen.memory[member, t]
                expected = torch.zeros(len(Head))

                def log_prob(logits: Tensor, legal: Tensor, choice: Tensor) -> Tensor:
                    return Categorical(logits=logits.masked_fill(~legal, -torch.inf)).log_prob(choice)

                op = action[Head.OP]
                expected[Head.OP] = log_prob(net.op_head(memory), masks.op[member, t], op)
                read = HEADS_READ[Op(int(op))]
                asked = torch.cat((memory, net.op_embedding(op)))
                if Head.SLOT in read:
                    keys = net.slot_key(seen.slots[member, t])
                    pointer = keys @ net.slot_query(asked) / net.config.width**0.5
                    expected[Head.SLOT] = log_prob(
                        pointer, masks.slot_by_op[member, t, op], action[Head.SLOT]
                    )
                    chosen = seen.slots[member, t, action[Head.SLOT]]
                    details = net.detail_heads(net.detail_encoder(torch.cat((asked, chosen)))).view(6, -1)
                for head in read - {Head.SLOT}:
                    legal = masks.head(head)[member, t]
                    logits = details[head - 1, : len(legal)]
                    expected[head] = log_prob(logits, legal, action[head])
                torch.testing.assert_close(output.log_prob[member, t], expected, atol=1e-4, rtol=1e-4)


def permute_slots(
    inputs: TamiyoInputs, masks: ActionMasks, order: Tensor
) -> tuple[TamiyoInputs, ActionMasks]:
    base, slots = inputs.features[..., :BASE_FEATURE_SIZE], inputs.features[..., BASE_FEATURE_SIZE:]
    slots = slots.unflatten(-1, (-1, SLOT_FEATURE_SIZE))[..., order, :].flatten(-2)
    moved = TamiyoInputs(torch.cat((base, slots), dim=-1), inputs.blueprints[..., order])
    return moved, replace(masks, slot=masks.slot[..., order], slot_by_op=masks.slot_by_op[..., order])


def test_permuting_the_slots_permutes_the_slot_choice_and_nothing_else() -> None:
    net = make_net(1)
    inputs, masks = scene(9, seed=4)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    moved_inputs, moved_masks = permute_slots(inputs, masks, order)
    output = draw(net, inputs, masks)
    actions = output.actions.clone()
    where = torch.empty(9, dtype=torch.long).scatter(
        0, order, torch.arange(9)
    )  # slot s now stands at where[s]
    actions[..., Head.SLOT] = where[actions[..., Head.SLOT]] * output.relevant[..., Head.SLOT]
    with torch.no_grad():
        moved = net.sequence(
            moved_inputs, moved_masks, net.initial_state(MEMBERS), no_resets(), actions=actions
        )
    for name in ("log_prob", "entropy", "value", "state"):
        torch.testing.assert_close(getattr(moved, name), getattr(output, name), atol=1e-4, rtol=1e-4)


def test_the_value_reads_no_action() -> None:
    net = make_net()
    inputs, masks = scene(3)
    first, second = draw(net, inputs, masks, seed=1), draw(net, inputs, masks, seed=2)
    assert not torch.equal(first.actions, second.actions)
    assert torch.equal(first.value, second.value)


def test_steps_and_sequence_agree_across_a_reset_in_the_middle() -> None:
    net = make_net()
    inputs, masks = scene(3)
    resets = no_resets()
    resets[:, 0] = True
    resets[::2, 3] = True
    state = torch.randn(MEMBERS, 2 * net.core.width)
    uniforms = torch.rand(MEMBERS, STEPS, len(Head))
    with torch.no_grad():
        steps, memory = [], state
        for t in range(STEPS):
            at = slice(t, t + 1)
            step = net.sequence(
                map_tensors(lambda x, at=at: x[:, at], inputs),
                map_tensors(lambda x, at=at: x[:, at], masks),
                memory,
                resets[:, at],
                uniforms=uniforms[:, at],
            )
            memory = step.state
            steps.append(step)
        actions = torch.cat([step.actions for step in steps], dim=1)
        whole = net.sequence(inputs, masks, state, resets, actions=actions)
    for name in ("log_prob", "value"):
        found = torch.cat([getattr(step, name) for step in steps], dim=1)
        torch.testing.assert_close(found, getattr(whole, name), atol=1e-5, rtol=1e-5)


def test_every_parameter_learns() -> None:
    net = make_net()
    inputs, masks = scene(3)
    actions = draw(net, inputs, masks).actions
    output = net.sequence(inputs, masks, net.initial_state(MEMBERS), no_resets(), actions=actions)
    (output.log_prob.sum() + output.entropy.sum() + output.value.sum()).backward()
    silent = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_forced_steps_are_those_with_a_single_legal_op() -> None:
    net = make_net()
    inputs, masks = scene(2)
    only_wait = masks.op.clone()
    only_wait[0, :, 1:] = False
    output = draw(net, inputs, replace(masks, op=only_wait))
    assert torch.equal(output.forced, only_wait.sum(-1) == 1)
    assert output.forced[0].all()
    assert (output.log_prob[0] == 0).all()


def test_an_empty_row_is_a_fault_of_its_member_and_head() -> None:
    net = make_net()
    inputs, masks = scene(3)
    nothing = masks.op.clone()
    nothing[5, 2] = False
    fault = draw(net, inputs, replace(masks, op=nothing)).fault
    assert fault.nonzero().tolist() == [[5, 2, Head.OP]]
    no_slot = masks.slot_by_op.clone()
    no_slot[7] = False
    only_germinate = torch.zeros_like(masks.op)
    only_germinate[..., Op.GERMINATE] = True
    spoiled = replace(
        masks, op=only_germinate, slot_by_op=no_slot | (torch.arange(MEMBERS) != 7).view(-1, 1, 1, 1)
    )
    fault = draw(net, inputs, spoiled).fault
    assert fault.nonzero().tolist() == [[7, t, Head.SLOT] for t in range(STEPS)]
