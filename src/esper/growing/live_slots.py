"""Seeds on the submodules of a living model: they come, are heard by degrees, and go; and the way out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from esper.growing.places import Place
from esper.growing.plain import grown_name, plain_graft
from esper.growing.tracing import is_sequence
from esper.lifecycle.actions import Blend
from esper.population.blueprints import Gate, build_blueprint
from esper.population.extract import AddGraft, GateGraft, Grafted, MultiplyGraft
from esper.population.gradients import EXPLODING_NORM, VANISHING_NORM


class LiveSlot(nn.Module):
    """A hook on a submodule. Without a seed, or at strength 0, it leaves the output as it is."""

    def __init__(self, place: Place):
        super().__init__()
        self.place = place
        self.blueprint = -1
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.blend = Blend.ADD
        self.strength = 0.0

    def plant(self, blueprint: int, device: torch.device, draw: int) -> None:
        """Begin a seed; its first weights belong to `draw`, and the caller's generator is left as it was."""
        place = self.place
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw)
            self.seed = build_blueprint(blueprint, place.topology, place.width, place.spatial_dims).to(device)
            self.gate = Gate(place.width, place.topology).to(device)
        self.blueprint, self.strength = blueprint, 0.0

    def clear(self) -> None:
        """End the seed."""
        self.seed = self.gate = None
        self.blueprint, self.strength = -1, 0.0

    def graft(self) -> Grafted:
        """What the slot does to an activation now."""
        assert self.seed is not None, "an empty slot has nothing to graft"
        if self.blend is Blend.GATE:
            assert self.gate is not None, "a seed comes with its gate"
            return GateGraft(self.seed, self.strength, self.gate)
        return (MultiplyGraft if self.blend is Blend.MULTIPLY else AddGraft)(self.seed, self.strength)

    def forward(self, h: Tensor) -> Tensor:
        """The activation with as much of the seed as is heard."""
        if self.seed is None or self.strength == 0.0:
            return h
        result: Tensor = self.graft()(h)
        return result

    def hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The forward hook: another output where the seed is heard, else None, which changes nothing."""
        if self.seed is None or self.strength == 0.0:
            return None
        return (self(output[0]), *output[1:]) if self.place.in_tuple else self(output)

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """For a while, another strength: 0 leaves the seed out, 1 adopts it."""
        before, self.strength = self.strength, strength
        try:
            yield
        finally:
            self.strength = before

    def gradient(self, host_norm: Tensor, host_parameters: int) -> Tensor:
        """Norm, shares of vanishing and exploding tensors, ratio to the host's, of the latest backward pass.

        host_norm [] → [4], NaN where nothing was trained
        """
        grads = [p.grad for p in self.seed.parameters() if p.grad is not None] if self.seed else []
        if not grads:
            return torch.full((4,), float("nan"), device=host_norm.device)
        norms = torch.stack([g.norm() for g in grads]).to(host_norm)
        size = sum(g.numel() for g in grads)
        total = norms.square().sum().sqrt()
        vanishing = (norms < VANISHING_NORM).float().mean()
        exploding = (~(norms <= EXPLODING_NORM)).float().mean()
        ratio = total / (host_norm + 1e-12) * (host_parameters / size) ** 0.5
        return torch.stack([total, vanishing, exploding, ratio])


class Hooks:
    """The slots of one model, attached to it."""

    def __init__(self, model: nn.Module, places: Sequence[Place]):
        self.model = model
        self.slots = [LiveSlot(place) for place in places]
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Let the model hear its seeds."""
        self.detach()
        self._handles = [
            self.model.get_submodule(slot.place.name).register_forward_hook(slot.hook) for slot in self.slots
        ]

    def detach(self) -> None:
        """Leave the model as it was given."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def plain_model(self) -> nn.Module:
        """A copy of the model on the CPU, in eval mode, with every heard seed as a plain module of torch's.

        Its class and the names of its tensors are the model's own; it needs no esper to be loaded.
        """
        self.detach()
        try:
            model = copy.deepcopy(self.model).cpu().eval()
        finally:
            self.attach()
        for slot in self.slots:
            if slot.seed is not None and slot.strength > 0:
                graft = plain_graft(copy.deepcopy(slot.graft()).cpu(), slot.place.spatial_dims)
                install(model, slot.place, graft)
        return model


def installed_name(model: nn.Module, place: Place) -> str:
    """The name that a graft behind a submodule has in the model."""
    owner, _, own = place.name.rpartition(".")
    beside = is_sequence(model.get_submodule(owner)) and not is_sequence(model.get_submodule(place.name))
    if beside and not place.in_tuple:
        return f"{owner}.{grown_name(own)}" if owner else grown_name(own)
    return f"{place.name}.grown"


def install(model: nn.Module, place: Place, graft: nn.Module) -> None:
    """Put a plain graft behind a submodule, in place.

    Behind a layer of a sequence it becomes the next entry, behind a whole sequence its last one. Anywhere
    else it becomes a child `grown` of the submodule, which a forward hook runs: a traced module, so that the
    model can be copied, pickled and exported with torch alone.
    """
    module = model.get_submodule(place.name)
    owner, _, own = place.name.rpartition(".")
    parent = model.get_submodule(owner)
    if is_sequence(module):
        module.add_module("grown", graft)
    elif is_sequence(parent) and not place.in_tuple:
        entries = list(parent._modules.items())
        parent._modules.clear()
        for key, child in entries:
            parent._modules[key] = child
            if key == own:
                parent._modules[grown_name(own)] = graft
    else:
        hook = _as_hook(graft, place.in_tuple)
        module.add_module("grown", hook)
        module.register_forward_hook(hook)


def _as_hook(graft: nn.Module, in_tuple: bool) -> fx.GraphModule:
    """A forward hook as a traced module: (module, inputs, output) → the output with the graft."""
    root = nn.Module()
    root.add_module("graft", graft)
    graph = fx.Graph()
    graph.placeholder("module")
    graph.placeholder("inputs")
    output = graph.placeholder("output")
    if in_tuple:
        first = graph.call_function(operator.getitem, (output, 0))
        rest = graph.call_function(operator.getitem, (output, slice(1, None)))
        graph.output(graph.call_function(operator.add, ((graph.call_module("graft", (first,)),), rest)))
    else:
        graph.output(graph.call_module("graft", (output,)))
    return fx.GraphModule(root, graph, class_name="Grown")
