"""N members trained as one program: weights, optimiser state and running statistics as rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esper.foundation.rows import fit
from esper.foundation.streams import Stream, random_bits
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, Blend, Blueprint, blend_of
from esper.lifecycle.slot_states import SlotStates
from esper.population.bodies import Bodies, part_rows
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.forms import HALVES, NO_FORM, cloned_forms, last_forms, lead_classes
from esper.population.gradients import measure_seeds
from esper.population.hosts import Host
from esper.population.metrics import TrainMetrics, ValidationMetrics, worth_of_seeds
from esper.population.objectives import OBJECTIVES, Objective
from esper.population.optimiser import RowWeights, moment_decays
from esper.population.plan import (
    NO_BLEND,
    Ints,
    Plan,
    SlotView,
    build_plan,
    measurement_rows,
    ship,
    training_rows,
)
from esper.population.row_module import Buffers
from esper.population.schedule import rate_share
from esper.population.stepping import Learners, Replays, TrainStep
from esper.population.surgery import Events, SeedBank, Surgeon


class Population:
    """The bodies of N members. Which seeds live where is told by the `SlotStates` that come in."""

    def __init__(
        self,
        make_host: Callable[[], Host],
        config: PopulationConfig,
        members: Tensor,
        seed: int = 0,
        device: torch.device | str = "cpu",
        objective: str | Objective = "classification",
    ):
        if isinstance(objective, str) and objective not in OBJECTIVES:
            raise ValueError(f"objective is {objective!r}; allowed are {', '.join(OBJECTIVES)}")
        if members.ndim != 1 or members.shape[0] == 0 or members.is_floating_point():
            raise ValueError(
                f"members is {members.dtype} of shape {tuple(members.shape)}; give whole numbers, at least "
                "one: torch.arange(N)"
            )
        self.config = config
        self.seed = seed
        self.device = torch.device(device)
        self.members = members.to(self.device)  # [N] global ids
        self.objective = OBJECTIVES[objective] if isinstance(objective, str) else objective
        self.bodies = Bodies(make_host, config, self.device)
        self.num_members, self.num_slots = members.shape[0], len(self.bodies.slots)
        self.hosts = RowWeights.zeros(self.num_members, self.bodies.host_width, self.device)
        most = max(slot.repeats for slot in self.bodies.slots)
        self.places = 1 + self.bodies.has_blocks + config.folds * most
        shape = (self.num_members, self.num_slots)
        rows = self.places * self.num_members * self.num_slots
        self.parts = RowWeights.zeros(rows, self.bodies.part_width, self.device)  # seeds first: see `Surgeon`
        self.forms = torch.full((*shape, self.places), NO_FORM, device=self.device)  # [N, S, places] int64
        self.folded_blends = torch.zeros(*shape, self.places - 1, dtype=torch.long, device=self.device)
        self._born = torch.full(shape, NO_FORM, device=self.device)  # [N, S] blueprints without weights yet
        self._folding = torch.full(shape, NO_BLEND, device=self.device)  # [N, S] how waiting fossils blend
        self.buffers = self.bodies.initial_buffers(self.num_members)
        self.births = torch.zeros(self.num_members, dtype=torch.long, device=self.device)
        self._parameters = self.bodies.parameter_table().to(self.device)
        self._gates = self.bodies.gate_parameters().to(self.device)
        self._fits = torch.tensor(  # [S, blueprints]
            [[b in slot.blueprints for b in range(NUM_BLUEPRINTS)] for slot in self.bodies.slots],
            device=self.device,
        )
        repeats = [slot.repeats for slot in self.bodies.slots]
        self._repeats_two = torch.tensor(repeats, device=self.device) == 2  # [S] bool
        self.finished = torch.zeros(self.num_members, dtype=torch.bool, device=self.device)
        self.rate_scale = torch.ones(self.num_members, device=self.device)  # [N] each member's own peak rate
        self._host_bank: dict[int, tuple[Tensor, Tensor]] = {}
        self._seed_bank = SeedBank(self.bodies, seed, config.seed_weights)
        self._order: DataOrder | None = None
        self._replays = Replays(self.bodies, config)
        self.begin_episode(0)

    # ---- birth and death -------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Every member begins anew with the initial weights that belong to (run seed, member, episode)."""
        draws = random_bits(self.seed, self.members, Stream.HOST_INIT, episode, 1).squeeze(1)
        picks = (draws % self.config.initial_weights).tolist()
        for pick in sorted(set(picks) - set(self._host_bank)):
            self._host_bank[pick] = self.bodies.initial_host(hash((self.seed, pick)) & 0x7FFFFFFF)
        hosts, blocks = zip(*(self._host_bank[pick] for pick in picks), strict=True)
        self.hosts.restart(torch.stack(hosts).to(self.device))
        self.parts.restart(torch.zeros_like(self.parts.weights))
        self.forms.fill_(NO_FORM)
        for s, slot in enumerate(self.bodies.slots):
            if slot.branch is not None:
                self.forms[:, s, 1] = self.bodies.codes.block
        if self.bodies.has_blocks:
            first = self.num_members * self.num_slots  # of the rows at place 1
            rows = torch.stack(blocks).to(self.device).flatten(0, 1)  # [N · S, part_width]
            self.parts.weights[first : first + len(rows)] = rows
        self.buffers = self.bodies.initial_buffers(self.num_members)
        self.births = torch.full_like(self.births, episode << 16)
        self._born.fill_(NO_FORM)
        self._folding.fill_(NO_BLEND)
        self.finished.fill_(False)
        self.idle = False  # nobody is left to train, as of the latest look
        self._replays.release()

    @property
    def seeds(self) -> RowWeights:
        """The rows of the seeds: member by member, slot by slot. Views."""
        return self.parts.slice(0, self.num_members * self.num_slots)

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Seeds begin in the slots where True; their weights are written at the next look.  # [N, S] each"""
        self._born = torch.where(where, blueprint, self._born)
        if self.bodies.has_blocks:
            clones = cloned_forms(self.forms, self._repeats_two, self.bodies.codes)
            blueprint = torch.where(blueprint == Blueprint.CLONE, clones, blueprint)
        self.forms[:, :, 0] = torch.where(where, blueprint, self.forms[:, :, 0])

    def prune(self, where: Tensor) -> None:
        """The seeds where True end.  # where [N, S]"""
        self._born = self._born.masked_fill(where, NO_FORM)
        self.forms[:, :, 0] = self.forms[:, :, 0].masked_fill(where, NO_FORM)

    def fold(self, where: Tensor, style: Tensor) -> None:
        """The fossils where True become part of their hosts at the next look.  # [N, S] each

        style: as it was before the rules emptied the slot
        """
        self._folding = torch.where(where, blend_of(style), self._folding)

    @property
    def folding(self) -> Tensor:
        """Where a fossil waits to become part of its host.  # [N, S] bool"""
        return self._folding != NO_BLEND

    def growable(self) -> Tensor:
        """Which blueprints fit what stands ahead of each slot now.  # [N, S, blueprints] bool"""
        codes, last = self.bodies.codes, last_forms(self.forms)
        fits = self._fits.expand(self.num_members, -1, -1).clone()
        for b in GROWTH_BLUEPRINTS:
            room = codes.lead - HALVES.get(b, 0)
            fits[:, :, b] &= (last >= codes.block) & (last < room)
        fits[:, :, Blueprint.CLONE] &= ~self._repeats_two | (lead_classes(self.forms, codes) != NO_FORM)
        return fits

    def _flags(self) -> Tensor:
        """What waits (how fossils to be folded blend, births by blueprint), who is finished.  # [N, S, 3]"""
        finished = self.finished.unsqueeze(1).expand_as(self._born)
        return torch.stack([self._folding, self._born, finished], dim=2)

    def look(self, states: SlotStates) -> SlotView:
        """What shapes the work, in one read of the device; births and folds that wait are carried out.

        Raises ValueError for a seed that has no body at its slot.
        """
        view, born = SlotView.read(states, self.forms, self.folded_blends, self._flags())
        self.bodies.check_forms(view, born)
        births, folds = Events(*np.nonzero(born != NO_FORM)), Events(*np.nonzero(view.fold != NO_BLEND))
        self.idle = not view.active.any()
        if len(births.member) + len(folds.member) == 0:
            return view
        surgeon = Surgeon(self.parts, self.bodies, view.form, view.blend[:, :, 1:])
        if len(births.member):
            picks = random_bits(self.seed, self.members, Stream.SEED_INIT, self.births, self.num_slots)
            surgeon.bear(births, born[births.member, births.slot], self._seed_bank, picks)
            self.births = self.births + (self._born != NO_FORM).any(dim=1)
            self._born = torch.full_like(self._born, NO_FORM)
        if len(folds.member):
            surgeon.fold(folds, view.fold[folds.member, folds.slot], moment_decays(self.config))
            self._folding = torch.full_like(self._folding, NO_BLEND)
            self.forms.copy_(ship(view.form, self.device))
            self.folded_blends.copy_(ship(view.blend[:, :, 1:], self.device))
        return view

    # ---- training --------------------------------------------------------------------------------------

    def train_epoch(self, states: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        """One epoch for every member that is not finished: hosts and heard seeds together, isolated seeds in
        their shadows. What a finished member would have shown is NaN."""
        view = self._view(states, data)
        order = self._data_order(data.num_samples)
        metrics = TrainMetrics.unmeasured(*view.shape, self.device)
        for ids in self._chunks(view):
            metrics.put(ship(ids, self.device), self._train_chunk(view.of(ids), data, order, clock, ids))
        return metrics

    def _train_chunk(
        self, view: SlotView, data: MemberData, order: DataOrder, clock: Clock, ids: Ints
    ) -> TrainMetrics:
        chosen = ship(ids, self.device)
        rows = training_rows(view)
        plan = build_plan(rows, view, self.device)
        with self._borrowed(ids) as (hosts, buffers):
            step = TrainStep(
                self.bodies,
                self.objective,
                self.config,
                plan,
                self._learners(plan, view, hosts, buffers, chosen),
            )
            run, data = self._replays.runner(step), data.members(chosen)
            scale = self.rate_scale.index_select(0, chosen)
            for b in range(self.config.batches_per_epoch):
                index = clock.epoch * self.config.batches_per_epoch + b
                samples = order.batch(clock.episode, index).index_select(0, chosen)
                done = clock.done(b, self.config.batches_per_epoch, self.members).index_select(0, chosen)
                count = torch.full((), (clock.episode << 20) + index, dtype=torch.long, device=self.device)
                run(*data.take(samples), rate_share(done, self.config) * scale, count)
            self.parts.put(plan.live, step.learners.parts)
        mean = step.total_loss / self.config.batches_per_epoch
        shadow = torch.full(view.shape, math.nan, device=self.device)
        if plan.num_rows > plan.own:
            slot = ship(rows.shadow_slot[plan.own :], self.device)
            shadow.index_put_((plan.members[plan.own :], slot), mean[plan.own :])
        measured = measure_seeds(self.bodies, plan, step.part_gradient, step.host_norm, view.shape)
        return TrainMetrics(mean[: plan.own], shadow, step.host_norm, measured)

    def _learners(
        self, plan: Plan, view: SlotView, hosts: RowWeights, buffers: list[Buffers], ids: Tensor
    ) -> Learners:
        """These members, and the parts that live in a row; seeds that fade out do not learn."""
        frozen = ship(view.frozen, self.device)  # [n, S]
        fading = frozen[plan.live_member, plan.live_slot.clamp(min=0)] & (plan.live_slot >= 0)
        members = self.members.index_select(0, ids)
        return Learners(hosts, self.parts.take(plan.live), buffers, ~fading, members, self.seed)

    @contextmanager
    def _borrowed(self, ids: Ints) -> Iterator[tuple[RowWeights, list[Buffers]]]:
        """Host rows and buffers of some members: views where they lie side by side, else copies put back."""
        if np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
            here = slice(int(ids[0]), int(ids[0]) + len(ids))
            views = [{name: value[here] for name, value in part.items()} for part in self.buffers]
            yield self.hosts.slice(here.start, here.stop), views
            return
        index = ship(ids, self.device)
        rows = self.hosts.take(index)
        copies = [
            {name: value.index_select(0, index) for name, value in part.items()} for part in self.buffers
        ]
        yield rows, copies
        self.hosts.put(index, rows)
        for part, used in zip(self.buffers, copies, strict=True):
            for name, value in part.items():
                value.index_copy_(0, index, used[name])

    # ---- validation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(
        self, states: SlotStates, data: MemberData, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Loss, accuracy and the worth of each seed, of everyone or of the unfinished members alone."""
        view = self._view(states, data)
        if not unfinished:
            view = replace(view, active=np.ones_like(view.active))
        metrics = ValidationMetrics.unmeasured(*view.shape, self.device)
        for ids in self._chunks(view):
            metrics.put(ship(ids, self.device), self._validate_chunk(view.of(ids), data, ablate, ids))
        return metrics

    def _validate_chunk(self, view: SlotView, data: MemberData, ablate: bool, ids: Ints) -> ValidationMetrics:
        wanted = measurement_rows(view, ablate, self.config.measure_pairs)
        plan = build_plan(wanted.rows, view, self.device)
        chosen = ship(ids, self.device)
        with self._borrowed(ids) as (hosts, buffers):
            loss, accuracy = self._evaluate(plan, data.members(chosen), hosts, buffers)
        return ValidationMetrics(
            loss=loss[: plan.own], accuracy=accuracy[: plan.own], **worth_of_seeds(wanted, accuracy, plan.own)
        )

    def _evaluate(
        self, plan: Plan, data: MemberData, hosts: RowWeights, buffers: list[Buffers]
    ) -> tuple[Tensor, Tensor]:
        """Mean loss and score of each row over the validation samples.  # [R], [R]"""
        rows = hosts.weights.index_select(0, plan.members)
        parts = part_rows(plan, self.parts.weights.index_select(0, plan.live))
        buffers = [{n: value.index_select(0, plan.members) for n, value in part.items()} for part in buffers]
        samples = min(data.num_samples, self.config.validation_samples)
        loss = torch.zeros(plan.num_rows, device=self.device)
        score = torch.zeros(plan.num_rows, device=self.device)
        kept: list[Tensor] = []
        for first in range(0, samples, self.config.validation_batch):
            last = min(first + self.config.validation_batch, samples)
            inputs, _ = data.span(plan.members[: plan.own], first, last)
            _, targets = data.span(plan.members, first, last)
            outputs = self.bodies.forward(plan, rows, parts, inputs, buffers, training=False)
            loss += self.objective.loss(outputs, targets) * (last - first)
            if self.objective.pooled:
                kept.append(outputs)
            else:
                score += self.objective.score(outputs, targets) * (last - first)
        if kept:
            _, targets = data.span(plan.members, 0, samples)
            return loss / samples, self.objective.score(torch.cat(kept, dim=1), targets)
        return loss / samples, score / samples

    # ---- counting, saving ------------------------------------------------------------------------------

    def parameter_counts(self, states: SlotStates) -> Tensor:
        """Parameters of each member: its host, what was folded in and every seed that it holds.  # [N]"""
        slot = torch.arange(self.num_slots, device=self.device).unsqueeze(1)
        sizes = self._parameters[slot, self.forms.clamp(min=0)] * (self.forms != NO_FORM)  # [N, S, places]
        gates = self.gated(states) * self._gates.unsqueeze(1)
        return self.bodies.host_width + (sizes + gates).sum(dim=(1, 2))

    def gated(self, states: SlotStates) -> Tensor:
        """Where a part blends through a gate.  # [N, S, places] bool"""
        plain = (self.forms >= 0) & (self.forms < min(GROWTH_BLUEPRINTS))
        seeds = torch.where(self.folding, self._folding, blend_of(states.style)).unsqueeze(2)
        return plain & (torch.cat([seeds, self.folded_blends], dim=2) == Blend.GATE)

    def tensors(self) -> dict[str, Tensor]:
        """All rows as plain tensors: what a checkpoint or a snapshot holds. Views, not copies."""
        named = {"births": self.births, "born": self._born, "finished": self.finished}
        named |= {"forms": self.forms, "folded_blends": self.folded_blends, "folding": self._folding}
        named |= {f"hosts.{name}": value for name, value in self.hosts.tensors().items()}
        each = self.num_members * self.num_slots
        for place in range(self.places):
            rows = self.parts.slice(place * each, (place + 1) * each)
            named |= {f"parts.{place}.{name}": value for name, value in rows.tensors().items()}
        for k, part in enumerate(self.buffers):
            named |= {f"buffers.{k}.{name}": value for name, value in part.items()}
        return named

    def snapshot(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.tensors().items()}

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """A snapshot with the rows of now for the members where True; written in place.  # where [N]"""
        for name, value in self.tensors().items():
            saved[name].copy_(torch.where(fit(where, value), value, saved[name]))
        return saved

    def restore(self, saved: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Take rows back from a snapshot: all of them, or those of the members where True.  # where [N]"""
        if where is not None and (where.shape != (self.num_members,) or where.dtype is not torch.bool):
            raise ValueError(
                f"where is {where.dtype} of shape {tuple(where.shape)}; give one truth value per member, "
                f"[{self.num_members}]"
            )
        current = self.tensors()
        if set(saved) != set(current):
            raise ValueError(f"the snapshot holds {sorted(saved)}; this population holds {sorted(current)}")
        for name, value in current.items():
            if saved[name].shape != value.shape:
                raise ValueError(
                    f"{name} is {tuple(saved[name].shape)} in the snapshot and {tuple(value.shape)} here; "
                    "restore into a population of the same members, host and slots"
                )
            chosen = saved[name].to(self.device)
            if where is not None:
                rows = where.repeat_interleave(value.shape[0] // self.num_members)
                chosen = torch.where(rows.view(-1, *[1] * (value.ndim - 1)), chosen, value)
            value.copy_(chosen)

    def _view(self, states: SlotStates, data: MemberData) -> SlotView:
        """The slot states on the host, refused where they or the data are not those of these members."""
        expected = (self.num_members, self.num_slots)
        if (states.num_members, states.num_slots) != expected:
            raise ValueError(
                f"the slot states are {(states.num_members, states.num_slots)}; this population has "
                f"{expected}: members, slots"
            )
        if data.task_of.shape[0] != self.num_members:
            raise ValueError(
                f"the data are for {data.task_of.shape[0]} members; this population has {self.num_members}"
            )
        return self.look(states)

    def _chunks(self, view: SlotView) -> Iterator[Ints]:
        """The members that are not finished, some at a time, as positions in all rows."""
        active = np.flatnonzero(view.active)
        for start in range(0, len(active), self.config.rows_per_chunk):
            yield active[start : start + self.config.rows_per_chunk]

    def _data_order(self, num_samples: int) -> DataOrder:
        if self._order is None or self._order.num_samples != num_samples:
            self._order = DataOrder(self.seed, self.members, num_samples, self.config.batch_size)
        return self._order
