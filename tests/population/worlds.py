"""Small populations of every kind of host, and the same members trained one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import STYLE_BLEND, Blueprint, Style, selectable_blueprints
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import FORWARD_STAGES, Stage
from esper.population.blocks import Block
from esper.population.config import PopulationConfig
from esper.population.data import Clock, DataOrder, MemberData
from esper.population.hosts import HOST_PRESETS, Host
from esper.population.optimizer import RowWeights
from esper.population.plan.packing import PlanSpec
from esper.population.plan.rows import measurement_rows
from esper.population.population import Population
from esper.population.row_module import flatten, load_flat
from tests.population.reference import (
    CopiedBlocks,
    NewUnits,
    ReferenceMember,
    ReferenceSeed,
    concatenate,
    loss_of,
)
from tests.slots import SlotRecord

CLASSES = 3
# preset, shape of an input, topology, options that give two slots
WORLDS: dict[str, tuple[str, tuple[int, ...], str, dict[str, int]]] = {
    "signals": ("cnn", (1, 10), "cnn", {"width": 4, "depth": 2}),
    "images": ("cnn", (1, 8, 8), "cnn", {"width": 4, "depth": 2}),
    "vectors": ("mlp", (5,), "mlp", {"width": 4, "depth": 2}),
    "residual signals": ("resnet", (1, 10), "cnn", {"width": 4, "depth": 2, "stages": 1}),
    "residual images": ("resnet", (1, 8, 8), "cnn", {"width": 4, "depth": 1, "stages": 2, "hidden": 3}),
    "residual vectors": ("resmlp", (5,), "mlp", {"width": 4, "depth": 2, "hidden": 6}),
    "text": ("gpt", (5,), "transformer", {"width": 4, "depth": 1, "heads": 2, "expansion": 2}),
}
RESIDUAL = [world for world in WORLDS if "residual" in world or world == "text"]
GROWTH_PAIRS = [  # how these blend does not depend on the style
    (int(Blueprint.CLONE), Style.LINEAR_ADD),
    (int(Blueprint.WIDEN_HALF), Style.GATED_GATE),
    (int(Blueprint.WIDEN_FULL), Style.LINEAR_MULTIPLY),
    (int(Blueprint.CLONE), Style.GATED_GATE),
]
SMALL = {
    "batch_size": 4,
    "batches_per_epoch": 2,
    "validation_samples": 12,
    "validation_batch": 5,
    "initial_weights": 8,
    "seed_weights": 2,
    "schedule": "constant",
    "folds": 3,
}
CLOCK = Clock(0, 0, 10)


def seeds_of(population: Population) -> RowWeights:
    """The rows of the seeds: member by member, slot by slot. Views."""
    return population.parts.span(0, population.num_members * population.num_slots)


def host_maker(world: str) -> Callable[[], Host]:
    """A host whose every block can be cloned, so that clones of one block and of two occur."""
    preset, shape, _, options = WORLDS[world]

    def make() -> Host:
        host = HOST_PRESETS[preset](shape, CLASSES, **options)
        host.repeats = tuple(max(1, repeats) for repeats in host.repeats)
        return host

    return make


def make_population(world: str, members: int | Sequence[int] = 3, **settings: Any) -> Population:
    ids = torch.arange(members) if isinstance(members, int) else torch.tensor(members)
    config = PopulationConfig(**{**SMALL, **settings})
    return Population(host_maker(world), config, ids, seed=5)


def make_data(world: str, members: int, tasks: int = 1, samples: int = 24) -> MemberData:
    """`tasks` tasks; member i works on task i modulo `tasks`."""
    preset, shape, _, _ = WORLDS[world]
    generator = torch.Generator().manual_seed(3)
    shapes = (tasks, samples, *shape)
    if preset == "gpt":
        tokens = torch.randint(CLASSES, (2, *shapes), generator=generator)
        inputs, targets = tokens[0], tokens[1]
    else:
        inputs = torch.randn(shapes, generator=generator)
        targets = torch.randint(CLASSES, shapes[:2], generator=generator)
    return MemberData(inputs, targets, torch.arange(members) % tasks)


def record(
    stage: Stage, blueprint: int, style: int = Style.LINEAR_ADD, alpha: float | None = None
) -> SlotRecord:
    strength = float(stage in FORWARD_STAGES) if alpha is None else alpha
    return SlotRecord(stage=stage, blueprint=int(blueprint), style=int(style), alpha=strength)


def fading(blueprint: int, style: int = Style.LINEAR_ADD, alpha: float = 0.5) -> SlotRecord:
    return replace(record(Stage.BLENDING, blueprint, style, alpha), alpha_mode=AlphaMode.DOWN)


def every_pair(world: str) -> list[tuple[int, Style]]:
    """Every blueprint of a world under every style; those that grow blocks come last, each once or twice."""
    plain = [(int(b), style) for b, style in product(sorted(selectable_blueprints(WORLDS[world][2])), Style)]
    return plain + (GROWTH_PAIRS if world in RESIDUAL else [])


def plant(population: Population, states: SlotStates, awake: bool = True) -> SlotStates:
    """Write the seeds of the states into the rows; awake ones say something already."""
    where = states.blueprint >= 0
    population.germinate(where, states.blueprint)
    population.read_slots(states)
    if awake:
        noise = torch.randn(seeds_of(population).weights.shape, generator=torch.Generator().manual_seed(17))
        # A seed's padding is stirred too: nothing may read it.
        seeds_of(population).weights.add_(torch.where(where.reshape(-1, 1), 0.2 * noise, 0.0))
    return states


def outputs_of(population: Population, states: SlotStates, inputs: Tensor) -> Tensor:
    """What every member says to one batch.  # [B, ...] → [N, B, ...]"""
    view = population.read_slots(states)
    plan = PlanSpec(measurement_rows(view, ablate=False), view).pack().to(population.device)
    with torch.no_grad():
        return population.network.forward(
            plan,
            population.hosts.weights,
            population.network.gather_parts(plan, population.parts.weights),
            inputs.expand(population.num_members, *inputs.shape),
        )


