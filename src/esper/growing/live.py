"""Slots inside a model that somebody else trains: seeds that come, are heard by degrees, and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.lifecycle.actions import STYLE_BLEND, Blend, Style
from esper.lifecycle.slot_states import AlphaMode, SlotStates
from esper.lifecycle.stages import HEARD_STAGES, Stage
from esper.population.blueprints import Gate, build_blueprint
from esper.population.extract import AddGraft, GateGraft, Grafted, MultiplyGraft
from esper.population.gradients import (
    EXPLODING_NORM,
    VANISHING_NORM,
    SeedGradients,
    gradient_health,
)
from esper.population.hosts import Host


class LiveSlot(nn.Module):
    """A place in a model where a seed may live. Without one, or while it is not heard, nothing changes."""

    def __init__(self, topology: str, width: int, spatial_dims: int):
        super().__init__()
        self.kind = (topology, width, spatial_dims)
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.blend = Blend.ADD
        self.strength = 0.0

    def plant(self, blueprint: int, device: torch.device) -> None:
        topology, width, spatial_dims = self.kind
        self.seed = build_blueprint(blueprint, topology, width, spatial_dims).to(device)
        self.gate = Gate(width, topology).to(device)
        self.strength = 0.0

    def clear(self) -> None:
        self.seed = self.gate = None
        self.strength = 0.0

    def graft(self) -> Grafted:
        """What the slot does to an activation now."""
        assert self.seed is not None, "an empty slot has nothing to graft"
        if self.blend is Blend.GATE:
            assert self.gate is not None, "a seed comes with its gate"
            return GateGraft(self.seed, self.strength, self.gate)
        return (MultiplyGraft if self.blend is Blend.MULTIPLY else AddGraft)(self.seed, self.strength)

    def forward(self, h: Tensor) -> Tensor:
        if self.seed is None or self.strength == 0.0:
            return h
        result: Tensor = self.graft()(h)
        return result

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """For a while, another strength: 0 leaves the seed out, 1 adopts it."""
        before, self.strength = self.strength, strength
        try:
            yield
        finally:
            self.strength = before


class LiveSlots:
    """All slots of one model, and the parameters of theirs that the user's optimiser moves."""

    def __init__(self, host: Host, optimiser: Optimizer, device: torch.device, seed: int):
        self.slots = [LiveSlot(host.topology, width, host.spatial_dims) for width in host.widths]
        self.optimiser = optimiser
        self.device = device
        self._seed, self._births = seed, 0
        self._handed_over: dict[int, list[nn.Parameter]] = {}

    def update(self, states: SlotStates, germinated: Sequence[bool], ended: Sequence[bool]) -> None:
        """Let the bodies follow the states of one member."""
        for k, slot in enumerate(self.slots):
            if ended[k]:
                self._take_back(k)
                slot.clear()
            if germinated[k]:
                self._births += 1
                with torch.random.fork_rng(devices=[]):  # a seed's first weights belong to the run's seed
                    torch.manual_seed(hash((self._seed, self._births)) & 0x7FFFFFFF)
                    slot.plant(int(states.blueprint[0, k]), self.device)
            stage = Stage(int(states.stage[0, k]))
            slot.blend = STYLE_BLEND[Style(int(states.style[0, k]))]
            slot.strength = float(states.alpha[0, k]) if stage in HEARD_STAGES else 0.0
            if stage in HEARD_STAGES and k not in self._handed_over:
                self._hand_over(k)
            if slot.seed is not None:
                slot.requires_grad_(int(states.alpha_mode[0, k]) != AlphaMode.DOWN)

    def _hand_over(self, k: int) -> None:
        """From now on the user's optimiser trains this seed, by the rules of its first group."""
        parameters = list(self.slots[k].parameters())
        self.optimiser.param_groups[0]["params"].extend(parameters)
        self._handed_over[k] = parameters

    def _take_back(self, k: int) -> None:
        gone = {id(p) for p in self._handed_over.pop(k, [])}
        for group in self.optimiser.param_groups:
            for parameter in [p for p in group["params"] if id(p) in gone]:
                self.optimiser.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]

    def gradients(self, host_norm: float, host_parameters: int) -> SeedGradients:
        """The health of the gradients that the latest backward pass left in each seed.  # each [1, S]"""
        rows = [self._gradient(slot, host_norm, host_parameters) for slot in self.slots]
        norm, vanishing, exploding, ratio = torch.tensor(rows).T.unsqueeze(1)  # each [1, S]
        return SeedGradients(norm, gradient_health(vanishing, exploding), vanishing, exploding, ratio)

    def _gradient(self, slot: LiveSlot, host_norm: float, host_parameters: int) -> list[float]:
        if slot.seed is None:
            return [float("nan")] * 4
        norms = [float(p.grad.norm()) for p in slot.seed.parameters() if p.grad is not None]
        if not norms:
            return [float("nan")] * 4
        total = sum(n * n for n in norms) ** 0.5
        size = sum(p.numel() for p in slot.seed.parameters())
        vanishing = sum(n < VANISHING_NORM for n in norms) / len(norms)
        exploding = sum(not n <= EXPLODING_NORM for n in norms) / len(norms)
        return [total, vanishing, exploding, total / (host_norm + 1e-12) * (host_parameters / size) ** 0.5]
