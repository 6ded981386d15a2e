"""Credit under refusals: the learner's own loss, summed over every course of a small world, against the exact
gradient of what that world pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.lifecycle.actions import RATE_HEAD, Actions, Blueprint, Head, Op, relevance
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.agent.losses import ppo_loss
from esper.simic.agent.rollout_buffer import Sequences, Transition
from esper.simic.config import PPOConfig
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.network import TamiyoInputs, TamiyoNet, TamiyoNetConfig
from esper.utils.rows import map_tensors
from tests.lifecycle.strategies import fits_of
from tests.scenes import plain_observation as observe
from tests.slots import SlotRecord, states_from_records

RULES = LifecycleConfig(max_seeds=2, min_prune_age=0, gates=GateConfig(training_epochs=1))
# Of the heads that an op reads beside its slot, style alone has two choices here: few courses, yet a branch.
OPEN = {Head.STYLE: 2}


@dataclass(frozen=True)
class World:
    """Two slots of one member, what is known of their seeds, and what an executed op pays at each step."""

    slots: SlotStates  # [1, 2]
    evidence: SlotEvidence  # [1, 2]
    pay: Tensor  # [T, ops, 2]
    rate_pay: Tensor | None = None  # [T, 2] for keeping and for doubling the rate, where it may be doubled


def masks_of(slots: SlotStates, rates: bool) -> ActionMasks:
    """By the states alone, so that a gate may refuse what is legal; one choice of most heads is left."""
    rate = torch.tensor([True, True, False, False]).expand(slots.num_members, -1) if rates else None
    masks = compute_batch_masks(slots, config=RULES, topology="mlp", rate=rate)
    few = {}
    for head in Head:
        if head not in (Head.SLOT, Head.OP):
            legal = masks.head(head)
            few[head.name.lower()] = legal & (legal.cumsum(1) <= OPEN.get(head, 1))
    return replace(masks, **few)


def legal_actions(masks: ActionMasks, row: int) -> list[list[int]]:
    """Everything that a member may sample; 0 for heads that its op does not read."""
    found = []
    for op in masks.op[row].nonzero().flatten().tolist():
        read = relevance(torch.tensor(op))
        choices = [
            torch.tensor([op]) if head is Head.OP
            else torch.tensor([0]) if not read[head]
            else (masks.slot_by_op[row, op] if head is Head.SLOT else masks.head(head)[row]).argwhere()[:, 0]
            for head in Head
        ]  # fmt: skip
        choices += [torch.arange(2)] if masks.rate is not None else []
        found += torch.cartesian_prod(*choices).reshape(-1, len(choices)).tolist()
    return found


def all_courses(world: World) -> Transition:
    """Every course that a world can take, one a row: breadth first.  # [M, T, ...]"""
    slots, evidence = world.slots, world.evidence
    columns: list[Transition] = []
    for t, pay in enumerate(world.pay):
        masks = masks_of(slots, world.rate_pay is not None)
        choices = [legal_actions(masks, row) for row in range(slots.num_members)]
        origin = torch.tensor([row for row, some in enumerate(choices) for _ in some])
        actions = torch.tensor([action for some in choices for action in some])
        pick = lambda record, rows=origin: map_tensors(lambda tensor: tensor[rows], record)  # noqa: E731
        columns = [pick(column, origin) for column in columns]
        seen = observe(slots, evidence, progress=torch.full((slots.num_members,), 0.5 * t))
        slots, evidence, masks = slots[origin], pick(evidence), pick(masks)
        outcome = apply(slots, Actions.of_columns(actions), evidence, RULES, fits_of(slots, "mlp"))
        nothing, no = torch.zeros(len(actions)), torch.zeros(len(actions), dtype=torch.bool)
        step = Transition(
            observation=pick(TamiyoInputs(*batch_obs_to_features(seen, world.rate_pay is not None))),
            masks=masks, actions=actions, log_prob=torch.zeros_like(actions, dtype=torch.float32),
            forced=(masks.op.sum(1) == 1) & (world.rate_pay is None), value=nothing,
            reward=pay[outcome.executed_op, actions[:, Head.SLOT] * outcome.succeeded]
            + (0.0 if world.rate_pay is None else world.rate_pay[t, actions[:, RATE_HEAD]]),
            terminated=no, truncated=no, bootstrap_value=nothing, reset=no,
        )  # fmt: skip
        columns.append(step)
        slots = tick(outcome.states, RULES).states
    return _side_by_side(columns)


