"""Which choices of each head are legal, for all members at once.

A fixed number of tensor operations, whatever the number of members and slots. The rules themselves live
in `esper.lifecycle.legality`, where the executor finds them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import AlphaCurve, AlphaSpeed, AlphaTarget, Blueprint, Head, Op, Style, Tempo
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.legality import blueprint_table, fitting_in_time, legal_slots_by_op
from esper.lifecycle.slot_states import NO_BLUEPRINT, AlphaMode, SlotConfig, SlotEvidence, SlotStates
from esper.lifecycle.stages import SEED_STAGES, Stage
from esper.utils.devices import device_table
from esper.utils.rows import RowRecord

DEFAULT_RULES = LifecycleConfig()
OPEN_HEADS = {"tempo": Tempo, "alpha_speed": AlphaSpeed, "alpha_curve": AlphaCurve}


@dataclass(frozen=True)
class ActionMasks(RowRecord):
    """True = legal. Read, never write: a head that does not depend on the state shares one row."""

    slot: Tensor  # [N, S]: the enabled slots
    blueprint: Tensor  # [N, 16]
    style: Tensor  # [N, 4]
    tempo: Tensor  # [N, 3]
    alpha_target: Tensor  # [N, 3]
    alpha_speed: Tensor  # [N, 4]
    alpha_curve: Tensor  # [N, 5]
    op: Tensor  # [N, 6]
    slot_by_op: Tensor  # [N, 6, S]: the slots on which each op is legal
    rate: Tensor | None = None  # [N, 4]: None where the rate is not the controller's to set

    def head(self, head: Head) -> Tensor:
        """Return the mask of one head.  # [N, choices]"""
        return getattr(self, head.name.lower())


@dataclass(frozen=True)
class SlotMaskState:
    """What the masks need to know about one slot of one member, in plain Python; None is an empty slot."""

    stage: int = Stage.DORMANT
    seed_age_epochs: int = 0
    alpha_mode: int = AlphaMode.HOLD
    enabled: bool = True


EMPTY_SLOT = SlotMaskState()


def states_from_mask_states(batch_slot_states: Sequence[Sequence[SlotMaskState | None]]) -> SlotStates:
    """Convert per-slot Python objects, a list per member, to one struct of arrays."""
    widths = {len(slots) for slots in batch_slot_states}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(f"members have {sorted(widths)} slots; give all the same, None for an empty one")
    shape = len(batch_slot_states), widths.pop()
    flat = [slot or EMPTY_SLOT for slots in batch_slot_states for slot in slots]

    def array(values: Iterable[int], dtype: type) -> Tensor:
        return torch.from_numpy(np.fromiter(values, dtype, len(flat))).view(shape)

    stage = array((s.stage for s in flat), np.int64)
    grown = torch.isin(stage, torch.tensor(sorted(SEED_STAGES)))
    states = SlotStates.empty(*shape).replace(
        stage=stage,
        blueprint=torch.where(grown, int(Blueprint.NOOP), NO_BLUEPRINT),  # masks do not ask which
        age=array((s.seed_age_epochs for s in flat), np.int64),
        alpha_mode=array((s.alpha_mode for s in flat), np.int64),
        enabled=array((s.enabled for s in flat), np.bool_),
    )
    states.check()
    return states


@cache
def _constant_heads(device: torch.device, topology: str, num_members: int) -> dict[str, Tensor]:
    """Return the masks that do not depend on the state, as views of one row.  # each [N, choices]"""
    rows = {name: _all_open(device, len(choices)) for name, choices in OPEN_HEADS.items()}
    rows["blueprint"] = blueprint_table(device, topology)
    return {name: row.expand(num_members, -1) for name, row in rows.items()}


@device_table
def _all_open(choices: int) -> Tensor:
    return torch.ones(choices, dtype=torch.bool)


@device_table
def _only(choice: Style | AlphaTarget) -> Tensor:
    """Return the mask that leaves one choice.  # [choices]"""
    return torch.tensor([other is choice for other in type(choice)])


def compute_batch_masks(
    batch_slot_states: SlotStates | Sequence[Sequence[SlotMaskState | None]],
    slot_config: SlotConfig | None = None,
    config: LifecycleConfig = DEFAULT_RULES,
    topology: str = "cnn",
    device: torch.device | str | None = None,
    evidence: SlotEvidence | None = None,
    steps_left: int | Tensor | None = None,
    uses_metrics: Tensor | None = None,
    fits: Tensor | None = None,
    rate: Tensor | None = None,
) -> ActionMasks:
    """Compute the masks of every member.

    batch_slot_states: a `SlotStates`, or for each member a list of `SlotMaskState | None` in slot order.
    evidence, steps_left, uses_metrics: as in `legal_slots_by_op`; without evidence, what a gate may refuse is
    legal. fits [N, S, blueprints] bool: a seed may begin only where some blueprint fits and can be finished
    in time, and the blueprints are those of these slots. rate [N, rates] bool: of `legal_rates`.
    Raises ValueError where the slots differ from those of `slot_config`, or the topology is unknown.
    """
    states = batch_slot_states
    if not isinstance(states, SlotStates):
        states = states_from_mask_states(states)
    if device is not None:
        states = states.to(device)
    if slot_config is not None and slot_config.num_slots != states.num_slots:
        raise ValueError(
            f"the states have {states.num_slots} slots and slot_config has {slot_config.num_slots} "
            f"({', '.join(slot_config.slot_ids)}); give the slot_config of this host"
        )
    device = states.device
    if fits is not None:
        fits = fitting_in_time(fits, config, steps_left, uses_metrics)
    slot_by_op = legal_slots_by_op(states, config, evidence, steps_left, uses_metrics, fits)  # [N, ops, S]
    constant = _constant_heads(device, topology, states.num_members)
    if fits is not None:
        found = (slot_by_op[:, Op.GERMINATE].unsqueeze(2) & fits).any(dim=1)  # [N, blueprints]
        # Where nothing can begin the head is not read, but its mask may not be empty.
        blueprint = torch.where(found.any(dim=1, keepdim=True), found, constant["blueprint"])
        constant = {**constant, "blueprint": blueprint}
    op = slot_by_op.any(dim=2)
    # Style and target matter only to GERMINATE and SET_ALPHA_TARGET; otherwise one canonical choice is open.
    shapes_alpha = (op[:, Op.GERMINATE] | op[:, Op.SET_ALPHA_TARGET]).unsqueeze(1)  # [N, 1]
    return ActionMasks(
        slot=states.enabled,
        style=shapes_alpha | _only(device, Style.SIGMOID_ADD),
        alpha_target=shapes_alpha | _only(device, AlphaTarget.FULL),
        op=op,
        slot_by_op=slot_by_op,
        rate=rate,
        **constant,
    )
