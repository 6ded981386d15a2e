"""Plays an episode of the lifecycle, with the real rules and a made-up world, and films it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Protocol

import torch
from torch import Tensor

from esper.commands.stories import CAST, Line, Story
from esper.commands.toy_world import ToyWorld
from esper.foundation.streams import Stream, random_normal, random_uniform
from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.slot_config import SlotConfig
from esper.lifecycle.slot_states import SlotStates
from esper.simic.films import NAMES
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.telemetry.schema import Film, FilmReel

TOPOLOGY = "cnn"
RULES = LifecycleConfig()
# How often the random player asks for each op, where it is legal.
OP_WEIGHTS: dict[Op, float] = {
    Op.WAIT: 6.0,
    Op.GERMINATE: 3.0,
    Op.SET_ALPHA_TARGET: 0.4,
    Op.PRUNE: 0.25,
    Op.FOSSILIZE: 1.0,
    Op.ADVANCE: 1.5,
}
RANDOM_WORTH = (2.0, 3.0)  # mean and spread of what a random seed is worth, points
PAUSE = 2  # steps between the moment a story may begin and the moment it does


@dataclass(frozen=True)
class MadeUpDecision:
    """One action per member, and what a seed planted by it will prove to be worth."""

    actions: Actions
    worth: Tensor  # [N, S] points


class Player(Protocol):
    """Whoever decides: it sees the masks and nothing else."""

    titles: list[str]

    def decide(self, step: int, masks: ActionMasks) -> MadeUpDecision:
        """One action for every member, legal under the masks."""


@dataclass
class _Actor:
    """One member's stories: those that are being told, and those to come."""

    stories: Iterator[Story]
    running: list[tuple[int, Story, int, int]] = field(
        default_factory=list
    )  # slot, story, next line, due step
    ready_since: int | None = None
    last_slot: int = -1

    def speak(self, step: int, legal: list[list[bool]]) -> tuple[Line, int, float] | None:
        """The line that is due and legal, with its slot and the worth of its seed.  # legal [ops][S]"""
        for i, (slot, story, number, due) in enumerate(self.running):
            line = story.lines[number]
            if step >= due and legal[line.op][slot]:
                self._turn_page(i, step)
                return line, slot, story.worth
        slots = range(len(legal[Op.GERMINATE]))
        free = [
            s for s in slots if legal[Op.GERMINATE][s] and all(s != running[0] for running in self.running)
        ]
        if not free:
            self.ready_since = None
            return None
        self.ready_since = step if self.ready_since is None else self.ready_since
        if step < self.ready_since + PAUSE:
            return None
        slot = next((s for s in free if s > self.last_slot), free[0])
        story = next(self.stories)
        self.running.append((slot, story, 0, step))
        self.last_slot, self.ready_since = slot, None
        self._turn_page(len(self.running) - 1, step)
        return story.lines[0], slot, story.worth

    def _turn_page(self, index: int, step: int) -> None:
        slot, story, number, _ = self.running.pop(index)
        if number + 1 < len(story.lines):
            self.running.insert(index, (slot, story, number + 1, step + story.lines[number + 1].after))


class ScriptedPlayer:
    """Tells the stories of the cast, one seed after another."""

    def __init__(self, num_members: int) -> None:
        cast = list(islice(cycle(CAST), num_members))
        self.titles = [title for title, _ in cast]
        self._actors = [_Actor(cycle(stories)) for _, stories in cast]

    def decide(self, step: int, masks: ActionMasks) -> MadeUpDecision:
        """The lines that are due, one member after another."""
        worth = torch.zeros(masks.slot.shape)
        rows: list[dict[Head, int]] = []
        for actor, legal, values in zip(self._actors, masks.slot_by_op.tolist(), worth, strict=True):
            spoken = actor.speak(step, legal)
            if spoken is None:
                rows.append({Head.OP: Op.WAIT})
                continue
            line, slot, value = spoken
            values[slot] = value
            rows.append({**line.choices, Head.SLOT: slot, Head.OP: line.op})
        return MadeUpDecision(Actions.of(rows), worth)


class RandomPlayer:
    """Any legal choice, for all members at once; each member draws its own numbers."""

    def __init__(self, num_members: int, seed: int) -> None:
        self.titles = ["random legal choices"] * num_members
        self._seed = seed
        self._members = torch.arange(num_members)
        self._weights = torch.tensor([OP_WEIGHTS[op] for op in Op])

    def decide(self, step: int, masks: ActionMasks) -> MadeUpDecision:
        """Any legal choice, all members at once."""
        draws = random_uniform(self._seed, self._members, Stream.ACTION, step, len(Head))  # [N, heads]
        op = _pick(masks.op * self._weights, draws[:, Head.OP])
        slots = masks.slot_by_op[self._members, op]  # [N, S]
        heads = {
            Head.SLOT: slots,
            Head.BLUEPRINT: masks.blueprint,
            Head.STYLE: masks.style,
            Head.TEMPO: masks.tempo,
            Head.ALPHA_TARGET: masks.alpha_target,
            Head.ALPHA_SPEED: masks.alpha_speed,
            Head.ALPHA_CURVE: masks.alpha_curve,
        }
        columns = [_pick(mask.float(), draws[:, head]) for head, mask in heads.items()]
        mean, spread = RANDOM_WORTH
        worth = random_normal(self._seed, self._members, Stream.CONTROL, step, slots.shape[1])
        return MadeUpDecision(Actions(torch.stack([*columns, op], dim=1)), mean + spread * worth)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """One choice per row with a chance in proportion to its weight.  # [N, choices], [N] -> [N]"""
    below = weights.cumsum(dim=1)
    return (below <= uniform.unsqueeze(1) * below[:, -1:]).sum(dim=1)


def film_episode(player: Player, num_slots: int, steps: int, seed: int) -> FilmReel:
    """Let the player decide for `steps` steps: train, decide, apply, film, tick."""
    num_members = len(player.titles)
    slot_config = SlotConfig.grid(1, num_slots)
    states = SlotStates.empty(num_members, num_slots)
    world = ToyWorld.new(seed, num_members, num_slots)
    frames = []
    for step in range(steps):
        world = world.trained(states)
        accuracy = world.accuracy(states, step)
        decision = player.decide(step, compute_batch_masks(states, slot_config, RULES, TOPOLOGY))
        outcome = apply(states, decision.actions, world.evidence(states, step), RULES, TOPOLOGY)
        world = world.sown(outcome.germinated, decision.worth)
        frames.append(_Frame(outcome.states, decision.actions, outcome.succeeded, accuracy))
        states = tick(outcome.states, RULES).states
    return FilmReel(
        films=[_film(member, player.titles[member], slot_config, frames) for member in range(num_members)],
        **NAMES,
    )


@dataclass(frozen=True)
class _Frame:
    """What one step leaves on film."""

    states: SlotStates
    actions: Actions
    succeeded: Tensor  # [N]
    accuracy: Tensor  # [N]


def _film(member: int, title: str, slot_config: SlotConfig, frames: list[_Frame]) -> Film:
    return Film(
        member=member,
        title=title,
        slots=slot_config.slot_ids,
        stage=[f.states.stage[member].tolist() for f in frames],
        alpha=[f.states.alpha[member].tolist() for f in frames],
        blueprint=[f.states.blueprint[member].tolist() for f in frames],
        op=[int(f.actions[Head.OP][member]) for f in frames],
        op_slot=[int(f.actions[Head.SLOT][member]) for f in frames],
        succeeded=[bool(f.succeeded[member]) for f in frames],
        accuracy=[float(f.accuracy[member]) for f in frames],
    )
