"""What Tamiyo observes, and its features: one named table of columns, one pass over all members and slots.

`COLUMNS` is the single source of the layout, the ranges, the sentinels, the docs and the checkpoint
contract. A column's value is `extract(...) / divisor`, clamped to [low, high]; what was never measured is
NaN on the way in and the column's own sentinel, outside [low, high], on the way out. Extractors use only
functions that give a member the same bits in any batch (torch's pow and sigmoid do not).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from esper.lifecycle.actions import SPEED_TICKS, TEMPO_TICKS, Op, Style, tempo_ticks
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.rates import MOST_SCALE
from esper.lifecycle.slot_states import AlphaMode, SlotEvidence, SlotStates
from esper.lifecycle.stages import STAGE_TABLE_SIZE, Stage
from esper.utils.devices import device_table, lookup
from esper.utils.rows import RowRecord

HISTORY_LENGTH = 5


@dataclass(frozen=True)
class TrainingObservation(RowRecord):
    """What a controller that sets the learning rate sees besides; each [N] float, NaN = unmeasured."""

    scale: Tensor  # learning rate over that of the recipe
    falling: Tensor  # 1 where the rate falls to 0, else 0
    loss: Tensor  # training loss of the last epoch
    previous_loss: Tensor  # and of the one before it
    chance_loss: Tensor  # of a network that has learned nothing: ln(classes)
    passes: Tensor  # over the training data so far
    samples: Tensor  # to train on
    updates: Tensor  # minibatches of the bare host that the whole budget pays for


@dataclass(frozen=True)
class Observation(RowRecord):
    """One decision step of N members. NaN stands for what has not been measured."""

    progress: Tensor  # [N] float: share of the budget that is spent, 0..1
    step_cost: Tensor  # [N] float: training FLOPs of a step now over those of the bare host, at least 1
    steps_left: Tensor  # [N] float: how many steps the rest of the budget pays for at this cost
    val_loss: Tensor  # [N] float
    val_accuracy: Tensor  # [N] float: a fraction, 0..1
    loss_history: Tensor  # [N, 5] float: the last losses, oldest first
    accuracy_history: Tensor  # [N, 5] float: the last accuracies, oldest first
    parameter_ratio: Tensor  # [N] float: all parameters over the host's own, at least 1
    last_succeeded: Tensor  # [N] bool
    last_op: Tensor  # [N] int64: -1 before the first action
    slots: SlotStates
    evidence: SlotEvidence
    training: TrainingObservation | None = None  # with `episode.rates`

    @property
    def num_members(self) -> int:
        """Return N."""
        return self.slots.num_members

    @property
    def num_slots(self) -> int:
        """Return S."""
        return self.slots.num_slots


LOSS_SCALE = 7.0  # symlog of a loss of about 1,100
GRADIENT_SCALE = 7.0
RATIO_SCALE = 4.0  # ln of a network 55 times its host
POINTS_SCALE = math.log1p(100.0)  # percentage points end at 100
BUDGET_SCALE = math.log1p(1000.0)  # steps of a generous budget
ROOM_SCALE = math.log1p(8.0)
CLOCK_SCALE = math.log1p(150.0)  # ticks of a long episode
RAMP_SCALE = float(max(*TEMPO_TICKS.values(), *SPEED_TICKS.values()))  # ticks of the longest ramp
COUNT_SCALE = math.log1p(1e6)  # samples, minibatches
FRESHNESS_DECAY = 0.995  # per tick since the measurement
SHARED_STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)

NAN = float("nan")
Block = Literal["base", "rate", "slot"]


@dataclass(frozen=True)
class FeatureInputs:
    """An observation with what several columns need, worked out once."""

    observation: Observation
    slots: SlotStates  # of the observation
    evidence: SlotEvidence  # of the observation
    occupied: Tensor  # [N, S] bool
    ticks_left: Tensor  # [N, S] int64: of the ramp under way, 0 at rest

    @staticmethod
    def of(observation: Observation) -> FeatureInputs:
        """Work out what several columns share."""
        slots = observation.slots
        moving = slots.alpha_mode != AlphaMode.HOLD
        ticks_left = (slots.alpha_steps_total - slots.alpha_steps_done) * moving
        return FeatureInputs(observation, slots, observation.evidence, holds_seed(slots), ticks_left)

    @cached_property
    def training(self) -> TrainingObservation:
        """Return that of the observation; NaN, which is unknown, where the rate is not the controller's."""
        shape = len(fields(TrainingObservation)), self.slots.num_members
        unknown = torch.full(shape, NAN, device=self.slots.device)
        return self.observation.training or TrainingObservation(*unknown)

    def of_seed(self, value: Tensor) -> Tensor:
        """Return NaN, which is unknown, where there is no seed."""
        return torch.where(self.occupied, value, NAN)


