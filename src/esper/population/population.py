"""N members trained as one program: weights, optimiser state and running statistics as rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.foundation.rows import fit
from esper.foundation.streams import Stream, random_bits
from esper.lifecycle.actions import Blueprint, has_gate
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.population.bodies import Bodies, seed_rows
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.gradients import SeedGradients, measure_seeds
from esper.population.hosts import Host
from esper.population.objectives import OBJECTIVES, Objective
from esper.population.optimiser import RowWeights
from esper.population.plan import (
    Ints,
    Kind,
    Measurement,
    Plan,
    SlotView,
    build_plan,
    measurement_rows,
    ship,
    training_rows,
)
from esper.population.stepping import REPLAY_FROM, Learners, ReplayedStep, Studio, TrainStep


@dataclass(frozen=True)
class TrainMetrics:
    """What an epoch of training showed."""

    loss: Tensor  # [N] mean over the epoch
    shadow_loss: Tensor  # [N, S] of seeds that train in isolation, NaN elsewhere
    host_gradient_norm: Tensor  # [N] of the last minibatch
    seeds: SeedGradients  # each [N, S], NaN where nothing was trained


@dataclass(frozen=True)
class ValidationMetrics:
    """What a validation showed. Points are percentage points of accuracy; NaN is unmeasured."""

    loss: Tensor  # [N]
    accuracy: Tensor  # [N] 0..1
    contribution: Tensor  # [N, S] points lost without the seed
    shadow_gain: Tensor  # [N, S] points gained if the isolated seed were adopted
    interaction: Tensor  # [N, S] mean synergy with the other seeds, points
    rows: int  # how many rows were evaluated


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
        self.seeds = RowWeights.zeros(self.num_members * self.num_slots, self.bodies.seed_width, self.device)
        self.buffers = self.bodies.initial_buffers(self.num_members)
        self.births = torch.zeros(self.num_members, dtype=torch.long, device=self.device)
        self._parameters = self.bodies.parameter_table().to(self.device)
        self._gates = self.bodies.gate_parameters().to(self.device)
        self._host_bank: dict[int, Tensor] = {}
        self._seed_bank: Tensor | None = None
        self._order: DataOrder | None = None
        self._studio: Studio | None = None
        self._replayed: list[ReplayedStep] = []
        self._known_kinds: frozenset[Kind] = frozenset()
        self.begin_episode(0)

    # ---- birth and death -------------------------------------------------------------------------------

    def begin_episode(self, episode: int) -> None:
        """Every member begins anew with the initial weights that belong to (run seed, member, episode)."""
        draws = random_bits(self.seed, self.members, Stream.HOST_INIT, episode, 1).squeeze(1)
        picks = (draws % self.config.initial_weights).tolist()
        for pick in sorted(set(picks) - set(self._host_bank)):
            self._host_bank[pick] = self.bodies.initial_host(hash((self.seed, pick)) & 0x7FFFFFFF)
        weights = torch.stack([self._host_bank[pick] for pick in picks]).to(self.device)
        everyone = torch.ones(self.num_members, dtype=torch.bool, device=self.device)
        self.hosts.rewrite(everyone, weights)
        self.seeds.rewrite(everyone.repeat_interleave(self.num_slots), torch.zeros_like(self.seeds.weights))
        self.buffers = self.bodies.initial_buffers(self.num_members)
        self.births = torch.full_like(self.births, episode << 16)
        self._release_graphs()

    def germinate(self, where: Tensor, blueprint: Tensor) -> None:
        """Write newly born seeds into the slots where True.  # where, blueprint [N, S]"""
        bank = self._bank()  # [S, blueprints, draws, seed_width]
        draws = random_bits(self.seed, self.members, Stream.SEED_INIT, self.births, self.num_slots)
        pick = draws.remainder(bank.shape[2])  # [N, S]
        slot = torch.arange(self.num_slots, device=self.device).expand_as(pick)
        fresh = bank[slot, blueprint.clamp(min=0), pick]  # [N, S, seed_width]
        self.seeds.rewrite(where.flatten(), fresh.flatten(0, 1))
        self.births = self.births + where.any(dim=1)

    def prune(self, where: Tensor) -> None:
        """Clear the seeds where True: weights, momentum and step count.  # where [N, S]"""
        self.seeds.rewrite(where.flatten(), torch.zeros_like(self.seeds.weights))

    def _bank(self) -> Tensor:
        """Initial weights of every blueprint at every slot, drawn once per run."""
        if self._seed_bank is None:
            draws = self.config.seed_weights
            slots = []
            for s, slot in enumerate(self.bodies.slots):
                blank = torch.zeros(draws, self.bodies.seed_width)
                rows = [blank] * self._parameters.shape[1]
                for b in slot.seeds:
                    seeds = [hash((self.seed, s, b, d)) & 0x7FFFFFFF for d in range(draws)]
                    rows[b] = torch.stack([self.bodies.initial_seed(s, Blueprint(b), seed) for seed in seeds])
                slots.append(torch.stack(rows))
            self._seed_bank = torch.stack(slots).to(self.device)
        return self._seed_bank

    # ---- training --------------------------------------------------------------------------------------

    def train_epoch(self, states: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        """One epoch for every member: hosts and heard seeds together, isolated seeds in their shadows."""
        view = self._view(states, data)
        order = self._data_order(data.num_samples)
        parts = [self._train_chunk(view, data, order, clock, *span) for span in self._chunks()]
        return TrainMetrics(
            loss=torch.cat([p.loss for p in parts]),
            shadow_loss=torch.cat([p.shadow_loss for p in parts]),
            host_gradient_norm=torch.cat([p.host_gradient_norm for p in parts]),
            seeds=SeedGradients.cat([p.seeds for p in parts]),
        )

    def _train_chunk(
        self, view: SlotView, data: MemberData, order: DataOrder, clock: Clock, start: int, stop: int
    ) -> TrainMetrics:
        view, data = view.members(start, stop), data.members(start, stop)
        rows = training_rows(view)
        plan = build_plan(rows, view, self.device)
        step = TrainStep(
            self.bodies, self.objective, self.config, plan, self._learners(plan, view, start, stop)
        )
        run = self._runner(step)
        for b in range(self.config.batches_per_epoch):
            index = clock.epoch * self.config.batches_per_epoch + b
            samples = order.batch(clock.episode, index)[start:stop]
            done = (clock.epoch + b / self.config.batches_per_epoch) / clock.epochs
            rate = torch.full((), self.config.rate_at(done), device=self.device)
            count = torch.full((), (clock.episode << 20) + index, dtype=torch.long, device=self.device)
            run(*data.take(samples), rate, count)
        self.seeds.slice(start * self.num_slots, stop * self.num_slots).put(
            plan.live_seeds, step.learners.seeds
        )
        mean = step.total_loss / self.config.batches_per_epoch
        shadow = torch.full(view.shape, math.nan, device=self.device)
        num_shadows = plan.num_rows - plan.own
        if num_shadows:
            slot = ship(rows.shadow_slot[plan.own :], self.device)
            shadow.index_put_((plan.members[plan.own :], slot), mean[plan.own :])
        measured = measure_seeds(self.bodies, plan, step.seed_gradient, step.host_norm, view.shape)
        return TrainMetrics(mean[: plan.own], shadow, step.host_norm, measured)

    def _learners(self, plan: Plan, view: SlotView, start: int, stop: int) -> Learners:
        """Members start..stop, and the seeds that live in a row; those that fade out do not learn."""
        frozen = ship(view.frozen.reshape(-1), self.device)
        seeds = self.seeds.slice(start * self.num_slots, stop * self.num_slots)
        return Learners(
            hosts=self.hosts.slice(start, stop),
            seeds=seeds.take(plan.live_seeds),
            buffers=[{name: value[start:stop] for name, value in part.items()} for part in self.buffers],
            learning=~frozen.index_select(0, plan.live_seeds),
            members=self.members[start:stop],
            seed=self.seed,
        )

    def _runner(self, step: TrainStep) -> TrainStep | ReplayedStep:
        """On a GPU, and where every module has a row form, minibatches are replayed as one graph."""
        possible = self.config.graphs and self.device.type == "cuda" and self.bodies.in_row_form
        if not possible or self.config.batches_per_epoch < REPLAY_FROM:
            return step
        if self._studio is None:
            self._studio = Studio()
        kinds = step.plan.kinds
        replayed = ReplayedStep(step, self._studio, known=kinds <= self._known_kinds)
        self._known_kinds |= kinds
        self._replayed = [*self._replayed[-1:], replayed]  # the pool lives as long as one of its graphs does
        return replayed

    def _release_graphs(self) -> None:
        """Give back what replays held once it is much: another population may need it."""
        if self._studio is not None and _device_is_full(self.device):
            self._replayed, self._studio = [], None
            torch.cuda.empty_cache()

    # ---- validation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, states: SlotStates, data: MemberData, ablate: bool = True) -> ValidationMetrics:
        """Loss and accuracy of every member, and what each seed is worth."""
        view = self._view(states, data)
        parts = [self._validate_chunk(view, data, ablate, *span) for span in self._chunks()]
        joined = {
            name: torch.cat([getattr(p, name) for p in parts])
            for name in ("loss", "accuracy", "contribution", "shadow_gain", "interaction")
        }
        return ValidationMetrics(**joined, rows=sum(p.rows for p in parts))

    def _validate_chunk(
        self, view: SlotView, data: MemberData, ablate: bool, start: int, stop: int
    ) -> ValidationMetrics:
        view, data = view.members(start, stop), data.members(start, stop)
        wanted = measurement_rows(view, ablate, self.config.measure_pairs)
        plan = build_plan(wanted.rows, view, self.device)
        loss, accuracy = self._evaluate(plan, data, start, stop)
        return ValidationMetrics(
            loss=loss[: plan.own],
            accuracy=accuracy[: plan.own],
            rows=plan.num_rows,
            **worth_of_seeds(wanted, accuracy, plan.own),
        )

    def _evaluate(self, plan: Plan, data: MemberData, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Mean loss and score of each row over the validation samples.  # [R], [R]"""
        hosts = self.hosts.weights[start:stop].index_select(0, plan.members)
        seeds = self.seeds.weights[start * self.num_slots : stop * self.num_slots]
        weights = seed_rows(plan, seeds.index_select(0, plan.live_seeds))
        buffers = [
            {name: value[start:stop].index_select(0, plan.members) for name, value in part.items()}
            for part in self.buffers
        ]
        samples = min(data.num_samples, self.config.validation_samples)
        loss = torch.zeros(plan.num_rows, device=self.device)
        score = torch.zeros(plan.num_rows, device=self.device)
        kept: list[Tensor] = []
        for first in range(0, samples, self.config.validation_batch):
            last = min(first + self.config.validation_batch, samples)
            inputs, _ = data.span(plan.members[: plan.own], first, last)
            _, targets = data.span(plan.members, first, last)
            outputs = self.bodies.forward(plan, hosts, weights, inputs, buffers, training=False)
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
        """Parameters of each member: its host and every seed that it holds.  # [N]"""
        slot = torch.arange(self.num_slots, device=self.device)
        seeds = self._parameters[slot, states.blueprint.clamp(min=0)] + has_gate(states.style) * self._gates
        return self.bodies.host_width + (holds_seed(states) * seeds).sum(dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """All rows as plain tensors: what a checkpoint or a snapshot holds. Views, not copies."""
        named = {"births": self.births}
        named |= {f"hosts.{name}": value for name, value in self.hosts.tensors().items()}
        named |= {f"seeds.{name}": value for name, value in self.seeds.tensors().items()}
        for k, part in enumerate(self.buffers):
            named |= {f"buffers.{k}.{name}": value for name, value in part.items()}
        return named

    def extract(self, states: SlotStates, member: int, fossilised_only: bool = False) -> nn.Sequential:
        """One member as a plain module, with its heard seeds or only its fossils: see `extract`."""
        from esper.population.extract import extract

        return extract(self, states, member, fossilised_only)

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
        view = SlotView.of(states)
        self.bodies.check_blueprints(view)
        return view

    def _chunks(self) -> Iterator[tuple[int, int]]:
        size = self.config.rows_per_chunk
        for start in range(0, self.num_members, size):
            yield start, min(start + size, self.num_members)

    def _data_order(self, num_samples: int) -> DataOrder:
        if self._order is None or self._order.num_samples != num_samples:
            self._order = DataOrder(self.seed, self.members, num_samples, self.config.batch_size)
        return self._order


def _device_is_full(device: torch.device) -> bool:
    """Whether this process holds half of the device's memory or more."""
    return 2 * torch.cuda.memory_reserved(device) > torch.cuda.get_device_properties(device).total_memory


def worth_of_seeds(wanted: Measurement, accuracy: Tensor, own: int) -> dict[str, Tensor]:
    """Contribution, shadow gain and interaction in points, from the accuracies of the rows.  # [R]"""

    def answer(rows: Ints) -> Tensor:
        """The accuracy of each asked row, NaN where none was asked for."""
        index = ship(rows, accuracy.device)
        return accuracy[index.clamp(min=0)].masked_fill(index < 0, math.nan)

    alone = accuracy[:own].unsqueeze(1)  # [N, 1]
    without = answer(wanted.without)  # [N, S]
    pair = answer(wanted.without_pair)  # [N, S, S]
    synergy = (alone.unsqueeze(2) - without.unsqueeze(2)) - (without.unsqueeze(1) - pair)
    return {
        "contribution": 100.0 * (alone - without),
        "shadow_gain": 100.0 * (answer(wanted.shadow) - alone),
        "interaction": 100.0 * synergy.nanmean(dim=2),
    }
