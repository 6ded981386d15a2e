"""One member in plain PyTorch: slow, obvious, and what the population is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blend
from esper.population.blueprints import Gate, build_blueprint
from esper.population.hosts import Host

# h: the host's activation, s: the seed's answer, a: alpha, g: the gate's answer (1 where there is no gate).
BLENDS: dict[Blend, Callable[[Tensor, Tensor, float, Tensor | float], Tensor]] = {
    Blend.ADD: lambda h, s, a, g: h + a * s,
    Blend.MULTIPLY: lambda h, s, a, g: h * (1 + a * torch.tanh(s)),
    Blend.GATE: lambda h, s, a, g: h + a * g * s,
}


class ReferenceSeed(nn.Module):
    """A seed, the way it blends and, for GATE, its gate."""

    def __init__(self, seed: nn.Module, blend: Blend, gate: Gate | None = None) -> None:
        super().__init__()
        if (blend is Blend.GATE) != (gate is not None):
            raise ValueError(
                f"blend is {blend.name} with gate {gate}; GATE needs a gate and the others have none"
            )
        self.seed = seed
        self.gate = gate
        self.blend = blend

    def forward(self, h: Tensor, alpha: float) -> Tensor:
        """The host's activation with the seed heard at strength alpha."""
        gate = 1.0 if self.gate is None else self.gate(h)
        return BLENDS[self.blend](h, self.seed(h), alpha, gate)


class ReferenceMember(nn.Module):
    """A host with a seed, or nothing, in each of its slots."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict()  # by slot index
        self.alphas = [0.0] * host.num_slots

    def germinate(
        self, slot: int, blueprint: int, blend: Blend = Blend.ADD, alpha: float = 0.0
    ) -> ReferenceSeed:
        """Put a new seed into a slot."""
        width = self.host.widths[slot]
        seed = build_blueprint(blueprint, self.host.topology, width, self.host.spatial_dims)
        gate = Gate(width, self.host.topology) if blend is Blend.GATE else None
        self.seeds[str(slot)] = ReferenceSeed(seed, blend, gate)
        self.alphas[slot] = alpha
        return self.seed_at(slot)

    def prune(self, slot: int) -> None:
        """Take the seed out of a slot."""
        del self.seeds[str(slot)]
        self.alphas[slot] = 0.0

    def seed_at(self, slot: int) -> ReferenceSeed:
        seed = self.seeds[str(slot)]
        assert isinstance(seed, ReferenceSeed)
        return seed

    def forward(self, x: Tensor, alphas: Sequence[float] | None = None) -> Tensor:
        """The member's answer; other alphas than its own may be asked for. A seed at alpha 0 is not run."""
        heard = self.alphas if alphas is None else alphas
        for slot, segment in enumerate(self.host.segments):
            x = segment(x)
            if str(slot) in self.seeds and heard[slot] != 0:
                x = self.seed_at(slot)(x, float(heard[slot]))
        logits: Tensor = self.host.head(x)
        return logits

    def without(self, *slots: int) -> list[float]:
        """The alphas of an ablation: these slots at 0."""
        return [0.0 if slot in slots else alpha for slot, alpha in enumerate(self.alphas)]

    def shadow(self, slot: int) -> list[float]:
        """The alphas under which a seed trains in isolation: its own at 1."""
        return [1.0 if index == slot else alpha for index, alpha in enumerate(self.alphas)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over samples and, for text, positions."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def accuracy_of(logits: Tensor, targets: Tensor) -> float:
    """The share of right answers over samples and, for text, positions."""
    return float((logits.argmax(-1) == targets).float().mean())


def gradients(
    member: ReferenceMember, inputs: Tensor, targets: Tensor, alphas: Sequence[float], of: nn.Module
) -> dict[str, Tensor]:
    """The gradient of the loss at these alphas with respect to one part alone; all else is held fixed."""
    names = dict(of.named_parameters())
    loss = loss_of(member(inputs, alphas), targets)
    found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(names.items(), found, strict=True)
    }
