"""The stages of a slot and the one table of legal moves between them."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Where a slot stands. Value 5 is retired and is refused wherever a stage comes in."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.UNKNOWN: frozenset(),
    # A block that is repeated or widened at once is active from the start.
    Stage.DORMANT: frozenset({Stage.GERMINATED, Stage.BLENDING, Stage.HOLDING}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset({Stage.DORMANT}),  # once it is folded into the host, where there is room
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.RESETTING}),
    Stage.RESETTING: frozenset({Stage.DORMANT}),
}

# Forward along the life of a seed; ADVANCE takes these moves, FOSSILIZE the last one.
NEXT_STAGE: dict[Stage, Stage] = {
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}

COOLDOWN_STAGES = frozenset({Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING})
SEED_STAGES = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
FORWARD_STAGES = frozenset({Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
PRUNABLE_STAGES = frozenset(s for s, targets in TRANSITIONS.items() if Stage.PRUNED in targets)
FOSSILIZABLE_STAGES = frozenset(s for s, targets in TRANSITIONS.items() if Stage.FOSSILIZED in targets)
ADVANCEABLE_STAGES = frozenset(NEXT_STAGE)
# One seed is raised at a time: a slot in any of these keeps every other slot from germinating.
GERMINATION_BLOCKERS = COOLDOWN_STAGES | {Stage.GERMINATED, Stage.TRAINING}

STAGE_TABLE_SIZE = max(Stage) + 1
