"""Small populations of every kind of host, and the same members trained one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle.actions import STYLE_BLEND, Blend, Style, selectable_blueprints
from esper.lifecycle.slot_states import AlphaMode, SlotRecord, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.bodies import seed_rows
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import HOST_PRESETS, Host
from esper.population.layout import flatten, load_flat
from esper.population.objectives import Objective, accuracy
from esper.population.plan import SlotView, build_plan, measurement_rows
from esper.population.population import Population
from esper.population.reference import ReferenceMember, loss_of

CLASSES = 3
WORLDS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "signals": ("cnn", (1, 10), "cnn"),
    "images": ("cnn", (1, 8, 8), "cnn"),
    "vectors": ("mlp", (5,), "mlp"),
    "text": ("gpt", (5,), "transformer"),
}
SMALL = {
    "batch_size": 4,
    "batches_per_epoch": 2,
    "validation_samples": 12,
    "validation_batch": 5,
    "initial_weights": 8,
    "seed_weights": 2,
    "schedule": "constant",
}
CLOCK = Clock(0, 0, 10)


def double_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in the precision of the outputs.  # [R, B, ..., classes], [R, B, ...] → [R]"""
    picked = torch.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -picked.flatten(1).mean(1)


EXACT = Objective(double_entropy, accuracy)


def host_maker(world: str, depth: int = 2) -> Callable[[], Host]:
    preset, shape, _ = WORLDS[world]
    return partial(HOST_PRESETS[preset], shape, CLASSES, width=4, depth=depth)


def make_population(
    world: str,
    members: int | Sequence[int] = 3,
    objective: str | Objective = "classification",
    **settings: Any,
) -> Population:
    ids = torch.arange(members) if isinstance(members, int) else torch.tensor(members)
    config = PopulationConfig(**{**SMALL, **settings})
    return Population(host_maker(world), config, ids, seed=5, objective=objective)


def make_data(world: str, members: int, tasks: int = 1, samples: int = 24) -> MemberData:
    """`tasks` tasks; member i works on task i modulo `tasks`."""
    preset, shape, _ = WORLDS[world]
    generator = torch.Generator().manual_seed(3)
    shapes = (tasks, samples, *shape)
    if preset == "gpt":
        tokens = torch.randint(CLASSES, (2, *shapes), generator=generator)
        inputs, targets = tokens[0], tokens[1]
    else:
        inputs = torch.randn(shapes, generator=generator)
        targets = torch.randint(CLASSES, shapes[:2], generator=generator)
    return MemberData.of(inputs, targets, torch.arange(members) % tasks)


def record(
    stage: Stage, blueprint: int, style: int = Style.LINEAR_ADD, alpha: float | None = None
) -> SlotRecord:
    strength = float(stage in HEARD_STAGES) if alpha is None else alpha
    return SlotRecord(stage=stage, blueprint=int(blueprint), style=int(style), alpha=strength)


def fading(blueprint: int, style: int = Style.LINEAR_ADD, alpha: float = 0.5) -> SlotRecord:
    return SlotRecord(
        stage=Stage.BLENDING,
        blueprint=int(blueprint),
        style=int(style),
        alpha=alpha,
        alpha_mode=AlphaMode.DOWN,
    )


def every_pair(world: str) -> list[tuple[int, Style]]:
    """Every blueprint of a world under every style."""
    return list(product(sorted(selectable_blueprints(WORLDS[world][2])), Style))


def plant(population: Population, states: SlotStates, awake: bool = True) -> SlotStates:
    """Write the seeds of the states into the rows; awake ones say something already."""
    where = states.blueprint >= 0
    population.germinate(where, states.blueprint)
    if awake:
        noise = torch.randn(population.seeds.weights.shape, generator=torch.Generator().manual_seed(17))
        # A seed's padding is stirred too: nothing may read it.
        population.seeds.weights.add_(torch.where(where.reshape(-1, 1), 0.2 * noise, 0.0))
    return states


def outputs_of(population: Population, states: SlotStates, inputs: Tensor) -> Tensor:
    """What every member says to one batch.  # [B, ...] → [N, B, ...]"""
    view = SlotView.of(states)
    plan = build_plan(measurement_rows(view, ablate=False).rows, view, population.device)
    seeds = population.seeds.weights
    with torch.no_grad():
        return population.bodies.forward(
            plan,
            population.hosts.weights,
            seed_rows(plan, seeds.index_select(0, plan.live_seeds)),
            inputs.expand(population.num_members, *inputs.shape),
            population.buffers,
            training=False,
        )


