"""Plays an episode of the lifecycle, with the real rules and a made-up world, and films it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
from torch import Tensor

from esper.commands.stories import CAST, Line, Story
from esper.foundation.rows import stacked
from esper.foundation.streams import Stream, random_normal, random_uniform
from esper.lifecycle.actions import Actions, Head, Op
from esper.lifecycle.config import LifecycleConfig
from esper.lifecycle.engine import apply, tick
from esper.lifecycle.evidence import SlotEvidence
from esper.lifecycle.slot_config import SlotConfig
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage, stage_table
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
LEARNING_RATE = 0.16  # the share of what is missing that a seed learns per step
NOISE = 0.15  # points
HOST_START, HOST_END, HOST_STEPS = 0.52, 0.74, 14.0  # the accuracy of a host alone, and how fast it comes
PAUSE = 2  # steps between the moment a story may begin and the moment it does


MadeUpDecision = tuple[Actions, Tensor]  # and what a seed that is planted is worth, [N, S] points


@dataclass
class _Actor:
    """One member's stories: those that are being told, and those to come."""

    stories: Iterator[Story]
    running: list[tuple[int, Story, int, int]] = field(default_factory=list)  # slot, story, next line, due
    ready_since: int | None = None
    last_slot: int = -1

    def speak(self, step: int, legal: list[list[bool]]) -> tuple[Line, int, float] | None:
        """The line that is due and legal, with its slot and the worth of its seed.  # legal [ops][S]"""
        for i, (slot, story, number, due) in enumerate(self.running):
            line = story.lines[number]
            if step >= due and legal[line.op][slot]:
                self._turn_page(i, step)
                return line, slot, story.worth
        busy = {slot for slot, *_ in self.running}
        free = [s for s, may in enumerate(legal[Op.GERMINATE]) if may and s not in busy]
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
        return Actions.of(rows), worth


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
        choices = [_pick(masks.head(head).float(), draws[:, head]) for head in Head]
        choices[Head.SLOT], choices[Head.OP] = _pick(slots.float(), draws[:, Head.SLOT]), op
        mean, spread = RANDOM_WORTH
        worth = random_normal(self._seed, self._members, Stream.CONTROL, step, slots.shape[1])
        return Actions(torch.stack(choices, dim=1)), mean + spread * worth


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """One choice per row with a chance in proportion to its weight.  # [N, choices], [N] -> [N]"""
    below = weights.cumsum(dim=1)
    return (below <= uniform.unsqueeze(1) * below[:, -1:]).sum(dim=1)


@dataclass(frozen=True)
class ToyWorld:
    """A world in which no network is trained, but the evidence moves as real evidence does.

    Every seed has a hidden worth and a skill, each [N, S], in percentage points. It learns towards its worth
    while it trains; what is heard of it shows as contribution, and in the accuracy of its member.
    """

    seed: int
    worth: Tensor
    skill: Tensor

    @staticmethod
    def new(seed: int, num_members: int, num_slots: int) -> ToyWorld:
        """A world in which nothing grows yet."""
        blank = torch.zeros(num_members, num_slots)
        return ToyWorld(seed, blank, blank)

    def sown(self, where: Tensor, worth: Tensor) -> ToyWorld:
        """New seeds of the given worth, which know nothing yet.  # [N, S] each"""
        return ToyWorld(self.seed, torch.where(where, worth, self.worth), self.skill.masked_fill(where, 0.0))

    def trained(self, states: SlotStates) -> ToyWorld:
        """One epoch: whatever is trained comes closer to its worth."""
        learns = stage_table(HEARD_STAGES | {Stage.TRAINING})[states.stage]
        step = LEARNING_RATE * (self.worth - self.skill)
        return ToyWorld(self.seed, self.worth, torch.where(learns, self.skill + step, self.skill))

    def evidence(self, states: SlotStates, step: int) -> SlotEvidence:
        """What the gates get to see of it: nothing about a slot without a seed that learns or is heard."""
        members, slots = self.skill.shape
        noise = NOISE * random_normal(self.seed, torch.arange(members), Stream.TASK, step, slots)
        heard = stage_table(HEARD_STAGES)[states.stage]
        trains = heard | (states.stage == Stage.TRAINING)
        unknown = torch.full_like(noise, float("nan"))
        return SlotEvidence.unmeasured(members, slots).replace(
            contribution=torch.where(heard, states.alpha * self.skill + noise, unknown),
            shadow_gain=torch.where(states.stage == Stage.TRAINING, self.skill + noise, unknown),
            gradient_norm=torch.where(trains, (1.0 + noise).abs(), unknown),
            gradient_health=torch.where(trains, (0.95 - noise.abs() / 4).clamp(0, 1), unknown),
            gradient_ratio=torch.where(trains, 0.5 + noise / 4, unknown),
            vanishing=torch.where(trains, 0.0, unknown),
            exploding=torch.where(trains, 0.0, unknown),
        )

    def accuracy(self, states: SlotStates, step: int) -> Tensor:
        """Validation accuracy of each member.  # [N]"""
        host = HOST_END - (HOST_END - HOST_START) * math.exp(-step / HOST_STEPS)
        grown = (states.alpha * self.skill).sum(dim=1) / 100
        return (host + grown).clamp(0, 1)


def film_episode(player: ScriptedPlayer | RandomPlayer, num_slots: int, steps: int, seed: int) -> FilmReel:
    """Let the player decide for `steps` steps: train, decide, apply, film, tick."""
    num_members, slot_config = len(player.titles), SlotConfig.grid(1, num_slots)
    states = SlotStates.empty(num_members, num_slots)
    world = ToyWorld.new(seed, num_members, num_slots)
    frames = []
    for step in range(steps):
        world = world.trained(states)
        accuracy = world.accuracy(states, step)
        actions, worth = player.decide(step, compute_batch_masks(states, slot_config, RULES, TOPOLOGY))
        outcome = apply(states, actions, world.evidence(states, step), RULES, TOPOLOGY)
        world = world.sown(outcome.germinated, worth)
        asked = {"op": actions[Head.OP], "op_slot": actions[Head.SLOT], "succeeded": outcome.succeeded}
        shown = {name: getattr(outcome.states, name) for name in ("stage", "alpha", "blueprint")}
        frames.append({**shown, **asked, "accuracy": accuracy})
        states = tick(outcome.states, RULES).states
    story = stacked(frames)  # each [T, N, ...]
    return FilmReel(
        films=[
            Film(m, title, slot_config.slot_ids, **{name: of[:, m].tolist() for name, of in story.items()})
            for m, title in enumerate(player.titles)
        ],
        **NAMES,
    )
