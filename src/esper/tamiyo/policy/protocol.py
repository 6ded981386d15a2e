"""What the learner asks of a policy, and the records that travel between them.

Observations and masks are frozen dataclasses of tensors that share their leading axes: [N, ...] for one
step, [N, T, ...] for a sequence. A step is a sequence of length 1, so that acting and learning run the
same code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.recurrent import RecurrentCore


class HasFeatures(Protocol):
    """An observation: a frozen dataclass of tensors of which one is `features`."""

    @property
    def features(self) -> Tensor: ...  # [..., F] float32


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy says about N rows of T steps with H heads."""

    actions: Tensor  # [N, T, H] int64; 0 where the head is not read
    log_prob: Tensor  # [N, T, H] float32; 0 where the head is not read
    entropy: Tensor  # [N, T, H] in 0..1; 0 where the head is not read
    relevant: Tensor  # [N, T, H] bool: the sampled action reads this head
    forced: Tensor  # [N, T] bool: there was nothing to choose
    fault: Tensor  # [N, T, H] int8: 0 fine, see distribution.Fault
    value: Tensor  # [N, T] float32, in the units that the value head was trained in
    state: Tensor  # [N, state] the memory after the last step


class Policy(nn.Module, ABC):
    """A stochastic policy over H heads with a memory of `state` numbers per row."""

    head_names: tuple[str, ...]
    value_head: nn.Linear  # the last layer of V(s), so that a change of units can be undone in it
    core: RecurrentCore | None  # the memory, if there is one

    def initial_state(self, num_rows: int, on: torch.device | str = "cpu") -> Tensor:
        """The memory of a fresh episode: zeros, of width 0 where there is no memory.  # [N, state]"""
        return torch.zeros(num_rows, self.core.state_size if self.core is not None else 0, device=on)

    @abstractmethod
    def sequence(
        self,
        observation: Any,
        masks: Any,
        state: Tensor,
        resets: Tensor,
        actions: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyOutput:
        """Judge the given actions, or sample by the uniforms, or take the likeliest if neither is given.

        resets [N, T]: the memory is cleared before that step. actions, uniforms [N, T, H].
        """

    @abstractmethod
    def relevant(self, actions: Tensor) -> Tensor:
        """The heads that each action reads, as `sequence` tells it.  # [N, T, H] → [N, T, H] bool"""


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
