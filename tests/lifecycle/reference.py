"""The rules of growth once more, slowly: one member, one slot, one number at a time.

Written from the rules alone, with its own constants: what the tensor programs have to agree with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

DORMANT, GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED = 1, 2, 3, 4, 6, 7
PRUNED, EMBARGOED, RESETTING = 8, 9, 10
WAIT, GERMINATE, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, ADVANCE = range(6)
HOLD, UP, DOWN = range(3)
NO_GATE = -1

HEAD_NAMES = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")
CHOICES = {
    "blueprint": 16,
    "style": 4,
    "tempo": 3,
    "alpha_target": 3,
    "alpha_speed": 4,
    "alpha_curve": 5,
    "op": 6,
}
READS = {
    WAIT: (),
    GERMINATE: ("slot", "blueprint", "style", "tempo", "alpha_target"),
    SET_ALPHA_TARGET: ("slot", "style", "alpha_target", "alpha_speed", "alpha_curve"),
    PRUNE: ("slot", "alpha_speed", "alpha_curve"),
    FOSSILIZE: ("slot",),
    ADVANCE: ("slot",),
}
BLUEPRINTS = {
    "cnn": {1, 2, 3, 4, 5, 6, 7},
    "transformer": {2, 3, 8, 9, 10, 11, 12},
    "mlp": {3, 8, 9, 10, 11},
}
FIRST_CURVE = {0: 0, 1: 0, 2: 3, 3: 3}  # by style
CLONE = 13
GROWTH = (13, 14, 15)  # CLONE, WIDEN_HALF, WIDEN_FULL: no training alone
STEEPNESS = {2: 6.0, 3: 12.0, 4: 24.0}  # by curve
EVIDENCE = ("contribution", "gradient_health", "exploding")


@dataclass
class Rules:
    """The settings that an episode is played under."""

    max_seeds: int = 0
    allow_advance: bool = True
    open: bool = False
    training_epochs: int = 10
    topology: str = "cnn"
    allow_unfinished: bool = False


@dataclass
class Slot:
    """One slot of one member."""

    stage: int = DORMANT
    blueprint: int = -1
    style: int = 0
    tempo: int = 1
    alpha: float = 0.0
    alpha_start: float = 0.0
    alpha_target: float = 0.0
    alpha_mode: int = HOLD
    alpha_curve: int = 0
    alpha_steps_total: int = 0
    alpha_steps_done: int = 0
    age: int = 0
    epochs_in_stage: int = 0
    prune_pending: bool = False
    room: int = 0
    enabled: bool = True

    def clear(self, stage: int) -> None:
        """Nothing of a seed is left."""
        for name, value in vars(Slot(stage=stage, room=self.room, enabled=self.enabled)).items():
            setattr(self, name, value)


@dataclass
class Verdict:
    legal: bool
    succeeded: bool
    executed_op: int
    refused_by: int
    germinated: set[int] = field(default_factory=set)
    pruned: set[int] = field(default_factory=set)


def of_the_blind(rules: Rules) -> Rules:
    """The rules of those whose controller looks at nothing: no gate asks for measurements or for time."""
    return replace(rules, open=True, allow_unfinished=True)


def is_legal(
    member: list[Slot],
    op: int,
    index: int,
    rules: Rules,
    steps_left: float = math.inf,
    fitting: set[int] | None = None,
) -> bool:
    slot = member[index]
    if not slot.enabled:
        return False
    if op == GERMINATE and fitting is not None:
        if not in_time(slot, fitting, rules, steps_left):
            return False
    elif steps_left < math.inf and steps_needed(slot, op, rules) > steps_left:
        return False
    if op == WAIT:
        return True
    if op == GERMINATE:
        seeds = sum(s.stage in (GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED) for s in member)
        if rules.max_seeds != 0 and seeds >= rules.max_seeds:
            return False
        busy = (GERMINATED, TRAINING, PRUNED, EMBARGOED, RESETTING)
        return slot.stage == DORMANT and not any(s.enabled and s.stage in busy for s in member)
    if op == ADVANCE:
        return rules.allow_advance and slot.stage in (GERMINATED, TRAINING, BLENDING)
    if op == SET_ALPHA_TARGET:
        return slot.stage in (BLENDING, HOLDING) and slot.alpha_mode == HOLD
    if op == PRUNE:
        at_rest = slot.alpha_mode == HOLD
        return slot.stage in (GERMINATED, TRAINING, BLENDING, HOLDING) and slot.age >= 5 and at_rest
    return slot.stage == HOLDING  # FOSSILIZE


def in_time(slot: Slot, fitting: set[int], rules: Rules, steps_left: float) -> set[int]:
    """The blueprints that can still be raised."""
    if steps_left == math.inf:
        return fitting
    return {b for b in fitting if steps_needed(slot, GERMINATE, rules, b) <= steps_left}


def steps_needed(slot: Slot, op: int, rules: Rules, blueprint: int = 1) -> int:
    """Decisions, this one included, until the seed is HOLDING if all goes well: by playing them."""
    if rules.allow_unfinished or op not in (GERMINATE, ADVANCE, SET_ALPHA_TARGET):
        return 0
    if op == SET_ALPHA_TARGET:
        return 1 + 3  # the shortest ramp, and a step at the new strength
    if op == ADVANCE and slot.stage not in (GERMINATED, TRAINING):
        return 1
    seed = replace(slot)
    if op == ADVANCE:
        seed.alpha_target = 1.0
    perform(seed, op, {head: 0 for head in HEAD_NAMES} | {"blueprint": blueprint, "alpha_target": 2})
    healthy = {"exploding": 0.0, "gradient_health": 1.0}
    decisions = 1
    while seed.stage != HOLDING:
        pass_time(seed)
        decisions += 1
        if refusing_gate(seed, ADVANCE, True, healthy, rules) == NO_GATE:
            perform(seed, ADVANCE, {head: 0 for head in HEAD_NAMES})
    return decisions


def masks(member: list[Slot], rules: Rules, steps_left: float = math.inf) -> dict[str, list]:
    """Every mask of one member, as nested lists."""
    by_op = [[is_legal(member, op, i, rules, steps_left) for i in range(len(member))] for op in range(6)]
    op = [any(row) for row in by_op]
    shaping = op[GERMINATE] or op[SET_ALPHA_TARGET]
    return {
        "slot": [s.enabled for s in member],
        "blueprint": [b in BLUEPRINTS[rules.topology] for b in range(16)],
        "style": [shaping or style == 2 for style in range(4)],
        "tempo": [True] * 3,
        "alpha_target": [shaping or target == 2 for target in range(3)],
        "alpha_speed": [True] * 4,
        "alpha_curve": [True] * 5,
        "op": op,
        "slot_by_op": by_op,
    }


def refusing_gate(slot: Slot, op: int, fits: bool, evidence: dict[str, float], rules: Rules) -> int:
    """The gate that says no, or NO_GATE. Every comparison with NaN is false, so unmeasured never passes."""
    if op == GERMINATE:
        return NO_GATE if fits else 0
    if op == ADVANCE and slot.stage == TRAINING:
        if rules.open or slot.blueprint in GROWTH:
            return NO_GATE
        good = evidence["exploding"] == 0 and evidence["gradient_health"] >= 0.7
        return NO_GATE if good and slot.epochs_in_stage >= rules.training_epochs else 2
    if op == ADVANCE and slot.stage == BLENDING:
        good = slot.alpha_target == 1.0 and slot.alpha == 1.0 and slot.alpha_mode == HOLD
        return NO_GATE if good else 3
    if op == FOSSILIZE and not rules.open:
        return NO_GATE if evidence["contribution"] > 0 else 5
    return NO_GATE


def ease(curve: int, t: float) -> float:
    if curve == 0:
        return t
    if curve == 1:
        return 0.5 * (1 - math.cos(math.pi * t))
    k = STEEPNESS[curve]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    return (sigmoid(k * (t - 0.5)) - sigmoid(-k / 2)) / (sigmoid(k / 2) - sigmoid(-k / 2))


def begin_ramp(slot: Slot, target: float, ticks: int, curve: int) -> None:
    if ticks == 0 or target == slot.alpha:
        slot.alpha, slot.alpha_mode, ticks = target, HOLD, 0
    else:
        slot.alpha_mode = UP if target > slot.alpha else DOWN
    slot.alpha_start, slot.alpha_target, slot.alpha_curve = slot.alpha, target, curve
    slot.alpha_steps_total, slot.alpha_steps_done = ticks, 0


def enter(slot: Slot, stage: int) -> None:
    slot.stage, slot.epochs_in_stage = stage, 0


def act(
    member: list[Slot],
    action: dict[str, int],
    evidence: list[dict[str, float]],
    rules: Rules,
    steps_left: float,
    fitting: list[set[int]],
) -> Verdict:
    """Carry out one member's action in place; `fitting`: the blueprints that each slot takes."""
    op = action["op"]
    if op not in READS:
        return Verdict(False, False, WAIT, NO_GATE)
    sizes = {**CHOICES, "slot": len(member)}
    if any(not 0 <= action[head] < sizes[head] for head in READS[op]):
        return Verdict(False, False, WAIT, NO_GATE)
    if op == WAIT:
        return Verdict(True, True, WAIT, NO_GATE)
    index = action["slot"]
    slot = member[index]
    fits = fitting[index]
    if not is_legal(member, op, index, rules, steps_left, fits):
        return Verdict(False, False, WAIT, NO_GATE)
    fitting_now = in_time(slot, fits, rules, steps_left)
    gate = refusing_gate(slot, op, action["blueprint"] in fitting_now, evidence[index], rules)
    if gate != NO_GATE:
        return Verdict(True, False, WAIT, gate)
    verdict = Verdict(True, True, op, NO_GATE)
    perform(slot, op, action)
    if op == GERMINATE:
        verdict.germinated.add(index)
    if slot.stage == PRUNED:
        verdict.pruned.add(index)
    return verdict


