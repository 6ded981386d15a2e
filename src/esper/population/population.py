"""N members trained as one program: weights and optimizer state as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import FIRST_GROWTH, GROWTH_BLUEPRINTS, Blend, Blueprint, blend_of
from esper.lifecycle.slot_states import SlotStates
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.forms import HALVES, NO_FORM, cloned_forms, last_forms, lead_classes
from esper.population.hosts import Host
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.network import RowNetwork
from esper.population.optimizer import RowWeights, rate_share
from esper.population.plan.graphs import GraphCache, PopulationState
from esper.population.plan.packing import Plan, PlanSpec
from esper.population.plan.rows import NO_BLEND, SlotView, copy_to, measurement_rows, training_rows
from esper.population.surgery import InitialHosts, InitialSeeds, PartEditor, SlotIndex
from esper.utils.graphs import Graphed, GraphPool, copy_all
from esper.utils.rows import check_like, flags_of_rows, map_tensors, put_rows, tensors_of
from esper.utils.streams import Stream, random_bits

LARGEST_ORDER = 1 << 22  # samples of all members: a larger order is not captured, which would keep its memory


class Population:
    """The networks of N members; the `SlotStates` that come in say which seeds exist."""

    def __init__(
        self,
        make_host: Callable[[], Host],
        config: PopulationConfig,
        members: Tensor,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        """members [N]: global ids, from which random streams derive"""
        self.config, self.seed, self.device = config, seed, torch.device(device)
        self.members, self._member_ids = members.to(self.device), members.cpu()
        self.network = network = RowNetwork(make_host, config, self.device)
        self.num_members, self.num_slots = shape = members.shape[0], len(network.slots)
        self.hosts = RowWeights.zeros(self.num_members, network.host_width, self.device)
        # Positions of a slot: its seed, the block of the host, and what can be folded in.
        self.positions = 1 + network.has_blocks + config.folds * max(slot.repeats for slot in network.slots)
        rows = self.positions * self.num_members * self.num_slots
        # Seeds come first, see `PartEditor`; the last row belongs to no member and stays 0.
        self.parts, self._blank = RowWeights.zeros(rows + 1, network.part_width, self.device), rows

        def table(value: int, *more: int) -> Tensor:
            return torch.full((*shape, *more), value, dtype=torch.long, device=self.device)

        self.forms = table(NO_FORM, self.positions)  # [N, S, positions]
        self.folded_blends = table(0, self.positions - 1)  # [N, S, positions - 1]
        self._born = table(NO_FORM)  # [N, S] blueprints of seeds that wait for weights
        self._folding = table(NO_BLEND)  # [N, S] blends of fossils that wait to be folded
        self.births = torch.zeros(self.num_members, dtype=torch.long, device=self.device)
        self._parameters = network.parameter_table.to(self.device)
        self._gates = network.gate_parameters().to(self.device)
        self._fits = torch.tensor(  # [S, blueprints]
            [[b in slot.blueprints for b in Blueprint] for slot in network.slots], device=self.device
        )
        repeats = [slot.repeats for slot in network.slots]
        self._repeats_two = torch.tensor(repeats, device=self.device) == 2  # [S] bool
        self.finished = torch.zeros(self.num_members, dtype=torch.bool, device=self.device)
        self.rate_scale = torch.ones(self.num_members, device=self.device)  # [N] each member's own peak rate
        self.decay_at = torch.full_like(self.rate_scale, torch.inf)  # [N] from here on a rate falls to 0
        self._initial_hosts = InitialHosts(network, seed)
        self._initial_seeds = InitialSeeds(network, seed, config.seed_weights)
        self._order: DataOrder | None = None
        self._graphs = GraphCache(PopulationState(network, config, self.hosts, self.parts))
        self._pool = GraphPool() if self._graphs.possible else None  # of small functions
        self._captured_words = Graphed(self._random_words, self._pool)
        self._captured_rates = Graphed(self._scaled_rates, self._pool)
        self._latest: tuple[object, SlotView] | None = None  # the versions of what was read, and the view
        self.begin_episode(0)

    # ---- growth ----------------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Start every member from the initial weights that belong to (run seed, member, episode)."""
        draws = random_bits(self.seed, self._member_ids, Stream.HOST_INIT, episode, 1).squeeze(1)
        hosts, blocks = self._initial_hosts.rows(draws % self.config.initial_weights)
        self.hosts.restart(hosts)
        self.parts.restart(torch.zeros_like(self.parts.weights))
        self.forms.fill_(NO_FORM)
        for s, slot in enumerate(self.network.slots):
            if slot.branch is not None:
                self.forms[:, s, 1] = self.network.codes.block
        if self.network.has_blocks:
            first = self.num_members * self.num_slots  # of the rows at position 1
            rows = blocks.flatten(0, 1)  # [N · S, part_width]
            self.parts.weights[first : first + len(rows)] = rows
        # Random streams count births: room for 65,536 before those of the next episode begin.
        self.births.fill_(episode << 16)
        self._born.fill_(NO_FORM)
        self._folding.fill_(NO_BLEND)
        self.finished.fill_(False)
        self.idle = False  # every member is finished, as of the latest reading of the slots
        self._graphs.release()

    @property
    def replays(self) -> bool:
        """Whether training and validation are captured as CUDA graphs."""
        return self._graphs.possible

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Create seeds in the slots where True; their weights are written by `read_slots`.  # [N, S] each"""
        self._born.copy_(torch.where(where, blueprint, self._born))
        if self.network.has_blocks:
            clones = cloned_forms(self.forms, self._repeats_two, self.network.codes)
            blueprint = torch.where(blueprint == Blueprint.CLONE, clones, blueprint)
        self.forms[:, :, 0] = torch.where(where, blueprint, self.forms[:, :, 0])

    def prune(self, where: Tensor) -> None:
        """Remove the seeds where True.  # where [N, S]"""
        self._born.masked_fill_(where, NO_FORM)
        self.forms[:, :, 0] = self.forms[:, :, 0].masked_fill(where, NO_FORM)

    def fold(self, where: Tensor, style: Tensor) -> None:
        """Make the fossils where True part of their hosts; `read_slots` carries it out.  # [N, S] each

        style: as it was before the rules emptied the slot
        """
        self._folding.copy_(torch.where(where, blend_of(style), self._folding))

    @property
    def folding(self) -> Tensor:
        """Where a fossil waits to become part of its host.  # [N, S] bool"""
        return self._folding != NO_BLEND

    def growable(self) -> Tensor:
        """Return the blueprints that fit what stands ahead of each slot now.  # [N, S, blueprints] bool"""
        codes, last = self.network.codes, last_forms(self.forms)
        fits = self._fits.expand(self.num_members, -1, -1).clone()
        for b in GROWTH_BLUEPRINTS:
            # A block can be widened while its class stays below the number of classes.
            room = codes.lead - HALVES.get(b, 0)
            fits[:, :, b] &= (last >= codes.block) & (last < room)
        fits[:, :, Blueprint.CLONE] &= ~self._repeats_two | (lead_classes(self.forms, codes) != NO_FORM)
        return fits

    def read_slots(self, states: SlotStates) -> SlotView:
        """Read the slots from the device, and carry out the germinations and folds that wait.

        Nothing is read where nothing has changed. Raises ValueError for a seed that cannot stand at its slot.
        """
        # Several validations or extractions of the same slots read them once.
        if self._latest is not None and self._latest[0] == self._versions(states):
            return self._latest[1]
        # In case of births: launched before the device is waited for.
        words = self._captured_words(self.births)
        finished = self.finished.unsqueeze(1).expand_as(self._born)
        flags = torch.stack([self._folding, self._born, finished], dim=2)
        view, born = SlotView.read(states, self.forms, self.folded_blends, flags)
        births, folds = SlotIndex(*np.nonzero(born != NO_FORM)), SlotIndex(*np.nonzero(view.fold != NO_BLEND))
        self.idle = not view.active.any()
        # Folds change the forms and blends of the view in place.
        editor = PartEditor(self.parts, self.network, self.config, view.form, view.blend[:, :, 1:])
        if len(births.member):
            editor.germinate(births, born[births.member, births.slot], self._initial_seeds, words)
            self.births.add_((self._born != NO_FORM).any(dim=1))
            self._born.fill_(NO_FORM)
        if len(folds.member):
            editor.fold(folds, view.fold[folds.member, folds.slot])
            self._folding.fill_(NO_BLEND)
            copy_to(self.forms, view.form)
            copy_to(self.folded_blends, view.blend[:, :, 1:])
        self._latest = self._versions(states), view
        return view

    def _versions(self, states: SlotStates) -> list[tuple[int, int]]:
        """Return what `read_slots` reads, as tensors and how often they were written."""
        own = (self.forms, self.folded_blends, self._folding, self._born, self.finished)
        asked = (states.stage, states.style, states.alpha_mode, states.alpha)
        self._kept = (*own, *asked)  # so that no new tensor can have the id of an old one
        return [(id(tensor), tensor._version) for tensor in self._kept]

    def _random_words(self, births: Tensor) -> Tensor:
        """Return random words for the next seeds of all slots.  # births [N] → [N, S]"""
        return random_bits(self.seed, self.members, Stream.SEED_INIT, births, self.num_slots)

    # ---- training and validation -----------------------------------------------------------------------

    def train_epoch(self, states: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        """Train every member that is not finished for an epoch; the metrics of finished ones are NaN.

        Hosts and heard seeds train together, isolated seeds in their shadows.
        """
        # What follows from the clock is launched first, while the device is busy with what came before.
        metrics = TrainMetrics.unmeasured(self.num_members, self.num_slots, self.device)
        rates = self._captured_rates(clock.done(self.config.batches_per_epoch, self.members))
        samples = self._samples(data.num_samples, clock)
        for some in self._chunks(self.read_slots(states)):
            epoch = self._graphs.training(PlanSpec(training_rows(some), some, self._blank), data)
            epoch.load(samples, rates)
            epoch.begin()
            for _ in range(len(samples)):
                epoch.step()
            _put(metrics, epoch.plan, some, epoch.finish())
        return metrics

    def _samples(self, num_samples: int, clock: Clock) -> Tensor:
        """Return the samples of every minibatch of an epoch.  # [batches, N, B]"""
        if self._order is None or self._order.num_samples != num_samples:
            small = self.num_members * num_samples <= LARGEST_ORDER
            batch, pool = self.config.batch_size, self._pool if small else None
            self._order = DataOrder(self.seed, self.members, num_samples, batch, pool)
        first, count = clock.epoch * self.config.batches_per_epoch, self.config.batches_per_epoch
        return torch.stack([self._order.batch(clock.episode, first + b) for b in range(count)])

    def _scaled_rates(self, done: Tensor) -> Tensor:
        """Return the share of the peak learning rate in every minibatch of an epoch.

        done: how far each member has come before each minibatch.  # [batches, N] → [batches, N]
        """
        share = rate_share(done, self.config)
        fall = (1.0 - done) / (1.0 - self.decay_at)
        return torch.where(done > self.decay_at, share.minimum(fall), share) * self.rate_scale

    @torch.no_grad()
    def validate(
        self, states: SlotStates, data: MemberData, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        """Measure loss, accuracy and, with `ablate`, the worth of each seed.

        unfinished: leave out the members that are finished; their metrics are NaN.
        """
        view = self.read_slots(states)
        if not unfinished:
            view = replace(view, active=np.ones_like(view.active))
        metrics = ValidationMetrics.unmeasured(*view.shape, self.device)
        for some in self._chunks(view):
            spec = PlanSpec(measurement_rows(some, ablate), some, self._blank)
            validation = self._graphs.validation(spec, data)
            _put(metrics, validation.plan, some, validation.run())
        return metrics

    def _chunks(self, view: SlotView) -> Iterator[SlotView]:
        """Yield the members that are not finished, some at a time.

        Where steps are captured, finished members pad each chunk to one of few sizes.
        """
        active, finished = np.flatnonzero(view.active), np.flatnonzero(~view.active)
        most = min(self.config.rows_per_chunk, len(view.active))
        for start in range(0, len(active), most):
            ids = active[start : start + most]
            if self._graphs.possible:
                ids = np.concatenate([ids, finished[: _chunk_size(len(ids), most) - len(ids)]])
            yield view if len(active) == len(ids) == len(view.active) else view.select(ids)

    # ---- counting, saving ------------------------------------------------------------------------------

    @property
    def topology(self) -> str:
        return self.network.host.topology

    @property
    def host_parameters(self) -> int:
        return self.network.host_parameters

    def seed_parameters(self) -> Tensor:
        return self.network.seed_parameters()

    def gate_parameters(self) -> Tensor:
        return self.network.gate_parameters()

    def parameter_counts(self, states: SlotStates) -> Tensor:
        """Return the parameters of each member: its host, what was folded in and every seed.  # [N]"""
        slot = torch.arange(self.num_slots, device=self.device).unsqueeze(1)
        sizes = self._parameters[slot, self.forms.clamp(min=0)] * (self.forms != NO_FORM)  # [N, S, positions]
        gates = self.gated(states) * self._gates.unsqueeze(1)
        return self.network.host_width + (sizes + gates).sum(dim=(1, 2))

    def gated(self, states: SlotStates) -> Tensor:
        """Return where a part blends through a gate.  # [N, S, positions] bool"""
        plain = (self.forms >= 0) & (self.forms < FIRST_GROWTH)
        seeds = torch.where(self.folding, self._folding, blend_of(states.style)).unsqueeze(2)
        return plain & (torch.cat([seeds, self.folded_blends], dim=2) == Blend.GATE)

    def tensors(self) -> dict[str, Tensor]:
        """Return all rows by name: what a checkpoint or a snapshot holds. Views, not copies."""
        named = {"births": self.births, "born": self._born, "finished": self.finished}
        named |= {"forms": self.forms, "folded_blends": self.folded_blends, "folding": self._folding}
        named |= {f"hosts.{name}": value for name, value in self.hosts.tensors().items()}
        each = self.num_members * self.num_slots
        for position in range(self.positions):
            rows = self.parts.span(position * each, (position + 1) * each)
            named |= {f"parts.{position}.{name}": value for name, value in rows.tensors().items()}
        return named

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of `tensors`."""
        return {name: value.clone() for name, value in self.tensors().items()}

    def keep(self, saved: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Update a snapshot in place with the rows of the members where True, and return it.  # where [N]"""
        for name, value in self.tensors().items():
            torch.where(flags_of_rows(where, value), value, saved[name], out=saved[name])
        return saved

    def restore(self, saved: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """Take rows back from a snapshot: all of them, or those of the members where True.  # where [N] bool

        Raises ValueError for a snapshot of other members, host or slots.
        """
        current = self.tensors()
        check_like(current, saved, "the snapshot")
        for name, value in current.items():
            if where is None:
                value.copy_(saved[name])
            else:
                torch.where(flags_of_rows(where, value), saved[name].to(self.device), value, out=value)


def _chunk_size(count: int, most: int) -> int:
    """Return the least number that is not below `count` of most, 3/4, 1/2, 3/8, 1/4 of it and so on."""
    size = most
    while size // 2 >= count:
        size //= 2
    return size * 3 // 4 if size * 3 // 4 >= count else size


def _put(metrics: TrainMetrics | ValidationMetrics, plan: Plan, view: SlotView, found: object) -> None:
    """Write the metrics of the members of a view that are not finished; they come first."""
    count = int(view.active.sum())
    if count == len(metrics.loss):  # everyone, in order
        copy_all(tensors_of(metrics).values(), tensors_of(found).values())
        return
    put_rows(metrics, plan.ids[:count], map_tensors(lambda tensor: tensor[:count], found))
