"""A seed on a submodule of a living model, heard by degrees; and a plain graft in its place."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.growing.places import Place, is_sequence
from esper.growing.plain import grown_name
from esper.growing.repeating import Repeat
from esper.growing.widening import Widening
from esper.lifecycle.actions import Blend
from esper.population.blueprints import BlendGate, build_blueprint
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
        self.born = 0  # folds that the model had when the seed was planted
        self.alone = False  # whether the seed learns while the model does not
        self.touched: frozenset[int] = frozenset()  # slots whose activations it makes wider

    def plant(self, blueprint: int, device: torch.device) -> None:
        """Begin a seed with a body of its own, in the dtype of the activation that it reads.

        Its first weights are drawn in float32 by torch's generator, so that they are the same in any dtype.
        """
        place = self.place
        seed = build_blueprint(blueprint, place.topology, place.width, place.spatial_dims)
        gate = BlendGate(place.width, place.topology)
        self.put(blueprint, seed.to(device, place.dtype), gate.to(device, place.dtype))

    def put(self, blueprint: int, seed: nn.Module, gate: nn.Module | None = None) -> None:
        """Begin a seed that is already made."""
        self.seed, self.gate, self.blueprint, self.strength = seed, gate, blueprint, 0.0

    def clear(self) -> None:
        """End the seed."""
        self.seed = self.gate = None
        self.blueprint, self.strength, self.touched = -1, 0.0, frozenset()

    def graft(self) -> Grafted:
        """What the slot does to an activation now."""
        assert self.seed is not None, "an empty slot has nothing to graft"
        if self.blend is Blend.GATE:
            assert self.gate is not None, "a seed comes with its gate"
            return GateGraft(self.seed, self.strength, self.gate)
        return (MultiplyGraft if self.blend is Blend.MULTIPLY else AddGraft)(self.seed, self.strength)

    def hook(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        """The forward hook: another output where the seed is heard, else None, which changes nothing."""
        if self.seed is None or self.strength == 0.0 or isinstance(self.seed, Widening):
            return None
        h = output[0] if self.place.in_tuple else output
        if not self.alone:
            self.copy_modes(module)
        if isinstance(self.seed, Repeat):
            # At strength 1, lerp gives the second tensor to the bit: a fold changes nothing in any dtype.
            result = torch.lerp(h, self.seed.output(h, inputs, named).to(h.dtype), self.strength)
        else:
            result = self.graft()(h)
        return (result, *output[1:]) if self.place.in_tuple else result

    def copy_modes(self, module: nn.Module) -> None:
        """Give the seed the train or eval mode of what it is added to; module: that the slot hangs on."""
        if isinstance(self.seed, Repeat | Widening):
            self.seed.copy_modes()
        else:
            self.train(module.training)

    @contextmanager
    def at_strength(self, strength: float, alone: bool = False) -> Iterator[None]:
        """For a while, another strength: 0 leaves the seed out, 1 adopts it. alone: nothing else learns."""
        before, self.strength, self.alone = self.strength, strength, alone
        try:
            yield
        finally:
            self.strength, self.alone = before, False

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


def installed_name(model: nn.Module, place: Place) -> str:
    """The name that a graft behind a submodule has in the model."""
    owner, _, own = place.name.rpartition(".")
    beside = is_sequence(model.get_submodule(owner)) and not is_sequence(model.get_submodule(place.name))
    if beside and not place.in_tuple:
        return f"{owner}.{grown_name(own)}" if owner else grown_name(own)
    return f"{place.name}.grown"


def install(model: nn.Module, name: str, in_tuple: bool, graft: nn.Module) -> nn.Module:
    """Put a plain graft behind the submodule of a name, in place; the module whose output it then changes.

    Behind a layer of a sequence it becomes the next entry, behind a whole sequence its last one. Anywhere
    else it becomes a child `grown` of the submodule, which a forward hook runs: a traced module, so that the
    model can be copied, pickled and exported with torch alone.
    """
    module = model.get_submodule(name)
    owner, _, own = name.rpartition(".")
    parent = model.get_submodule(owner)
    if is_sequence(module):
        module.add_module(_free("grown", module), graft)
        return module
    if is_sequence(parent) and not in_tuple:
        entries, new = list(parent._modules.items()), _free(grown_name(own), parent)
        parent._modules.clear()
        for key, child in entries:
            parent._modules[key] = child
            if key == own:
                parent._modules[new] = graft
        return graft
    hook = _as_hook(graft, in_tuple)
    module.add_module(_free("grown", module), hook)
    module.register_forward_hook(hook)
    return module


def _free(name: str, module: nn.Module) -> str:
    """A name that no child has yet."""
    return name if name not in module._modules else _free(f"{name}_again", module)


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
