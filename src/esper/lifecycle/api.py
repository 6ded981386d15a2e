"""Everything that the rules of growth offer to the other rooms; import it from `esper.lifecycle`."""

from esper.lifecycle.actions import (
    HEAD_CHOICES,
    HEADS_READ,
    NUM_BLUEPRINTS,
    NUM_HEADS,
    NUM_OPS,
    Actions,
    AlphaCurve,
    AlphaSpeed,
    AlphaTarget,
    Blend,
    Blueprint,
    Head,
    Op,
    Style,
    Tempo,
    head_sizes,
    relevance_table,
    selectable_blueprints,
)
from esper.lifecycle.alpha import advance_alpha, ease, retarget
from esper.lifecycle.config import Config, GateConfig, LifecycleConfig
from esper.lifecycle.engine import Outcome, TickOutcome, apply, force_prune, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.gates import Gate
from esper.lifecycle.legality import holds_seed, legal_slots_by_op
from esper.lifecycle.slot_config import SlotConfig
from esper.lifecycle.slot_states import NO_BLUEPRINT, AlphaMode, SlotRecord, SlotStates
from esper.lifecycle.stages import TRANSITIONS, Stage
from esper.lifecycle.tables import device_table

__all__ = [
    "HEADS_READ",
    "HEAD_CHOICES",
    "NO_BLUEPRINT",
    "NUM_BLUEPRINTS",
    "NUM_HEADS",
    "NUM_OPS",
    "TRANSITIONS",
    "Actions",
    "AlphaCurve",
    "AlphaMode",
    "AlphaSpeed",
    "AlphaTarget",
    "Blend",
    "Blueprint",
    "Config",
    "Gate",
    "GateConfig",
    "Head",
    "LifecycleConfig",
    "Op",
    "Outcome",
    "SlotConfig",
    "SlotEvidence",
    "SlotRecord",
    "SlotStates",
    "Stage",
    "Style",
    "Tempo",
    "TickOutcome",
    "advance_alpha",
    "apply",
    "device_table",
    "ease",
    "force_prune",
    "head_sizes",
    "holds_seed",
    "legal_slots_by_op",
    "relevance_table",
    "retarget",
    "selectable_blueprints",
    "tick",
]