Extract = Callable[[FeatureInputs], Tensor]


@dataclass(frozen=True)
class Column:
    """One named quantity: what it is, where it may lie, and how "unknown" reads."""

    name: str
    block: Block
    formula: str  # the numerator, in words
    extract: Extract  # [N] or [N, S], with a trailing width where width > 1
    low: float = 0.0  # the least measured value
    high: float = 1.0
    unknown: float | None = -1.0  # None: always known
    divisor: float = 1.0
    width: int = 1

    @property
    def range(self) -> tuple[float, float]:
        """Return where every value lies, the sentinel included."""
        return (self.low if self.unknown is None else self.unknown, self.high)

    def contract(self) -> dict[str, str | int | float | None]:
        """Return everything that a trained policy relies on, as plain values."""
        return {
            "name": self.name,
            "block": self.block,
            "width": self.width,
            "formula": self.formula if self.divisor == 1.0 else f"{self.formula} / {self.divisor:.4g}",
            "low": self.low,
            "high": self.high,
            "unknown": self.unknown,
        }


def _symlog(x: Tensor) -> Tensor:
    """Compute sign(x) · ln(1 + |x|)."""
    return x.sign() * x.abs().log1p()


def _one_hot(choices: Sequence[int], size: int) -> Callable[[Tensor], Tensor]:
    """Make a one-hot lookup of numbers below `size`; all 0 for one that is none of the choices."""
    return lookup([[float(number == choice) for choice in choices] for number in range(size)])


_stage_one_hot = _one_hot(sorted(Stage), STAGE_TABLE_SIZE)  # [...] → [..., 10]
_shared_one_hot = _one_hot(SHARED_STAGES, STAGE_TABLE_SIZE)  # [...] → [..., 4]
_style_one_hot = _one_hot(tuple(Style), len(Style) + 1)  # [...] → [..., 4]; the last row: a slot with no seed


_sign_of_mode = lookup([{AlphaMode.UP: 1.0, AlphaMode.DOWN: -1.0}.get(mode, 0.0) for mode in AlphaMode])


def _stage_shares(seen: FeatureInputs) -> Tensor:
    """Return the shares of enabled slots in `SHARED_STAGES`.  # [N, 4]"""
    slots = seen.slots
    # Disabled slots count as UNKNOWN, which is none of the shared stages.
    stage = torch.where(slots.enabled, slots.stage, int(Stage.UNKNOWN))
    counts = _shared_one_hot(stage).sum(dim=1)
    return counts / slots.enabled.sum(dim=1, keepdim=True).clamp(min=1)


def _signed(
    name: str, block: Block, formula: str, extract: Extract, divisor: float = 1.0, width: int = 1
) -> Column:
    """Make a column from -1 to 1; its sentinel is -2, since -1 may have been measured."""
    return Column(name, block, formula, extract, -1.0, 1.0, -2.0, divisor, width)


def _in_layout_order(*columns: Column) -> tuple[Column, ...]:
    """Order the columns of a block: single ones first, so that one stack takes them."""
    return tuple(sorted(columns, key=lambda column: column.width > 1))


BASE_COLUMNS = _in_layout_order(
    Column("progress", "base", "share of the budget that is spent", lambda s: s.observation.progress),
    Column("step_cost", "base", "ln(FLOPs of a step / those of the bare host)",
           lambda s: s.observation.step_cost.log(), divisor=RATIO_SCALE),
    Column("steps_left", "base", "ln(1 + steps that the rest of the budget pays for)",
           lambda s: s.observation.steps_left.log1p(), divisor=BUDGET_SCALE),
    _signed("val_loss", "base", "symlog(validation loss)", lambda s: _symlog(s.observation.val_loss),
            divisor=LOSS_SCALE),
    Column("val_accuracy", "base", "validation accuracy", lambda s: s.observation.val_accuracy),
    Column("parameter_ratio", "base", "ln(all parameters / host parameters)",
           lambda s: s.observation.parameter_ratio.log(), divisor=RATIO_SCALE),
    Column("last_succeeded", "base", "1 if the last action succeeded",
           lambda s: s.observation.last_succeeded, unknown=None),
    _signed("loss_history", "base", "symlog(the last 5 validation losses, oldest first)",
            lambda s: _symlog(s.observation.loss_history), divisor=LOSS_SCALE, width=HISTORY_LENGTH),
    Column("accuracy_history", "base", "the last 5 validation accuracies, oldest first",
           lambda s: s.observation.accuracy_history, width=HISTORY_LENGTH),
    Column("stage_shares", "base", "shares of enabled slots in " + ", ".join(s.name for s in SHARED_STAGES),
           _stage_shares, unknown=None, width=len(SHARED_STAGES)),
    Column("last_op", "base", "one-hot of the last op, all 0 before the first",
           lambda s: s.observation.last_op.unsqueeze(1) == torch.arange(len(Op), device=s.slots.device),
           unknown=None, width=len(Op)),
)  # fmt: skip

