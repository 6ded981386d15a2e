"""What an update reports: summed on the device, read once at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    epochs_done: float  # optimiser steps taken, over minibatches per epoch
    stopped_early: bool  # the KL limit was reached
    steps_vetoed: int  # optimiser steps refused for a non-finite gradient
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


class Tally:
    """The sums of an update, on the device. `pack` and `unpack` agree on one layout."""

    MEANS = ("policy_loss", "value_loss", "kl", "clip_fraction", "grad_norm")

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self._means = torch.zeros(
            len(self.MEANS) + 1, dtype=torch.float64, device=device
        )  # sums and their count
        self._heads = torch.zeros(
            3, num_heads, dtype=torch.float64, device=device
        )  # KL, entropy and their count
        self._steps = torch.zeros(2, dtype=torch.float64, device=device)  # taken, refused as non-finite

    def add(self, terms: LossTerms, grad_norm: Tensor, live: Tensor, vetoed: Tensor) -> None:
        """live []: not stopped before this minibatch; vetoed []: its step was not taken."""
        finite = grad_norm.isfinite()
        norm = torch.where(finite, grad_norm, 0.0)
        means = (
            terms.policy_loss,
            terms.value_loss,
            terms.kl,
            terms.clip_fraction,
            norm,
            torch.ones_like(norm),
        )
        heads = (terms.head_kl, terms.head_entropy, torch.ones_like(terms.head_kl))
        self._means += torch.where(live, torch.stack(means).double(), 0.0)
        self._heads += torch.where(live & terms.head_used, torch.stack(heads).double(), 0.0)
        self._steps += torch.stack((~vetoed, live & ~finite))

    def pack(self) -> Tensor:
        """Everything in one vector.  # float64"""
        return torch.cat((self._means, self._steps, self._heads.flatten()))

    @staticmethod
    def unpack(numbers: Sequence[float], head_names: Sequence[str]) -> dict[str, float | dict[str, float]]:
        """The packed sums as named means; `steps_taken` and `steps_vetoed` are counts."""
        size, heads = len(Tally.MEANS), len(head_names)
        looked_at = max(numbers[size], 1.0)
        kl, entropy, count = (numbers[size + 3 :][i * heads : (i + 1) * heads] for i in range(3))
        named: dict[str, float | dict[str, float]] = {
            name: numbers[i] / looked_at for i, name in enumerate(Tally.MEANS)
        }
        named |= {"steps_taken": numbers[size + 1], "steps_vetoed": numbers[size + 2]}
        named["head_kl"] = _means_by_name(kl, count, head_names)
        named["head_entropy"] = _means_by_name(entropy, count, head_names)
        return named


def _means_by_name(sums: Sequence[float], counts: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    return {
        name: total / count if count else float("nan")
        for name, total, count in zip(names, sums, counts, strict=True)
    }


def read_back(values: Tensor) -> list[float]:
    """The one place where the learner waits for its device: a copy into pinned memory, then its event."""
    if values.device.type != "cuda":
        return [float(v) for v in values.tolist()]
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return [float(v) for v in host.tolist()]
