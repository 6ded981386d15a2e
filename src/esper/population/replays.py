"""Captured steps that serve many plans: a CUDA graph is made for a room and replayed for all that fits it.

A new plan is laid out in the room of a program that exists, where one holds it and wastes little. Else a
program is made in a roomier room than is needed, joined with that of the nearest program, which it replaces:
so rooms settle at what a run needs. All programs share one pool of memory and one set of rows, and take what
the largest of them needs; they are dropped when this process holds more of the device's memory than it may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from esper.population.data import MemberData
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.plan import Kind, Plan, ship, ship_to
from esper.population.planning import Draft, Sketch
from esper.population.rooms import Room
from esper.population.stepping import Crew, Scratch, TrainEpoch, Validation
from esper.utils.graphs import GraphPool, TensorGraph

MOST = 24  # programs that are kept
WASTE = 1.08  # a room may cost this many times what a roomy new one would,
LIGHT_WASTE = 1.25, 1024  # or where rows are light so many times, and so many rows more
LIGHT = 1 << 16  # parameters of a host: with fewer, and less work than
LITTLE = 1 << 30  # values of activations in an epoch of all members, rows are light
_PLACES_FROM = {"cnn": 3, "transformer": 2}  # the first axis of space or time of inputs [tasks, samples, ...]

Run = TypeVar("Run")
Task = tuple[str, Hashable]  # what a program computes, and over which data


class EpochProgram(Protocol):
    """Anything that trains some members for an epoch: see `TrainEpoch`."""

    plan: Plan

    def load(self, samples: Tensor, rates: Tensor) -> None: ...
    def begin(self) -> None: ...
    def __call__(self) -> None: ...
    def finish(self) -> TrainMetrics: ...


class MeasureProgram(Protocol):
    """Anything that measures some members: see `Validation`."""

    plan: Plan

    def __call__(self) -> ValidationMetrics: ...


class ReplayedEpoch:
    """An epoch of training as three captured functions."""

    def __init__(self, epoch: TrainEpoch, pool: GraphPool, known: bool) -> None:
        self.plan, self.load = epoch.plan, epoch.load
        self.begin = TensorGraph(epoch.begin, pool, known)
        self.step = TensorGraph(epoch, pool, known)
        self.finish = TensorGraph(epoch.finish, pool, known)

    def __call__(self) -> None:
        self.step()


class ReplayedValidation(TensorGraph):
    """A validation as a captured function."""

    def __init__(self, validation: Validation, pool: GraphPool, known: bool) -> None:
        super().__init__(validation, pool, known)
        self.plan = validation.plan


@dataclass(eq=False)
class Program(Generic[Run]):
    """Something captured, in a room, whose plan can be exchanged for another one that fits."""

    kind: Task
    room: Room
    ints: Tensor
    alphas: Tensor
    run: Run

    def load(self, draft: Draft) -> None:
        """Go on with another plan."""
        ship_to(self.ints, draft.ints)
        ship_to(self.alphas, draft.alphas)


class Replays:
    """What trains and validates the members of one population: captured where device and bodies allow it."""

    def __init__(self, crew: Crew) -> None:
        bodies, config = crew.bodies, crew.config
        self.crew, self.device = crew, bodies.device
        self.possible = config.graphs and self.device.type == "cuda" and bodies.in_row_form
        self._programs: list[Program[Any]] = []  # the latest used comes last
        self._known: frozenset[Kind] = frozenset()
        self._seen: dict[Task, Room] = {}  # all that was ever needed
        self._looked_at: Hashable = None  # the data of the latest validation
        self._pool: GraphPool | None = None
        self._scratch = Scratch()

    def training(self, sketch: Sketch, data: MemberData) -> EpochProgram:
        """What trains the members of a sketch for one epoch."""
        if not self.possible:
            return TrainEpoch(self.crew, sketch.draft().on(self.device), data, Scratch())

        def make(plan: Plan, pool: GraphPool, known: bool) -> ReplayedEpoch:
            return ReplayedEpoch(TrainEpoch(self.crew, plan, data, self._scratch), pool, known)

        return self._fitting(("train", data.places), sketch, make, self._rows_are_light(data))

    def validation(self, sketch: Sketch, data: MemberData) -> MeasureProgram:
        """What measures the members of a sketch; captured from the second look at the same data on."""
        seen, self._looked_at = self._looked_at, data.places
        if not self.possible or seen != data.places:
            return Validation(self.crew, sketch.draft().on(self.device), data)

        def make(plan: Plan, pool: GraphPool, known: bool) -> ReplayedValidation:
            return ReplayedValidation(Validation(self.crew, plan, data), pool, known)

        return self._fitting(("validate", data.places), sketch, make, self._rows_are_light(data))

    def _rows_are_light(self, data: MemberData) -> bool:
        """Whether spare rows in every epoch cost less than a capture now and then."""
        bodies, config = self.crew.bodies, self.crew.config
        host = bodies.host
        places = math.prod(data.inputs.shape[_PLACES_FROM.get(host.topology, data.inputs.ndim) :])
        samples = len(data.task_of) * config.batch_size * config.batches_per_epoch
        return bodies.host_parameters < LIGHT and samples * places * max(host.widths) < LITTLE

    def _fitting(
        self, kind: Task, sketch: Sketch, make: Callable[[Plan, GraphPool, bool], Run], light: bool
    ) -> Run:
        """The program that a sketch goes into, with the sketch in it."""
        seen = self._seen.get(kind, sketch.need)
        self._seen[kind] = seen if seen.holds(sketch.need) else sketch.need.joined(seen) or sketch.need
        roomy = sketch.need.roomier(light)
        limit = _limit(roomy, light)
        same = [program for program in self._programs if program.kind == kind]
        held = [p for p in same if p.room.cost <= limit and p.room.holds(sketch.need)]
        program: Program[Run]
        if held:
            program = min(held, key=lambda p: p.room.cost)
            program.load(sketch.draft(program.room))
            self._programs.remove(program)
        else:
            room = self._room_beside(roomy, same, self._seen[kind].roomier(light), light)
            program = self._new(kind, room, sketch.draft(room), make)
        self._programs = [*self._programs[1 - MOST :], program]
        return program.run

    def _room_beside(self, roomy: Room, same: list[Program[Any]], all_seen: Room, light: bool) -> Room:
        """A new room: for all that was ever needed, or joined with that of the program that need grow least.

        The program goes whose room is joined or held by it. Neither is done where it would waste much.
        """
        limit = _limit(roomy, light)
        if all_seen.cost <= limit:
            near = [p for p in same if all_seen.holds(p.room) and all_seen.cost <= _limit(p.room, light)]
            self._programs = [p for p in self._programs if p not in near]
            return all_seen
        joined = [(room, p) for p in same if (room := p.room.joined(roomy)) and room.cost <= limit]
        joined = [(room, p) for room, p in joined if room.cost <= _limit(p.room, light)]
        if not joined:
            return roomy
        room, nearest = min(joined, key=lambda pair: pair[0].cost - pair[1].room.cost)
        self._programs.remove(nearest)
        return room

    def _new(
        self, kind: Task, room: Room, draft: Draft, make: Callable[[Plan, GraphPool, bool], Run]
    ) -> Program[Run]:
        if self._pool is None:
            self._pool = GraphPool()
        ints, alphas = ship(draft.ints, self.device), ship(draft.alphas, self.device, torch.float32)
        plan = draft.cut(ints, alphas)
        needed = {(kind[0], *one) for one in plan.kinds}
        run = make(plan, self._pool, needed <= self._known)
        self._known |= needed
        return Program(kind, room, ints, alphas, run)

    def release(self) -> None:
        """Drop all programs once this process holds more of the device's memory than it may."""
        if self._pool is None:
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if torch.cuda.memory_reserved(self.device) > self.crew.config.graph_memory * total:
            self._programs, self._pool, self._scratch = [], None, Scratch()
            torch.cuda.empty_cache()


def _limit(room: Room, light: bool) -> float:
    """What a room may cost that is used instead of this one."""
    times, more = LIGHT_WASTE if light else (WASTE, 0)
    return times * room.cost + more