# Behind the base columns, for a policy that sets the learning rate.
RATE_COLUMNS = _in_layout_order(
    _signed("rate", "rate", "ln(learning rate / the recipe's)", lambda s: s.training.scale.log(),
            divisor=math.log(MOST_SCALE)),
    Column("rate_falls", "rate", "1 where the rate falls to 0", lambda s: s.training.falling),
    _signed("training_loss", "rate", "ln(training loss / loss of chance)",
            lambda s: (s.training.loss / s.training.chance_loss).log(), divisor=RATIO_SCALE),
    _signed("training_slope", "rate", "ln(training loss / that of the epoch before)",
            lambda s: (s.training.loss / s.training.previous_loss).log()),
    _signed("gap", "rate", "ln(validation loss / training loss)",
            lambda s: (s.observation.val_loss / s.training.loss).log(), divisor=RATIO_SCALE),
    _signed("loss_over_chance", "rate", "ln(validation loss / loss of chance)",
            lambda s: (s.observation.val_loss / s.training.chance_loss).log(), divisor=RATIO_SCALE),
    Column("passes", "rate", "ln(1 + passes over the training data)", lambda s: s.training.passes.log1p(),
           divisor=BUDGET_SCALE),
    Column("samples", "rate", "ln(1 + samples to train on)", lambda s: s.training.samples.log1p(),
           divisor=COUNT_SCALE),
    Column("updates", "rate", "ln(1 + minibatches that the budget pays for)",
           lambda s: s.training.updates.log1p(), divisor=COUNT_SCALE),
    Column("classes", "rate", "ln(classes)", lambda s: s.training.chance_loss, divisor=LOSS_SCALE),
)  # fmt: skip

SLOT_COLUMNS = _in_layout_order(
    Column("occupied", "slot", "1 if a seed exists", lambda s: s.occupied, unknown=None),
    Column("stage", "slot", "one-hot of the stage: " + ", ".join(s.name for s in Stage),
           lambda s: _stage_one_hot(s.slots.stage), unknown=None, width=len(Stage)),
    Column("alpha", "slot", "alpha", lambda s: s.slots.alpha),
    _signed("contribution", "slot", "symlog(contribution in points)",
            lambda s: _symlog(s.evidence.contribution), divisor=POINTS_SCALE),
    _signed("contribution_velocity", "slot", "symlog(average change in points, .7 old + .3 new)",
            lambda s: _symlog(s.evidence.contribution_velocity), divisor=POINTS_SCALE),
    Column("contribution_freshness", "slot", f"{FRESHNESS_DECAY} ^ ticks since the contribution was measured",
           lambda s: (s.evidence.contribution_age * math.log(FRESHNESS_DECAY)).exp()),
    Column("tempo", "slot", "ticks of the first ramp; unknown without a seed",
           lambda s: s.of_seed(tempo_ticks(s.slots.tempo)), divisor=RAMP_SCALE),
    Column("alpha_target", "slot", "alpha target; unknown without a seed",
           lambda s: s.of_seed(s.slots.alpha_target)),
    Column("alpha_mode", "slot", "1 alpha rises, 0 rests, -1 falls",
           lambda s: _sign_of_mode(s.slots.alpha_mode), low=-1.0, unknown=None),
    Column("alpha_steps_total", "slot", "ticks of the latest ramp",
           lambda s: s.slots.alpha_steps_total, unknown=None, divisor=RAMP_SCALE),
    Column("alpha_steps_done", "slot", "ticks of it that are over",
           lambda s: s.slots.alpha_steps_done, unknown=None, divisor=RAMP_SCALE),
    Column("time_to_target", "slot", "ticks left of the ramp under way, 0 at rest",
           lambda s: s.ticks_left, unknown=None, divisor=RAMP_SCALE),
    _signed("alpha_velocity", "slot", "(target - alpha) / ticks left, 0 at rest",
            lambda s: (s.ticks_left > 0)
            * ((s.slots.alpha_target - s.slots.alpha) / s.ticks_left.clamp(min=1))),
    Column("algorithm", "slot", "one-hot, 0 without a seed: " + ", ".join(s.name for s in Style),
           lambda s: _style_one_hot(torch.where(s.occupied, s.slots.style, len(Style))),
           unknown=None, width=len(Style)),
    _signed("interaction", "slot", "symlog(interaction in points)",
            lambda s: _symlog(s.evidence.interaction), divisor=POINTS_SCALE),
    _signed("shadow_gain", "slot", "symlog(shadow gain in points)",
            lambda s: _symlog(s.evidence.shadow_gain), divisor=POINTS_SCALE),
    Column("gradient_norm", "slot", "ln(1 + gradient norm)",
           lambda s: s.evidence.gradient_norm.log1p(), divisor=GRADIENT_SCALE),
    Column("gradient_health", "slot", "gradient health", lambda s: s.evidence.gradient_health),
    Column("vanishing", "slot", "share of tensors whose gradient vanishes", lambda s: s.evidence.vanishing),
    Column("exploding", "slot", "share of tensors whose gradient explodes", lambda s: s.evidence.exploding),
    Column("previous_health", "slot", "the health before the latest one",
           lambda s: s.evidence.previous_health),
    Column("room", "slot", "ln(1 + fossils that can still become part of the host)",
           lambda s: s.slots.room.log1p(), unknown=None, divisor=ROOM_SCALE),
    Column("epochs_in_stage", "slot", "ln(1 + ticks in this stage)",
           lambda s: s.slots.epochs_in_stage.log1p(), unknown=None, divisor=CLOCK_SCALE),
    Column("age", "slot", "ln(1 + ticks since germination); unknown without a seed",
           lambda s: s.of_seed(s.slots.age.log1p()), divisor=CLOCK_SCALE),
)  # fmt: skip