def _side_by_side(records: list) -> Any:  # type: ignore[type-arg]
    """Records of [M, ...] as one of [M, T, ...]."""
    first = records[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.stack(records, dim=1)
    names = first.__dataclass_fields__
    return replace(first, **{name: _side_by_side([getattr(r, name) for r in records]) for name in names})


def gradients(world: World, seed: int, baseline: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The exact gradient of the expected return, and the loss's estimate of it."""
    torch.manual_seed(seed)
    net = TamiyoNet(TamiyoNetConfig(width=8, embedding=4), rates=world.rate_pay is not None)
    for head in (net.op_head, net.detail_heads, *([net.rate_head] if net.rates else [])):
        torch.nn.init.normal_(head.weight)  # away from uniform
    steps = all_courses(world)
    state = net.initial_state(len(steps.reward))
    output = net.sequence(steps.observation, steps.masks, state, steps.reset, actions=steps.actions)
    probability = output.log_prob.sum((1, 2)).exp()  # [M] of the whole course
    torch.testing.assert_close(probability.sum(), torch.ones(()))  # nothing was left out
    togo = steps.reward.flip(1).cumsum(1).flip(1)  # [M, T]
    parameters = list(net.parameters())
    exact = _flat(probability @ togo[:, 0], parameters)

    count = (~steps.forced).sum()  # the loss is a mean over these
    batch = Sequences(
        steps=replace(steps, log_prob=output.log_prob.detach()),
        valid=torch.ones_like(steps.forced),
        advantages=(togo - torch.tensor(baseline)) * probability.detach().unsqueeze(1) * count,
        returns=output.value.detach(),  # V has no error, and so no gradient
        weights=torch.ones(len(steps.reward)),
    )
    return exact, _flat(-ppo_loss(output, batch, PPOConfig(), 0.0).loss, parameters)


def _flat(value: Tensor, parameters: list[torch.nn.Parameter]) -> Tensor:
    parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(parameters, parts, strict=True)
        ]
    )


def seed_in(stage: Stage, epochs: int = 5) -> SlotRecord:
    alpha = 1.0 if stage is Stage.HOLDING else 0.0
    return SlotRecord(
        stage=stage, blueprint=Blueprint.MLP, alpha=alpha, alpha_target=1.0, age=9, epochs_in_stage=epochs
    )


def evidence_of(health: list[float], contribution: list[float]) -> SlotEvidence:
    """What the gates ask for."""
    unknown = SlotEvidence.unmeasured(1, 2)
    return unknown.replace(
        gradient_health=torch.tensor([health]), exploding=torch.zeros(1, 2),
        contribution=torch.tensor([contribution]),
    )  # fmt: skip


@settings(max_examples=16, deadline=None)
@given(
    stages=st.tuples(
        *[st.sampled_from([Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING])] * 2
    ),
    epochs=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    health=st.tuples(st.sampled_from([0.3, 1.0]), st.sampled_from([0.3, 1.0])),
    contribution=st.tuples(*[st.sampled_from([float("nan"), -1.0, 2.0])] * 2),
    seed=st.integers(0, 1000),
    baseline=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    rates=st.booleans(),
)
def test_the_loss_has_the_exact_policy_gradient_whatever_the_gates_refuse(
    stages: tuple[Stage, Stage],
    epochs: tuple[int, int],
    health: tuple[float, float],
    contribution: tuple[float, float],
    seed: int,
    baseline: tuple[float, float],
    rates: bool,
) -> None:
    """Two steps of a recurrent policy over the real rules; rewards follow from what was executed alone."""
    slots = states_from_records([[seed_in(s, e) for s, e in zip(stages, epochs, strict=True)]])
    draw = torch.Generator().manual_seed(seed)
    pay, rate_pay = torch.randn(2, len(Op), 2, generator=draw), torch.randn(2, 2, generator=draw)
    world = World(slots, evidence_of(list(health), list(contribution)), pay, rate_pay if rates else None)
    exact, estimate = gradients(world, seed, baseline)
    torch.testing.assert_close(estimate, exact, rtol=1e-3, atol=1e-5)
