"""N members trained as one program: weights, optimizer state and running statistics as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, Blend, Blueprint, blend_of
from esper.lifecycle.slot_states import SlotStates
from esper.population.bodies import Bodies
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.first_weights import HostBank, SeedBank
from esper.population.forms import HALVES, NO_FORM, cloned_forms, last_forms, lead_classes
from esper.population.hosts import Host
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.objectives import CLASSIFICATION, Objective
from esper.population.optimizer import RowWeights
from esper.population.plan import (
    NO_BLEND,
    Ints,
    Plan,
    SlotView,
    measurement_rows,
    shadow_table,
    ship_to,
    training_rows,
)
from esper.population.planning import Sketch
from esper.population.replays import Replays
from esper.population.schedule import Rewarming, rate_share
from esper.population.stepping import Crew
from esper.population.surgery import Events, Surgeon
from esper.utils.graphs import Graphed, GraphPool, copy_all
from esper.utils.rows import flags_of_rows, map_tensors, put_rows, tensors_of
from esper.utils.streams import Stream, random_bits

LARGEST_ORDER = 1 << 22  # samples of all members: a larger order is not captured, which would keep its memory


class Population:
    """The bodies of N members. Which seeds live where is told by the `SlotStates` that come in."""

    def __init__(
        self,
        make_host: Callable[[], Host],
        config: PopulationConfig,
        members: Tensor,
        seed: int = 0,
        device: torch.device | str = "cpu",
        objective: Objective = CLASSIFICATION,
    ):
        if members.ndim != 1 or members.shape[0] == 0 or members.is_floating_point():
            raise ValueError(
                f"members is {members.dtype} of shape {tuple(members.shape)}; give whole numbers, at least "
                "one: torch.arange(N)"
            )
        self.config = config
        self.seed = seed
        self.device = torch.device(device)
        self.members, self._member_ids = members.to(self.device), members.cpu()  # [N] global ids
        self.bodies = Bodies(make_host, config, self.device)
        self.num_members, self.num_slots = members.shape[0], len(self.bodies.slots)
        self.hosts = RowWeights.zeros(self.num_members, self.bodies.host_width, self.device)
        most = max(slot.repeats for slot in self.bodies.slots)
        self.places = 1 + self.bodies.has_blocks + config.folds * most
        shape = (self.num_members, self.num_slots)
        rows = self.places * self.num_members * self.num_slots
        # Seeds first, see `Surgeon`; the last row is nobody's and stays 0.
        self.parts, self._blank = RowWeights.zeros(rows + 1, self.bodies.part_width, self.device), rows
        self.forms = torch.full((*shape, self.places), NO_FORM, device=self.device)  # [N, S, places] int64
        self.folded_blends = torch.zeros(*shape, self.places - 1, dtype=torch.long, device=self.device)
        self._born = torch.full(shape, NO_FORM, device=self.device)  # [N, S] blueprints without weights yet
        self._folding = torch.full(shape, NO_BLEND, device=self.device)  # [N, S] how waiting fossils blend
        self.births = torch.zeros(self.num_members, dtype=torch.long, device=self.device)
        self._parameters = self.bodies.parameter_table.to(self.device)
        self._gates = self.bodies.gate_parameters().to(self.device)
        self._fits = torch.tensor(  # [S, blueprints]
            [[b in slot.blueprints for b in range(NUM_BLUEPRINTS)] for slot in self.bodies.slots],
            device=self.device,
        )
        repeats = [slot.repeats for slot in self.bodies.slots]
        self._repeats_two = torch.tensor(repeats, device=self.device) == 2  # [S] bool
        self.finished = torch.zeros(self.num_members, dtype=torch.bool, device=self.device)
        self.rate_scale = torch.ones(self.num_members, device=self.device)  # [N] each member's own peak rate
        self.rewarming = Rewarming(*shape, config.rewarm, self.device) if config.rewarm else None
        self._host_bank = HostBank(self.bodies, seed)
        self._seed_bank = SeedBank(self.bodies, seed, config.seed_weights)
        self._order: DataOrder | None = None
        self._replays = Replays(Crew(self.bodies, objective, config, self.hosts, self.parts))
        self._pool = GraphPool() if self._replays.possible else None  # of what is drawn
        self._picked, self._shared = Graphed(self._pick, self._pool), Graphed(self._share, self._pool)
        self._latest: tuple[object, SlotView] | None = None  # what the last look saw, and what it looked at
        self.begin_episode(0)

    # ---- birth and death -------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Every member begins anew with the initial weights that belong to (run seed, member, episode)."""
        draws = random_bits(self.seed, self._member_ids, Stream.HOST_INIT, episode, 1).squeeze(1)
        hosts, blocks = self._host_bank.rows(draws % self.config.initial_weights)
        self.hosts.restart(hosts)
        self.parts.restart(torch.zeros_like(self.parts.weights))
        self.forms.fill_(NO_FORM)
        for s, slot in enumerate(self.bodies.slots):
            if slot.branch is not None:
                self.forms[:, s, 1] = self.bodies.codes.block
        if self.bodies.has_blocks:
            first = self.num_members * self.num_slots  # of the rows at place 1
            rows = blocks.flatten(0, 1)  # [N · S, part_width]
            self.parts.weights[first : first + len(rows)] = rows
        self.births.fill_(episode << 16)
        self._born.fill_(NO_FORM)
        self._folding.fill_(NO_BLEND)
        self.finished.fill_(False)
        if self.rewarming is not None:
            self.rewarming.begin()
        self.idle = False  # nobody is left to train, as of the latest look
        self._replays.release()

    @property
    def replays(self) -> bool:
        """Whether training and validation are captured and replayed."""
        return self._replays.possible

    @property
    def seeds(self) -> RowWeights:
        """The rows of the seeds: member by member, slot by slot. Views."""
        return self.parts.slice(0, self.num_members * self.num_slots)

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Seeds begin in the slots where True; their weights are written at the next look.  # [N, S] each"""
        self._born.copy_(torch.where(where, blueprint, self._born))
        if self.rewarming is not None:
            self.rewarming.plant(where)
        if self.bodies.has_blocks:
            clones = cloned_forms(self.forms, self._repeats_two, self.bodies.codes)
            blueprint = torch.where(blueprint == Blueprint.CLONE, clones, blueprint)
        self.forms[:, :, 0] = torch.where(where, blueprint, self.forms[:, :, 0])

    def prune(self, where: Tensor) -> None:
        """The seeds where True end.  # where [N, S]"""
        self._born.masked_fill_(where, NO_FORM)
        self.forms[:, :, 0] = self.forms[:, :, 0].masked_fill(where, NO_FORM)

    def fold(self, where: Tensor, style: Tensor) -> None:
        """The fossils where True become part of their hosts at the next look.  # [N, S] each

        style: as it was before the rules emptied the slot
        """
        self._folding.copy_(torch.where(where, blend_of(style), self._folding))
        if self.rewarming is not None:
            self.rewarming.fold(where)

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
        if self._latest is not None and self._latest[0] == self._shown(states):
            return self._latest[1]
        picks = self._picked(self.births)  # in case of births: asked for before the device is waited for
        view, born = SlotView.read(states, self.forms, self.folded_blends, self._flags())
        self.bodies.check_forms(view, born)
        births, folds = Events(*np.nonzero(born != NO_FORM)), Events(*np.nonzero(view.fold != NO_BLEND))
        self.idle = not view.active.any()
        if len(births.member) + len(folds.member):
            self._operate(view, births, born, folds, picks)
        self._latest = self._shown(states), view
        return view

    def _shown(self, states: SlotStates) -> list[tuple[int, int]]:
        """What a look would look at, as tensors and how often they were written."""
        own = (self.forms, self.folded_blends, self._folding, self._born, self.finished)
        asked = (states.stage, states.style, states.alpha_mode, states.alpha)
        self._kept = (*own, *asked)  # so that no other tensor can stand in their places
        return [(id(tensor), tensor._version) for tensor in self._kept]

    def _operate(self, view: SlotView, births: Events, born: Ints, folds: Events, picks: Tensor) -> None:
        """Carry out births and folds; forms and blends of the view are changed in place by folds.

        picks [N, S]: random words for the births
        """
        surgeon = Surgeon(self.parts, self.bodies, self.config, view.form, view.blend[:, :, 1:])
        if len(births.member):
            surgeon.bear(births, born[births.member, births.slot], self._seed_bank, picks)
            self.births.add_((self._born != NO_FORM).any(dim=1))
            self._born.fill_(NO_FORM)
        if len(folds.member):
            surgeon.fold(folds, view.fold[folds.member, folds.slot])
            self._folding.fill_(NO_BLEND)
            ship_to(self.forms, view.form)
            ship_to(self.folded_blends, view.blend[:, :, 1:])

    def _pick(self, births: Tensor) -> Tensor:
        """Random words for the next seeds of all slots.  # births [N] → [N, S]"""
        return random_bits(self.seed, self.members, Stream.SEED_INIT, births, self.num_slots)

    # ---- training and validation -----------------------------------------------------------------------

    def train_epoch(self, states: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        """One epoch for every member that is not finished: hosts and heard seeds together, isolated seeds in
        their shadows. What a finished member would have shown is NaN."""
        self._check(states, data)
        # What follows from the clock is asked for first, while the device is busy with what came before.
        metrics = TrainMetrics.unmeasured(self.num_members, self.num_slots, self.device)
        rates, samples = self._rates(states, clock), self._samples(data.num_samples, clock)
        for some in self._chunks(self.look(states)):
            rows = training_rows(some)
            sketch = Sketch(rows, some, (shadow_table(rows, some.shape),), self._blank)
            epoch = self._replays.training(sketch, data)
            epoch.load(samples, rates)
            epoch.begin()
            for _ in range(len(samples)):
                epoch()
            _put(metrics, epoch.plan, some, epoch.finish())
        return metrics

    def _samples(self, num_samples: int, clock: Clock) -> Tensor:
        """The samples of every minibatch of an epoch.  # [batches, N, B]"""
        order, batches = self._data_order(num_samples), self.config.batches_per_epoch
        return torch.stack([order.batch(clock.episode, clock.epoch * batches + b) for b in range(batches)])

    def _rates(self, states: SlotStates, clock: Clock) -> Tensor:
        """The share of the peak learning rate of every minibatch of an epoch.  # [batches, N]"""
        batches = self.config.batches_per_epoch
        rates = self._shared(clock.done(batches, self.members))
        if self.rewarming is None:
            return rates
        return rates * self.rewarming.shares(states, ~self.finished, batches)

    def _share(self, done: Tensor) -> Tensor:
        """done: how far each member has come before each minibatch.  # [batches, N] → [batches, N]"""
        return rate_share(done, self.config) * self.rate_scale

    @torch.no_grad()
    def validate(
        self, states: SlotStates, data: MemberData, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Loss, accuracy and the worth of each seed, of everyone or of the unfinished members alone."""
        self._check(states, data)
        view = self.look(states)
        if not unfinished:
            view = replace(view, active=np.ones_like(view.active))
        metrics = ValidationMetrics.unmeasured(*view.shape, self.device)
        for some in self._chunks(view):
            wanted = measurement_rows(some, ablate)
            tables = (wanted.without, wanted.shadow)
            validation = self._replays.validation(Sketch(wanted.rows, some, tables, self._blank), data)
            _put(metrics, validation.plan, some, validation())
        return metrics

    # ---- counting, saving ------------------------------------------------------------------------------

    @property
    def topology(self) -> str:
        return self.bodies.host.topology

    @property
    def host_parameters(self) -> int:
        return self.bodies.host_parameters

    def seed_parameters(self) -> Tensor:
        return self.bodies.seed_parameters()

    def gate_parameters(self) -> Tensor:
        return self.bodies.gate_parameters()

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
        named |= {} if self.rewarming is None else self.rewarming.tensors()
        each = self.num_members * self.num_slots
        for place in range(self.places):
            rows = self.parts.slice(place * each, (place + 1) * each)
            named |= {f"parts.{place}.{name}": value for name, value in rows.tensors().items()}
        return named

    def snapshot(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.tensors().items()}

    def take_over(self, source: Tensor) -> None:
        """Every member goes on as a copy of another, or of itself, in all of its rows.  # source [N] int64"""
        for value in self.tensors().values():
            rows = value.unflatten(0, (self.num_members, -1))  # a member's slots lie together
            value.copy_(rows.index_select(0, source).flatten(0, 1))

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """A snapshot with the rows of now for the members where True; written in place.  # where [N]"""
        for name, value in self.tensors().items():
            torch.where(flags_of_rows(where, value), value, saved[name], out=saved[name])
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
            if where is None:
                value.copy_(saved[name])
            else:
                torch.where(flags_of_rows(where, value), saved[name].to(self.device), value, out=value)

    def _check(self, states: SlotStates, data: MemberData) -> None:
        """Raise ValueError where slot states or data are not those of these members."""
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

    def _chunks(self, view: SlotView) -> Iterator[SlotView]:
        """The members that are not finished, some at a time.

        Where steps are captured, as many finished ones stand among them as make up one of few numbers.
        """
        active, finished = np.flatnonzero(view.active), np.flatnonzero(~view.active)
        most = min(self.config.rows_per_chunk, len(view.active))
        for start in range(0, len(active), most):
            ids = active[start : start + most]
            if self._replays.possible:
                ids = np.concatenate([ids, finished[: _up_to(len(ids), most) - len(ids)]])
            yield view.of(ids)

    def _data_order(self, num_samples: int) -> DataOrder:
        if self._order is None or self._order.num_samples != num_samples:
            small = self.num_members * num_samples <= LARGEST_ORDER
            batch, pool = self.config.batch_size, self._pool if small else None
            self._order = DataOrder(self.seed, self.members, num_samples, batch, pool)
        return self._order


def _up_to(count: int, most: int) -> int:
    """The least number that is not below `count` of most, 3/4, 1/2, 3/8, 1/4 of it and so on."""
    size = most
    while size // 2 >= count:
        size //= 2
    return size * 3 // 4 if size * 3 // 4 >= count else size


def _put(metrics: TrainMetrics | ValidationMetrics, plan: Plan, view: SlotView, part: object) -> None:
    """Write what was measured of the members of a view that are not finished; they come first."""
    count = int(view.active.sum())
    if count == len(metrics.loss):  # everyone, in order
        copy_all(tensors_of(metrics).values(), tensors_of(part).values())
        return
    put_rows(metrics, plan.ids[:count], map_tensors(lambda tensor: tensor[:count], part))