COLUMNS = BASE_COLUMNS + SLOT_COLUMNS
BASE_FEATURE_SIZE = sum(c.width for c in BASE_COLUMNS)
RATE_FEATURE_SIZE = sum(c.width for c in RATE_COLUMNS)
SLOT_FEATURE_SIZE = sum(c.width for c in SLOT_COLUMNS)
BELOW_ALL = min(c.range[0] for c in COLUMNS)


def schema_hash(rates: bool = False) -> str:
    """Return a fingerprint of the features, with `rates` those of learning rates too, for checkpoints."""
    columns = COLUMNS + RATE_COLUMNS if rates else COLUMNS
    text = json.dumps([c.contract() for c in columns], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def batch_obs_to_features(observation: Observation, rates: bool = False) -> tuple[Tensor, Tensor]:
    """Compute features float32 [N, base + slot·S] and blueprints int64 [N, S], -1 where there is no seed.

    The base block comes first, then, with `rates`, that of the learning rate, then the blocks of the slots
    one after another.
    """
    seen = FeatureInputs.of(observation)
    groups = (BASE_COLUMNS, RATE_COLUMNS, SLOT_COLUMNS) if rates else (BASE_COLUMNS, SLOT_COLUMNS)
    blocks = [_extract(columns, seen).flatten(1) for columns in groups]  # [N, base], [N, rate], [N, S · slot]
    return _finish(torch.cat(blocks, dim=1), observation.num_slots, rates), observation.slots.blueprint


def _extract(columns: Sequence[Column], seen: FeatureInputs) -> Tensor:
    """Extract all columns of a block side by side.  # [..., width]"""
    values = [column.extract(seen).float() for column in columns]
    # One stack for all columns of width 1, instead of a cat of many narrow tensors.
    singles = [value for column, value in zip(columns, values, strict=True) if column.width == 1]
    return torch.cat([torch.stack(singles).movedim(0, -1), *values[len(singles) :]], dim=-1)


@device_table
def _limits(num_slots: int, rates: bool) -> Tensor:
    """Return divisor, low, high and lower end of the range of every feature.  # [4, features]"""
    columns = BASE_COLUMNS + RATE_COLUMNS * rates + SLOT_COLUMNS * num_slots
    rows = [(c.divisor, c.low, c.high, c.range[0]) for c in columns for _ in range(c.width)]
    return torch.tensor(rows).T.contiguous()


def _finish(raw: Tensor, num_slots: int, rates: bool) -> Tensor:
    """Scale, clamp, and write the sentinel for what is unknown, in place.  # [N, features]

    A NaN survives the clamp, drops below every range and is lifted to the lower end of its column's own,
    which is the sentinel.
    """
    divisor, low, high, bottom = _limits(raw.device, num_slots, rates).unbind(0)
    return raw.div_(divisor).clamp_(low, high).nan_to_num_(nan=BELOW_ALL).clamp_(min=bottom)