def reference_member(population: Population, states: SlotStates, row: int) -> ReferenceMember:
    """A plain module with the weights of one row, its seeds at the alphas that the host hears."""
    bodies = population.bodies
    host = bodies.make_host()
    parts = population.hosts.weights[row].split(bodies.host_sizes)
    for module, flat in zip((*host.segments, host.head), parts, strict=True):
        load_flat(module, flat)
    member = ReferenceMember(host)
    for s, slot in enumerate(bodies.slots):
        stage, name = Stage(int(states.stage[row, s])), int(states.blueprint[row, s])
        if name < 0:
            continue
        heard = float(states.alpha[row, s]) if stage in HEARD_STAGES else 0.0
        seed = member.germinate(s, name, STYLE_BLEND[Style(int(states.style[row, s]))], heard)
        flat = population.seeds.weights[row * population.num_slots + s]
        load_flat(seed.seed, flat[: slot.seeds[name].layout.total])
        if seed.gate is not None:
            load_flat(seed.gate, flat[slot.gate_start : slot.width])
    return member


class OneAfterAnother:
    """The members of a population as plain modules, each with plain optimisers."""

    def __init__(self, population: Population, states: SlotStates) -> None:
        self.population, self.states, self.config = population, states, population.config
        self.members = [reference_member(population, states, i) for i in range(population.num_members)]
        self.optimisers = [
            {part: self._optimiser(module) for part, module in self._parts(m).items()} for m in self.members
        ]

    @staticmethod
    def _parts(member: ReferenceMember) -> dict[str, torch.nn.Module]:
        return {"host": member.host, **dict(member.seeds.items())}

    def _optimiser(self, module: torch.nn.Module) -> torch.optim.Optimizer | None:
        parameters = list(module.parameters())
        if self.config.optimiser == "adamw":
            betas = (self.config.momentum, self.config.second_beta)
            decay = self.config.weight_decay
            return torch.optim.AdamW(parameters, self.config.host_lr, betas, weight_decay=decay)
        return torch.optim.SGD(parameters, self.config.host_lr, momentum=self.config.momentum)

    def change(self, states: SlotStates) -> None:
        """The same seeds in other stages and at other alphas."""
        self.states = states
        heard = torch.isin(states.stage, torch.tensor([int(s) for s in HEARD_STAGES]))
        for member, alphas in zip(self.members, (states.alpha * heard).tolist(), strict=True):
            member.alphas = alphas

    def epoch(self, data: MemberData, clock: Clock) -> Tensor:
        """The mean loss of each member.  # [N]"""
        order, count = self.population._data_order(data.num_samples), self.config.batches_per_epoch
        losses = torch.zeros(len(self.members))
        for b in range(count):
            inputs, targets = data.take(order.batch(clock.episode, clock.epoch * count + b))
            for i in range(len(self.members)):
                losses[i] += self.step(i, inputs[i], targets[i]) / count
        return losses

    def step(self, i: int, inputs: Tensor, targets: Tensor) -> float:
        member = self.members[i]
        parts = self._parts(member)
        learning = self._learning(i)
        heard = [parts[str(s)] for s, way in learning.items() if way == "heard"]
        own = loss_of(member(inputs), targets)
        self._keep_gradients(own, [member.host, *heard])
        for s, way in learning.items():
            if way == "isolated":
                self._keep_gradients(loss_of(member(inputs, member.shadow(s)), targets), [parts[str(s)]])
        for part in ("host", *map(str, learning)):
            if part == "host" or self.states.alpha_mode[i, int(part)] != AlphaMode.DOWN:
                self._move(parts[part], self.optimisers[i][part])
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
    def _keep_gradients(loss: Tensor, modules: Sequence[torch.nn.Module]) -> None:
        parameters = [p for module in modules for p in module.parameters()]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def _move(self, module: torch.nn.Module, optimiser: torch.optim.Optimizer | None) -> None:
        torch.nn.utils.clip_grad_norm_(list(module.parameters()), self.config.clip_norm)
        if self.config.optimiser == "sgd":  # decay is decoupled here, which plain SGD does not know
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.0 - self.config.host_lr * self.config.weight_decay)
        assert optimiser is not None
        optimiser.step()

    def host_rows(self) -> Tensor:
        return torch.stack(
            [torch.cat([flatten(p) for p in (*m.host.segments, m.host.head)]) for m in self.members]
        )

    def seed_row(self, i: int, s: int, of: Callable[[torch.nn.Module], Tensor] = flatten) -> Tensor:
        """A seed's flat weights, the gate's at the end."""
        seed = self.members[i].seed_at(s)
        return torch.cat([of(seed.seed), of(seed.gate)]) if seed.gate is not None else of(seed.seed)


def seed_row(
    population: Population, states: SlotStates, i: int, s: int, rows: Tensor | None = None
) -> Tensor:
    """The used part of a seed's row, the gate's at the end."""
    slot = population.bodies.slots[s]
    flat = (population.seeds.weights if rows is None else rows)[i * population.num_slots + s]
    body = flat[: slot.seeds[int(states.blueprint[i, s])].layout.total]
    if STYLE_BLEND[Style(int(states.style[i, s]))] is not Blend.GATE:
        return body
    return torch.cat([body, flat[slot.gate_start : slot.width]])
