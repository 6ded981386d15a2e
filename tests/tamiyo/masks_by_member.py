"""Action masks of one member after another: the slow reference of `compute_batch_masks`.

Small tensors written element by element for each member, then one `torch.stack` for each key; the benchmarks
measure the batched function against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.lifecycle.actions import Op
from esper.lifecycle.slot_states import AlphaMode, SlotConfig, SlotStates
from esper.lifecycle.stages import Stage
from esper.tamiyo.policy.action_masks import SlotMaskState

MIN_PRUNE_AGE = 5
BUSY = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)


def legal_ops(state: SlotMaskState | None, may_germinate: bool) -> list[Op]:
    """What may be done with one slot."""
    ops = [Op.WAIT]
    if state is None:
        return [*ops, Op.GERMINATE] if may_germinate else ops
    at_rest = state.alpha_mode == AlphaMode.HOLD
    if state.stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING):
        ops.append(Op.ADVANCE)
    if state.stage in (Stage.BLENDING, Stage.HOLDING) and at_rest:
        ops.append(Op.SET_ALPHA_TARGET)
    prunable = state.stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
    if prunable and at_rest and state.seed_age_epochs >= MIN_PRUNE_AGE:
        ops.append(Op.PRUNE)
    if state.stage == Stage.HOLDING:
        ops.append(Op.FOSSILIZE)
    return ops


def compute_action_masks(
    slot_states: list[SlotMaskState | None], slot_config: SlotConfig, device: str = "cpu"
) -> dict[str, Tensor]:
    """One member, one small tensor for each head."""
    slot = torch.zeros(slot_config.num_slots, dtype=torch.bool, device=device)
    slot_by_op = torch.zeros(len(Op), slot_config.num_slots, dtype=torch.bool, device=device)
    op = torch.zeros(len(Op), dtype=torch.bool, device=device)
    may_germinate = not any(s is not None and s.enabled and s.stage in BUSY for s in slot_states)
    for index, state in enumerate(slot_states):
        if state is None or state.enabled:
            slot[index] = True
            for legal in legal_ops(state, may_germinate):
                op[legal] = True
                slot_by_op[legal, index] = True
    blueprint = torch.zeros(16, dtype=torch.bool, device=device)
    for choice in range(1, 8):
        blueprint[choice] = True
    style = torch.zeros(4, dtype=torch.bool, device=device)
    alpha_target = torch.zeros(3, dtype=torch.bool, device=device)
    if op[Op.GERMINATE] or op[Op.SET_ALPHA_TARGET]:
        style[:] = True
        alpha_target[:] = True
    else:
        style[2] = True
        alpha_target[2] = True
    return {
        "slot": slot,
        "blueprint": blueprint,
        "style": style,
        "tempo": torch.ones(3, dtype=torch.bool, device=device),
        "alpha_target": alpha_target,
        "alpha_speed": torch.ones(4, dtype=torch.bool, device=device),
        "alpha_curve": torch.ones(5, dtype=torch.bool, device=device),
        "op": op,
        "slot_by_op": slot_by_op,
    }


def masks_one_by_one(
    batch_slot_states: list[list[SlotMaskState | None]], slot_config: SlotConfig, device: str = "cpu"
) -> dict[str, Tensor]:
    """The whole batch, as the review quotes it."""
    masks_list = [
        compute_action_masks(slot_states=slot_states, slot_config=slot_config, device=device)
        for slot_states in batch_slot_states
    ]
    return {key: torch.stack([m[key] for m in masks_list]) for key in masks_list[0]}


def to_mask_states(states: SlotStates) -> list[list[SlotMaskState | None]]:
    """The same population as per-slot Python objects; None is an empty, enabled slot."""
    columns = (states.stage, states.age, states.alpha_mode, states.enabled)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        [
            None if stage == Stage.DORMANT and enabled else SlotMaskState(stage, age, mode, enabled)
            for stage, age, mode, enabled in zip(*row, strict=True)
        ]
        for row in rows
    ]
