"""A small policy for tests and benchmarks of the learner: a vector in, independent heads out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor, nn

from esper.tamiyo.policy.distribution import MaskedHeads
from esper.tamiyo.policy.network import PolicyOutput, RecurrentCore, linear
from esper.utils.settings import Config


class FlatPolicyConfig(Config):
    """The shape of a FlatPolicy."""

    width: int = Field(default=64, ge=1, description="width of the encoder's layers and of the memory")
    depth: int = Field(default=2, ge=1, description="layers of the encoder")
    recurrent: bool = Field(default=False, description="whether the policy has a memory")


@dataclass(frozen=True)
class FlatObservation:
    """A vector per row."""

    features: Tensor  # [..., F] float32


@dataclass(frozen=True)
class FlatMasks:
    """The legal choices of every head, padded with False to the widest head."""

    legal: Tensor  # [..., H, C] bool


def padded_choices(head_sizes: Sequence[int]) -> Tensor:
    """Everything legal: True where head h really has choice c.  # [H, C]"""
    return torch.arange(max(head_sizes)) < torch.tensor(list(head_sizes)).unsqueeze(-1)


class FlatPolicy(nn.Module):
    """An MLP encoder, an optional recurrent core, and one linear layer for all heads.

    Every head is read at every step; a step is forced when each head has a single legal choice.
    """

    def __init__(
        self, num_features: int, head_sizes: Sequence[int], config: FlatPolicyConfig | None = None
    ) -> None:
        super().__init__()
        self.config = config or FlatPolicyConfig()
        self.head_sizes = tuple(head_sizes)
        self.head_names = tuple(f"head {i}" for i in range(len(self.head_sizes)))
        self.choices = max(self.head_sizes)
        width = self.config.width
        widths = [num_features] + [width] * self.config.depth
        layers = [layer for i, o in pairwise(widths) for layer in (linear(i, o), nn.Tanh())]
        self.encoder = nn.Sequential(*layers)
        self.core = RecurrentCore(width, width) if self.config.recurrent else None
        self.heads = linear(width, len(self.head_sizes) * self.choices, gain=0.01)
        self.value_head = linear(width, 1, gain=1.0)

    def initial_state(self, num_rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Zeros, of width 0 where there is no memory.  # [N, state]"""
        return torch.zeros(num_rows, 0 if self.core is None else 2 * self.core.width, device=device)

    def sequence(
        self,
        observation: FlatObservation,
        masks: FlatMasks,
        state: Tensor,
        resets: Tensor,
        actions: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyOutput:
        """As `TamiyoNet.sequence` says; every head is read at every step."""
        memory, state = self._remember(observation, state, resets)
        logits = self.heads(memory).unflatten(-1, (len(self.head_sizes), self.choices))
        heads = MaskedHeads(logits, masks.legal)
        if actions is None:
            actions = heads.mode() if uniforms is None else heads.sample(uniforms)
        relevant = torch.ones_like(actions, dtype=torch.bool)
        return PolicyOutput(
            **vars(heads.evaluate(actions, relevant)),
            actions=actions,
            relevant=relevant,
            forced=(heads.num_legal == 1).all(-1),
            value=self.value_head(memory).squeeze(-1),
            state=state,
        )

    def _remember(self, observation: FlatObservation, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """What the policy knows after each step.  # [N, T, width]"""
        encoded = self.encoder(observation.features)
        return (encoded, state) if self.core is None else self.core(encoded, state, resets)
