"""States and episodes at random, for the properties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Actions
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.engine import ActionOutcome, TickOutcome, apply, tick
from esper.lifecycle.legality import blueprint_table
from esper.lifecycle.slot_states import SlotEvidence, SlotStates
from tests.lifecycle import reference as ref
from tests.scenes import SEED_STAGES, STAGES


def random_members(rng: np.random.Generator, num_members: int, num_slots: int) -> list[list[ref.Slot]]:
    """Any states that the doors accept, reachable or not, with at least one enabled slot per member."""
    members = []
    for _ in range(num_members):
        slots = [random_slot(rng) for _ in range(num_slots)]
        slots[rng.integers(num_slots)].enabled = True
        members.append(slots)
    return members


def random_slot(rng: np.random.Generator) -> ref.Slot:
    stage = int(rng.choice(STAGES))
    slot = ref.Slot(stage=stage, enabled=bool(rng.random() < 0.8), epochs_in_stage=int(rng.integers(0, 15)))
    slot.room = int(rng.integers(3))
    if stage in SEED_STAGES:
        slot.blueprint = int(rng.integers(1, 16))
        slot.style, slot.tempo = int(rng.integers(4)), int(rng.integers(3))
        slot.age = int(rng.integers(0, 13))
        slot.alpha_mode = int(rng.integers(3))
        slot.alpha, slot.alpha_start, slot.alpha_target = (
            float(x) for x in rng.choice([0.0, 0.5, 0.7, 1.0], 3)
        )
        slot.alpha_curve = int(rng.integers(5))
        slot.alpha_steps_total = int(rng.integers(1, 9))
        slot.alpha_steps_done = int(rng.integers(0, slot.alpha_steps_total))
    return slot


def to_states(members: list[list[ref.Slot]]) -> SlotStates:
    blank = SlotStates.empty(len(members), len(members[0]))
    return blank.replace(
        **{
            name: torch.tensor(
                [[getattr(slot, name) for slot in slots] for slots in members], dtype=value.dtype
            )
            for name, value in blank.tensors().items()
        }
    )


def random_rules(rng: np.random.Generator) -> ref.Rules:
    return ref.Rules(
        max_seeds=int(rng.integers(0, 4)),
        allow_advance=bool(rng.random() < 0.8),
        training_epochs=int(rng.integers(0, 4)),
        topology=str(rng.choice(["cnn", "transformer", "mlp"])),
        allow_unfinished=bool(rng.random() < 0.3),
    )


def to_config(rules: ref.Rules) -> LifecycleConfig:
    return LifecycleConfig(
        max_seeds=rules.max_seeds,
        allow_advance=rules.allow_advance,
        allow_unfinished=rules.allow_unfinished,
        gates=GateConfig(training_epochs=rules.training_epochs),
    )


def random_evidence(rng: np.random.Generator, num_members: int, num_slots: int) -> SlotEvidence:
    """Mostly good news, sometimes bad, sometimes none."""
    shape = (num_members, num_slots)
    good = {"contribution": 2.0, "gradient_health": 0.9, "exploding": 0.0}
    bad = {"contribution": -0.5, "gradient_health": 0.5, "exploding": 0.2}
    values = {}
    for name in ref.EVIDENCE:
        luck = rng.random(shape)
        column = np.where(luck < 0.8, good[name], np.where(luck < 0.9, bad[name], np.nan))
        values[name] = torch.from_numpy(column.astype(np.float32))
    return SlotEvidence.unmeasured(*shape).replace(**values)


def evidence_of(evidence: SlotEvidence, member: int) -> list[dict[str, float]]:
    slots = evidence.contribution.shape[1]
    return [{n: getattr(evidence, n)[member, i].item() for n in ref.EVIDENCE} for i in range(slots)]


def random_action(
    rng: np.random.Generator, member: list[ref.Slot], rules: ref.Rules, fitting: list[set[int]]
) -> dict[str, int]:
    """Usually something legal, so that seeds live long; else anything at all, out of range included."""
    action = {head: int(rng.integers(0, size)) for head, size in ref.CHOICES.items()}
    action["slot"] = int(rng.integers(0, len(member)))
    if rng.random() < 0.75:
        pairs = [(op, i) for op in range(6) for i in range(len(member)) if ref.is_legal(member, op, i, rules)]
        ops = sorted({op for op, _ in pairs})
        weights = np.array([{ref.WAIT: 0.5, ref.PRUNE: 0.2}.get(op, 1.0) for op in ops])
        action["op"] = int(rng.choice(ops, p=weights / weights.sum()))
        action["slot"] = int(rng.choice([i for op, i in pairs if op == action["op"]]))
        action["blueprint"] = int(rng.choice(sorted(fitting[action["slot"]])))
    elif rng.random() < 0.4:
        action[str(rng.choice(ref.HEAD_NAMES))] = int(rng.choice([-(2**62), -7, -1, 16, 40, 2**62]))
    return action


def fits_of(states: SlotStates, topology: str = "cnn") -> Tensor:
    """The blueprints of a topology in every slot.  # [N, S, blueprints]"""
    return blueprint_table(states.device, topology).expand(*states.stage.shape, -1)


@dataclass
class Step:
    """One decision step, played by the tensor programs and by the reference."""

    before: SlotStates
    applied: ActionOutcome
    ticked: TickOutcome
    verdicts: list[ref.Verdict]
    mid_members: SlotStates
    ended: list[list[tuple[bool, bool]]]
    members: SlotStates


def episode(seed: int, num_members: int, num_slots: int, steps: int) -> Iterator[Step]:
    """Random legal and illegal actions through both engines from empty slots; yields after every step.

    Some slots have room for fossils and fit clones, and some members' controllers look at nothing.
    """
    rng = np.random.default_rng(seed)
    rules = random_rules(rng)
    config = to_config(rules)
    members = [[ref.Slot(room=int(rng.integers(3))) for _ in range(num_slots)] for _ in range(num_members)]
    fits = torch.from_numpy(rng.random((num_members, num_slots, 16)) < 0.5)
    fits[:, :, sorted(ref.BLUEPRINTS[rules.topology])[0]] = True
    fits[:, :, ref.CLONE] |= torch.from_numpy(rng.random((num_members, num_slots)) < 0.5)
    fitting = [[set(slot.nonzero().flatten().tolist()) for slot in member] for member in fits]
    uses_metrics = torch.from_numpy(rng.random(num_members) < 0.7)
    theirs = [rules if look else ref.of_the_blind(rules) for look in uses_metrics.tolist()]
    for slots in members:
        for slot in slots[1:]:
            slot.enabled = bool(rng.random() < 0.8)
    states = to_states(members)
    for left in range(steps, 0, -1):
        evidence = random_evidence(rng, num_members, num_slots)
        plans = [random_action(rng, member, rules, fit) for member, fit in zip(members, fitting, strict=True)]
        choices = torch.tensor([[plan[head] for head in ref.HEAD_NAMES] for plan in plans])
        lefts = (left - torch.arange(num_members) % 3).clamp(min=0)  # some are finished before the others
        applied = apply(states, Actions(choices), evidence, config, fits, lefts, uses_metrics)
        ticked = tick(applied.states, config)
        verdicts = [
            ref.act(member, plan, evidence_of(evidence, i), theirs[i], int(lefts[i]), fitting[i])
            for i, (member, plan) in enumerate(zip(members, plans, strict=True))
        ]
        mid = to_states(members)
        ended = [[ref.pass_time(slot) for slot in member] for member in members]
        yield Step(states, applied, ticked, verdicts, mid, ended, to_states(members))
        states = ticked.states
