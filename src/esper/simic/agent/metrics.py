"""What an update reports: summed on the device, read once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.agent.losses import LossTerms


@dataclass(frozen=True)
class UpdateMetrics:
    """One update in plain numbers. Means run over the minibatches that were looked at."""

    policy_loss: float
    value_loss: float
    kl: float  # of the whole action, per step
    clip_fraction: float  # share of relevant ratios outside the clip range
    grad_norm: float  # before clipping
    explained_variance: float  # of the returns, by the values of the rollout
    epochs_done: float  # optimizer steps taken, over minibatches per epoch
    stopped_early: bool  # the KL limit was reached
    steps_vetoed: int  # optimizer steps refused for a non-finite gradient
    entropy_coefficient: float
    steps_learned: int  # transitions
    steps_dropped: int  # transitions with a non-finite return
    head_entropy: Mapping[str, float]  # 0..1; NaN if no step reads the head
    head_kl: Mapping[str, float]  # NaN if no step reads the head

    @property
    def entropy(self) -> float:
        """The mean over the heads that were read, 0..1."""
        read = [value for value in self.head_entropy.values() if value == value]
        return sum(read) / len(read) if read else float("nan")


class UpdateTally:
    """The sums of an update, kept on the device in tensors that stay in their places; `means` names them."""

    MEANS = ("policy_loss", "value_loss", "kl", "clip_fraction", "grad_norm")
    COUNTS = ("steps_taken", "steps_vetoed")
    HEAD_MEANS = ("head_kl", "head_entropy")

    def __init__(self, num_heads: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self._means = zeros(len(self.MEANS) + 1)  # the last one counts the minibatches
        self._counts = zeros(len(self.COUNTS))
        self._heads = zeros(len(self.HEAD_MEANS) + 1, num_heads)  # the last row counts the minibatches

    def begin(self) -> None:
        """Forget the update before."""
        torch._foreach_zero_([self._means, self._counts, self._heads])

    def add(self, terms: LossTerms, grad_norm: Tensor, live: Tensor, vetoed: Tensor) -> None:
        """live []: not stopped before this minibatch; vetoed []: its step was not taken."""
        finite = grad_norm.isfinite()
        values = {"grad_norm": torch.where(finite, grad_norm, 0.0)}
        means = [values[name] if name in values else getattr(terms, name) for name in self.MEANS]
        heads = [getattr(terms, name) for name in self.HEAD_MEANS]
        self._means += torch.where(live, torch.stack([*means, torch.ones_like(terms.kl)]).double(), 0.0)
        ones = torch.ones_like(terms.head_kl)
        self._heads += torch.where(live & terms.head_used, torch.stack([*heads, ones]).double(), 0.0)
        self._counts += torch.stack((~vetoed, live & ~finite))

    def means(self) -> dict[str, Tensor]:
        """Each quantity by its name: a mean over the minibatches, NaN for a head that none read, or a count.

        # [] float64, or [heads]
        """
        totals, heads = self._means[:-1] / self._means[-1].clamp(min=1), self._heads[:-1] / self._heads[-1]
        return {
            **dict(zip(self.MEANS, totals, strict=True)),
            **dict(zip(self.COUNTS, self._counts, strict=True)),
            **dict(zip(self.HEAD_MEANS, heads, strict=True)),
        }


def read_back(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The numbers of some tensors, by name, in one transfer.

    The one place where the learner waits for its device: a copy into pinned memory, then its event.
    """
    values = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
        values = host
    sizes = [tensor.numel() for tensor in tensors.values()]
    return dict(zip(tensors, (part.tolist() for part in values.split(sizes)), strict=True))