# ---- a row of the population as a plain module -----------------------------------------------------------

Fold = tuple[int, int, int]  # slot, blueprint, style of a seed that became part of the host


def reference_member(population: Population, states: SlotStates, row: int) -> ReferenceMember:
    """A plain module with the weights of one row, its seeds at the alphas that the host hears.

    Its shape follows from the host and the seeds, not from `forms`; nothing was folded in yet.
    """
    network = population.network
    member = ReferenceMember(network.make_host())
    for module, flat in zip(
        member.trunk, population.hosts.weights[row].split(network.trunk_sizes), strict=True
    ):
        load_flat(module, flat)
    for s, chain in enumerate(member.chains):
        for k, part in enumerate(chain):
            load_part(population, part, s, part_row(population, row, s, k + 1))
        name = int(states.blueprint[row, s])
        if name >= 0:
            seed = member.germinate(s, name, STYLE_BLEND[Style(int(states.style[row, s]))])
            load_part(population, seed, s, part_row(population, row, s, 0))
    member.alphas = heard_alphas(states)[row]
    return member


def heard_alphas(states: SlotStates) -> list[list[float]]:
    """The strength at which each member hears each slot."""
    heard = torch.isin(states.stage, torch.tensor([int(s) for s in FORWARD_STAGES]))
    return (states.alpha * heard).tolist()


def part_row(
    population: Population, member: int, slot: int, place: int, rows: Tensor | None = None
) -> Tensor:
    """The row of weights, or of another field of the parts, at a place of a slot."""
    index = (place * population.num_members + member) * population.num_slots + slot
    return (population.parts.weights if rows is None else rows)[index]


def pieces(population: Population, part: nn.Module, s: int) -> Iterator[tuple[nn.Module, int]]:
    """The modules of a part and where each begins in its row."""
    slot = population.network.slots[s]
    if isinstance(part, ReferenceSeed):
        yield part.seed, 0
        if part.gate is not None:
            yield part.gate, slot.gate_start
    elif isinstance(part, CopiedBlocks):
        starts = (0, slot.pair_start) if len(part.blocks) > 1 else (0,)
        yield from zip(part.blocks, starts, strict=True)
    else:
        assert isinstance(part, Block | NewUnits)
        yield part.branch, 0


def load_part(population: Population, part: nn.Module, s: int, flat: Tensor) -> None:
    for module, start in pieces(population, part, s):
        load_flat(module, flat[start:])


def used_columns(population: Population, part: nn.Module, s: int, flat: Tensor) -> Tensor:
    """The columns of a row that the modules of a part use."""
    found = pieces(population, part, s)
    return torch.cat([flat[start : start + flatten(module).numel()] for module, start in found])


