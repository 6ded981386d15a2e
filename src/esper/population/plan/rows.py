"""Choose the rows of work of a step from the slot states.

The slot states are read from the device once per epoch. A row is a member with an alpha for each slot. Up to
the first slot where its alphas differ from the member's own, a row would compute what the member's own row
computes; it starts there instead: it forks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import FIRST_GROWTH, STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import FORWARD_STAGES, Stage

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_ROW = NO_BLEND = -1
_FORWARD = np.isin(np.arange(max(Stage) + 1), [int(s) for s in FORWARD_STAGES])
_BLEND = np.array([int(STYLE_BLEND[style]) for style in Style])


@dataclass(frozen=True)
class SlotView:
    """The slots of all members on the host. Position 0 of a slot is its seed, the others were folded in."""

    alpha: Floats  # [N, S], 0 where the slot is not heard
    training: Bools  # [N, S] the seed trains in isolation
    frozen: Bools  # [N, S] the seed fades out and keeps its weights
    form: Ints  # [N, S, positions]
    blend: Ints  # [N, S, positions]
    part: Ints  # [N, S, positions] the row of weights there
    fold: Ints  # [N, S] the blend of a fossil that waits to be folded into the host, NO_BLEND elsewhere
    active: Bools  # [N] not finished
    member: Ints  # [N] indices into all members

    @staticmethod
    def read(states: SlotStates, form: Tensor, folded_blend: Tensor, flags: Tensor) -> tuple[SlotView, Ints]:
        """Read the slots in one copy from the device.

        form [N, S, positions]; folded_blend [N, S, positions - 1]; flags [N, S, 3]: the blend of a fossil
        that waits to be folded or -1, the blueprint of a seed that waits for weights or -1, whether the
        member is finished

        Returns the view and the blueprints that wait for weights [N, S].
        """
        positions = form.shape[2]
        # One tensor, because every copy from a GPU waits for all that was launched before it.
        slots = torch.stack([states.stage, states.style, states.alpha_mode, states.alpha], dim=2)
        packed = torch.cat([slots.double(), flags, form, folded_blend], dim=2).cpu().numpy()
        alpha, numbers = packed[..., 3].copy(), packed.astype(np.int64)
        stage, style, mode, _, folds, births, finished = np.moveaxis(numbers[..., :7], 2, 0)
        forms, blends = numbers[..., 7 : 7 + positions], numbers[..., 7 + positions :]
        # Clones and widenings are added, whatever their style.
        adds = forms[..., :1] >= FIRST_GROWTH
        own = np.where(adds, int(Blend.ADD), _BLEND[style][..., None])
        view = SlotView(
            alpha=np.where(_FORWARD[stage], alpha, 0.0),
            training=stage == Stage.TRAINING,
            frozen=mode == AlphaMode.DOWN,
            form=forms,
            blend=np.concatenate([own, blends], axis=2),
            part=np.moveaxis(np.arange(forms.size).reshape(positions, *stage.shape), 0, 2),
            fold=folds,
            active=finished[:, 0] == 0,
            member=np.arange(len(stage)),
        )
        return view, births

    def select(self, members: Ints) -> SlotView:
        """Return the view of some members, without the seeds of those that are finished.  # members [n]"""
        some = SlotView(**{name: value[members] for name, value in vars(self).items()})
        active = some.active[:, None]
        return replace(some, alpha=np.where(active, some.alpha, 0.0), training=some.training & active)

    @property
    def shape(self) -> tuple[int, int]:
        """Members and slots."""
        return self.alpha.shape[0], self.alpha.shape[1]


@dataclass(frozen=True)
class Rows:
    """Rows of work: the members' own rows first, in member order, then the others by their forks."""

    member: Ints  # [R]
    alpha: Floats  # [R, S]
    fork: Ints  # [R] the first slot where a row differs from its member's own, NO_ROW for own rows
    isolates: bool = False  # a row that forks trains the seed of that slot, and nothing else
    tables: tuple[Ints, ...] = ()  # each [N, S]: the rows whose results are wanted for each slot, or NO_ROW


def training_rows(view: SlotView) -> Rows:
    """Return every member's own row, then one row for each isolated seed with the alpha of that seed at 1."""
    rows = _own_and(view, view.training, np.ones(view.shape))
    return replace(rows, isolates=True, tables=())  # the results of single rows are not asked for


def measurement_rows(view: SlotView, ablate: bool = True) -> Rows:
    """Return every member's own row, then one row for each seed: without it if it is heard, else with it.

    Its tables: the row without the seed of each slot, and the row with it. An isolated seed is not heard, so
    no slot of a member asks for two rows and no subset of seeds occurs twice.
    """
    asked = ((view.alpha > 0) | view.training) & ablate
    rows = _own_and(view, asked, np.where(view.training, 1.0, 0.0))
    (row,) = rows.tables
    return replace(rows, tables=(np.where(view.training, NO_ROW, row), np.where(view.training, row, NO_ROW)))


def _own_and(view: SlotView, asked: Bools, alpha: Floats) -> Rows:
    """Return the own rows and one row for each slot that is asked for, with another alpha there.

    asked, alpha [N, S]. Row numbers follow from positions alone, so that any number of slots will do.
    """
    num_members = view.shape[0]
    slot, member = np.nonzero(asked.T)  # slot by slot: the order of the forks
    others = view.alpha[member]
    others[np.arange(len(member)), slot] = alpha[member, slot]
    row = np.full(view.shape, NO_ROW)
    row[member, slot] = num_members + np.arange(len(member))
    return Rows(
        member=np.concatenate([np.arange(num_members), member]),
        alpha=np.concatenate([view.alpha, others]),
        fork=np.concatenate([np.full(num_members, NO_ROW), slot]),
        tables=(row,),
    )


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy an array to the device without waiting for it."""
    packed = torch.as_tensor(array, dtype=dtype)
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed


def copy_to(target: Tensor, array: NDArray[Any]) -> None:
    """Write an array into a tensor on the device without waiting for it."""
    packed = torch.as_tensor(array, dtype=target.dtype)
    target.copy_(packed.pin_memory() if target.is_cuda else packed, non_blocking=True)
