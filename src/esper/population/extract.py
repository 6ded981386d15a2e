"""Taking a member out of the population: a plain module, equal in output."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.blueprints import Gate, build_blueprint
from esper.population.layout import load_flat
from esper.population.population import Population


class Grafted(nn.Module):
    """A seed joined to the host's activation at a fixed strength."""

    def __init__(self, seed: nn.Module, alpha: float):
        super().__init__()
        self.seed = seed
        self.alpha = alpha


class AddGraft(Grafted):
    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h + self.alpha * self.seed(h)
        return result


class MultiplyGraft(Grafted):
    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h * (1.0 + self.alpha * torch.tanh(self.seed(h)))
        return result


class GateGraft(Grafted):
    def __init__(self, seed: nn.Module, alpha: float, gate: nn.Module):
        super().__init__(seed, alpha)
        self.gate = gate

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = h + self.alpha * self.gate(h) * self.seed(h)
        return result


def extract(
    population: Population, states: SlotStates, member: int, fossilised_only: bool = False
) -> nn.Sequential:
    """Member `member` as an ordinary `nn.Sequential` of segments, grafts and head, on the CPU.

    With `fossilised_only` the seeds that were never made permanent are left out.
    """
    if not 0 <= member < population.num_members:
        raise IndexError(
            f"member {member} is out of range; this population has members 0..{population.num_members - 1}"
        )
    stages = {Stage.FOSSILIZED} if fossilised_only else HEARD_STAGES
    slots = states[member].to("cpu")
    parts: list[nn.Module] = []
    for k, segment in enumerate(member_segments(population, member)):
        parts.append(segment)
        if (
            k < population.num_slots
            and Stage(int(slots.stage[0, k])) in stages
            and float(slots.alpha[0, k]) > 0
        ):
            parts.append(graft(population, slots, member, k))
    return nn.Sequential(*parts).eval()


def member_segments(population: Population, member: int) -> list[nn.Module]:
    """One member's segments and head with its weights and running statistics, on the CPU."""
    bodies = population.bodies
    weights = population.hosts.weights[member].cpu().split(bodies.host_sizes)
    modules = []
    for k, (body, row) in enumerate(zip(bodies.segments, weights, strict=True)):
        module = load_flat(copy.deepcopy(body.module).cpu(), row)
        for name, value in population.buffers[k].items():
            module.get_buffer(name).copy_(value[member])
        modules.append(module)
    return modules


def graft(population: Population, slots: SlotStates, member: int, k: int) -> Grafted:
    """The seed in slot k of one member, whose slots are given, with its way of blending."""
    host, slot = population.bodies.host, population.bodies.slots[k]
    row = population.seeds.weights[member * population.num_slots + k].cpu()
    seed = build_blueprint(int(slots.blueprint[0, k]), host.topology, host.widths[k], host.spatial_dims)
    load_flat(seed, row[: slot.seeds[int(slots.blueprint[0, k])].layout.total])
    alpha = float(slots.alpha[0, k])
    blend = STYLE_BLEND[Style(int(slots.style[0, k]))]
    if blend is Blend.GATE:
        gate = load_flat(Gate(host.widths[k], host.topology), row[slot.gate_start : slot.width])
        return GateGraft(seed, alpha, gate)
    return (MultiplyGraft if blend is Blend.MULTIPLY else AddGraft)(seed, alpha)
