"""The alpha controller: how the strength of a seed moves from one value to another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.lifecycle.actions import AlphaCurve
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.utils.devices import lookup

# The steepness of each sigmoid curve; the other curves have none.
SIGMOID_STEEPNESS: dict[AlphaCurve, float] = {
    AlphaCurve.SIGMOID_GENTLE: 6.0,
    AlphaCurve.SIGMOID: 12.0,
    AlphaCurve.SIGMOID_SHARP: 24.0,
}
_steepness = lookup([SIGMOID_STEEPNESS.get(curve, 1.0) for curve in AlphaCurve])


def ease(curve: Tensor, t: Tensor) -> Tensor:
    """How far along a ramp is at the share t of its time, 0 at 0 and 1 at 1.

    curve int64 and t float32 of one shape. LINEAR: t; COSINE: ½(1 − cos πt); sigmoids of steepness k:
    (σ(k(t − ½)) − σ(−k/2)) / (σ(k/2) − σ(−k/2)), here as ½ + ½·tanh(k(t − ½)/2) / tanh(k/4), which is the
    same and, unlike torch's sigmoid, gives a member the same bits beside any number of others.
    """
    k = _steepness(curve)
    eased = 0.5 + 0.5 * torch.tanh(0.5 * k * (t - 0.5)) / torch.tanh(0.25 * k)
    eased = torch.where(curve == AlphaCurve.LINEAR, t, eased)
    return torch.where(curve == AlphaCurve.COSINE, 0.5 * (1.0 - torch.cos(math.pi * t)), eased)


def retarget(states: SlotStates, where: Tensor, target: Tensor, ticks: Tensor, curve: Tensor) -> SlotStates:
    """Begin a ramp from the present alpha to `target` in `ticks` steps, where `where` is True.

    `where` [N, S] bool; the others broadcast to it. No ticks, or no way to go, snaps and stays at rest.
    Whether a slot may be retargeted is a question of legality and is settled before this call.
    """
    here = (ticks == 0) | (target == states.alpha)
    snapped = torch.where(here, target, states.alpha)
    mode = torch.where(target > states.alpha, int(AlphaMode.UP), int(AlphaMode.DOWN)).masked_fill(
        here, int(AlphaMode.HOLD)
    )
    return states.replace(
        alpha=torch.where(where, snapped, states.alpha),
        alpha_start=torch.where(where, snapped, states.alpha_start),
        alpha_target=torch.where(where, target, states.alpha_target),
        alpha_mode=torch.where(where, mode, states.alpha_mode),
        alpha_curve=torch.where(where, curve, states.alpha_curve),
        alpha_steps_total=torch.where(
            where, ticks.expand_as(here).masked_fill(here, 0), states.alpha_steps_total
        ),
        alpha_steps_done=states.alpha_steps_done.masked_fill(where, 0),
    )


def advance_alpha(states: SlotStates) -> SlotStates:
    """One tick of every ramp; a ramp that is through rests exactly on its target."""
    moving = states.alpha_mode != AlphaMode.HOLD
    done = states.alpha_steps_done + moving
    arrived = moving & (done >= states.alpha_steps_total)
    share = done / states.alpha_steps_total.clamp(min=1)
    rise = states.alpha_target - states.alpha_start
    alpha = (states.alpha_start + rise * ease(states.alpha_curve, share)).clamp(0.0, 1.0)
    alpha = torch.where(moving, alpha, states.alpha)
    return states.replace(
        alpha=torch.where(arrived, states.alpha_target, alpha),
        alpha_mode=states.alpha_mode.masked_fill(arrived, int(AlphaMode.HOLD)),
        alpha_steps_done=done,
    )