class OneAfterAnother:
    """The members of a population as plain modules, each part with a plain optimizer of its own."""

    def __init__(
        self,
        population: Population,
        states: SlotStates,
        rate: Callable[[float], float] = lambda done: 1.0,
    ) -> None:
        """rate: the share of the peak learning rate."""
        self.population, self.states, self.config, self.rate = population, states, population.config, rate
        self.members = [reference_member(population, states, i) for i in range(population.num_members)]
        self.optimizers: list[dict[str, torch.optim.Optimizer]] = [
            {name: self._optimizer(part) for name, part in self._parts(m).items()} for m in self.members
        ]
        self.steps = [dict.fromkeys(parts, 0) for parts in self.optimizers]

    @staticmethod
    def _parts(member: ReferenceMember) -> dict[str, nn.Module]:
        """Everything that has a row of its own: the trunk, every link of every chain, every seed."""
        links = {f"{s}.{k}": part for s, chain in enumerate(member.chains) for k, part in enumerate(chain)}
        return {"host": member.trunk, **links, **dict(member.seeds.items())}

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters = [*module.parameters()] or [nn.Parameter(torch.zeros(1))]
        if self.config.optimizer == "adamw":
            betas = (self.config.momentum, self.config.second_beta)
            decay = self.config.weight_decay
            return torch.optim.AdamW(parameters, self.config.host_lr, betas, weight_decay=decay)
        return torch.optim.SGD(parameters, self.config.host_lr, momentum=self.config.momentum)

    def change(self, states: SlotStates) -> None:
        """The same seeds in other stages and at other alphas."""
        self.states = states
        for member, alphas in zip(self.members, heard_alphas(states), strict=True):
            member.alphas = alphas

    def germinate(self, i: int, s: int, blueprint: int, style: int) -> None:
        """A new seed with the weights that it has in the population and a clean optimizer."""
        seed = self.members[i].germinate(s, blueprint, STYLE_BLEND[Style(style)])
        load_part(self.population, seed, s, part_row(self.population, i, s, 0))
        self.optimizers[i][str(s)], self.steps[i][str(s)] = self._optimizer(seed), 0

    def prune(self, i: int, s: int) -> None:
        """A seed ends."""
        self.members[i].prune(s)
        del self.optimizers[i][str(s)], self.steps[i][str(s)]

    def fold(self, i: int, s: int) -> None:
        """A seed becomes part of its host, with what its optimizer knows."""
        member, moved = self.members[i], self.optimizers[i].pop(str(s))
        seed, count, steps = member.seed_at(s), self.steps[i].pop(str(s)), self.steps[i]
        length = len(member.chains[s])
        known = dict(moved.state)
        if isinstance(seed, NewUnits):
            self._widen(i, s, seed, known)
            return
        member.fold(s)
        for k in range(length, len(member.chains[s])):
            part = member.chains[s][k]
            optimizer = self._optimizer(part)
            optimizer.state.update({p: known[p] for p in part.parameters() if p in known})
            self.optimizers[i][f"{s}.{k}"], steps[f"{s}.{k}"] = optimizer, count

    def _widen(self, i: int, s: int, seed: NewUnits, known: dict[Any, Any]) -> None:
        """The moments of the new units are scaled so that their means stay what they are."""
        member, name = self.members[i], f"{s}.{len(self.members[i].chains[s]) - 1}"
        old = member.chains[s][-1].branch
        before = self.optimizers[i][name].state
        member.fold(s)
        block = member.chains[s][-1]
        optimizer = self._optimizer(block)
        names = {"exp_avg": self.config.momentum, "exp_avg_sq": self.config.second_beta}
        if self.config.optimizer == "sgd":
            names = {"momentum_buffer": 0.0}
        entries: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in block.parameters()}
        step = next((float(v["step"]) for v in before.values() if "step" in v), 0.0)
        new = next((float(v["step"]) for v in known.values() if "step" in v), 0.0)
        for field, beta in names.items():
            scale = (1 - beta ** max(step, 1)) / (1 - beta ** max(new, 1))
            wide = concatenate(with_values(old, before, field), with_values(seed.branch, known, field, scale))
            for p, value in zip(block.parameters(), wide.parameters(), strict=True):
                entries[p][field] = value.detach().clone()
        if self.config.optimizer == "adamw":
            for entry in entries.values():
                entry["step"] = torch.tensor(step)
        optimizer.state.update(entries)
        self.optimizers[i][name] = optimizer

    def epoch(self, data: MemberData, clock: Clock) -> Tensor:
        """The mean loss of each member.  # [N]"""
        population, count = self.population, self.config.batches_per_epoch
        sizes = data.num_samples, self.config.batch_size
        order = DataOrder(population.seed, population.members, *sizes)
        losses = torch.zeros(len(self.members))
        for b in range(count):
            samples = order.batch(clock.episode, clock.epoch * count + b)
            inputs, targets = data.take(torch.arange(len(samples)), samples)
            for i in range(len(self.members)):
                rate = self.rate(self._done(clock, i, b / count))
                losses[i] += self.step(i, inputs[i], targets[i], rate) / count
        return losses

    @staticmethod
    def _done(clock: Clock, i: int, within: float) -> float:
        if clock.spent is None or clock.share is None:
            return (clock.epoch + within) / clock.epochs
        return min(float(clock.spent[i]) + float(clock.share[i]) * within, 1.0)

    def step(self, i: int, inputs: Tensor, targets: Tensor, rate: float = 1.0) -> float:
        member = self.members[i]
        parts = self._parts(member)
        learning = self._learning(i)
        heard = [parts[str(s)] for s, way in learning.items() if way == "heard"]
        folded = {name: part for name, part in parts.items() if "." in name}
        own = loss_of(member(inputs), targets)
        self._keep_gradients(own, [member.trunk, *folded.values(), *heard])
        for s, way in learning.items():
            if way == "isolated":
                self._keep_gradients(loss_of(member(inputs, member.shadow(s)), targets), [parts[str(s)]])
        self._clip([member.trunk, *folded.values()])
        for s in learning:
            self._clip([parts[str(s)]])
        for name in ("host", *folded, *map(str, learning)):
            if not name.isdigit() or self.states.alpha_mode[i, int(name)] != AlphaMode.DOWN:
                peak = self.config.seed_lr if name.isdigit() else self.config.host_lr
                self._move(i, name, parts[name], rate * peak)
        return float(own.detach())

    def _learning(self, i: int) -> dict[int, str]:
        """The slots whose seeds learn, and how."""
        found = {}
        for s in range(self.population.num_slots):
            if self.members[i].alphas[s] > 0:
                found[s] = "heard"
            elif int(self.states.stage[i, s]) == Stage.TRAINING:
                found[s] = "isolated"
        return found

    @staticmethod
    def _keep_gradients(loss: Tensor, modules: Sequence[nn.Module]) -> None:
        parameters = [p for module in modules for p in module.parameters()]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def _clip(self, modules: Sequence[nn.Module]) -> None:
        """Modules that are clipped as one."""
        parameters = [p for module in modules for p in module.parameters()]
        torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)

    def _move(self, i: int, name: str, module: nn.Module, rate: float) -> None:
        optimizer = self.optimizers[i][name]
        optimizer.param_groups[0]["lr"] = rate
        if self.config.optimizer == "sgd":  # decay is decoupled here, which plain SGD does not know
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.0 - rate * self.config.weight_decay)
        optimizer.step()
        self.steps[i][name] += 1

    def assert_equal(self, tolerance: float) -> None:
        """Every weight of every part is that of the population."""
        for i, member in enumerate(self.members):
            host = torch.cat([flatten(module) for module in member.trunk])
            close = partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
            close(self.population.hosts.weights[i], host, msg=lambda m, i=i: f"host {i}: {m}")
            for name, part in self._parts(member).items():
                if name == "host":
                    continue
                s, k = (int(name), 0) if name.isdigit() else (int(name[0]), int(name[2:]) + 1)
                here = used_columns(self.population, part, s, part_row(self.population, i, s, k))
                there = torch.cat([flatten(module) for module, _ in pieces(self.population, part, s)])
                close(here, there, msg=lambda m, i=i, name=name: f"part {name} of {i}: {m}")


def with_values(branch: Any, state: Any, field: str, scale: float = 1.0) -> Any:
    """A branch that holds what an optimizer knows about its weights instead of them."""
    copied = copy.deepcopy(branch)
    for parameter, original in zip(copied.parameters(), branch.parameters(), strict=True):
        known = state.get(original, {}).get(field)
        parameter.data.copy_(torch.zeros_like(parameter) if known is None else scale * known)
    return copied