def perform(slot: Slot, op: int, action: dict[str, int]) -> None:
    target = (0.5, 0.7, 1.0)[action["alpha_target"]] if 0 <= action["alpha_target"] < 3 else 0.0
    ticks = (0, 3, 5, 8)[action["alpha_speed"]] if 0 <= action["alpha_speed"] < 4 else 0
    if op == GERMINATE:
        slot.clear(GERMINATED)
        slot.blueprint, slot.style, slot.tempo = action["blueprint"], action["style"], action["tempo"]
        slot.alpha_target = target
        if slot.blueprint in GROWTH and slot.tempo == 0:
            enter(slot, HOLDING if target == 1 else BLENDING)
            begin_ramp(slot, target, 0, FIRST_CURVE[slot.style])
    elif op == ADVANCE and slot.stage == GERMINATED:
        enter(slot, TRAINING)
    elif op == ADVANCE and slot.stage == TRAINING:
        enter(slot, BLENDING)
        ticks = 0 if slot.blueprint in GROWTH and slot.tempo == 0 else (3, 5, 8)[slot.tempo]
        begin_ramp(slot, slot.alpha_target, ticks, FIRST_CURVE[slot.style])
    elif op == ADVANCE:
        enter(slot, HOLDING)
    elif op == FOSSILIZE:
        enter(slot, FOSSILIZED)
    elif op == SET_ALPHA_TARGET:
        slot.style = action["style"]
        begin_ramp(slot, target, ticks, action["alpha_curve"])
        if slot.stage == HOLDING and target < 1:
            enter(slot, BLENDING)
    elif ticks == 0 or slot.alpha == 0:  # PRUNE at once
        slot.clear(PRUNED)
    else:  # PRUNE on a ramp
        begin_ramp(slot, 0.0, ticks, action["alpha_curve"])
        slot.prune_pending = True
        if slot.stage == HOLDING:
            enter(slot, BLENDING)


def pass_time(slot: Slot) -> tuple[bool, bool]:
    """One tick of one slot in place; (its seed ended here, it changed stage)."""
    if slot.alpha_mode != HOLD:
        slot.alpha_steps_done += 1
        if slot.alpha_steps_done >= slot.alpha_steps_total:
            slot.alpha, slot.alpha_mode = slot.alpha_target, HOLD
        else:
            share = ease(slot.alpha_curve, slot.alpha_steps_done / slot.alpha_steps_total)
            slot.alpha = slot.alpha_start + (slot.alpha_target - slot.alpha_start) * share
    if slot.prune_pending and slot.alpha_mode == HOLD:
        slot.clear(PRUNED)
        return True, True
    if slot.stage == FOSSILIZED and slot.room and (slot.age or slot.blueprint == CLONE):
        slot.room -= 1
        slot.clear(DORMANT)
        return False, True
    slot.epochs_in_stage += 1
    if slot.stage in (GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED):
        slot.age += 1
    wait, after = {PRUNED: (0, EMBARGOED), EMBARGOED: (5, RESETTING), RESETTING: (1, DORMANT)}.get(
        slot.stage, (math.inf, slot.stage)
    )
    if slot.epochs_in_stage >= wait:
        enter(slot, after)
        return False, True
    return False, False
