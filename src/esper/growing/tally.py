"""Adding up what a model makes of many batches: loss and score over all of them, and by parts of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.growing.batches import Judge, Judged, count_targets


@dataclass(frozen=True)
class Evaluation:
    """A pass over the validation data."""

    loss: float
    score: float
    blocks: Tensor  # [blocks] scores of parts of the data


class Tally:
    """Loss and score over many batches, whole and by blocks, without waiting for the device in between."""

    def __init__(self, judge: Judge, blocks: int):
        self.judge, self.blocks = judge, blocks
        self.samples = self.batches = 0
        self._losses: list[Tensor] = []
        self._sizes: list[Tensor] = []  # how much each batch counts in the loss
        self._scores: list[tuple[int, Tensor, Tensor]] = []  # block, weight, score
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._spread: list[tuple[int, Tensor, Tensor]] = []  # of targets: rows, means, squared deviations

    def add(self, judged: Judged) -> None:
        """Another batch."""
        self._losses.append(judged.loss.detach().float())
        self._sizes.append(self._weight(judged.targets, judged.samples, self.judge.settings.loss))
        if judged.outputs is None or judged.targets is None:
            assert judged.score is not None, "what has no outputs has a score"
            self._scores.append((self.batches % self.blocks, self._sizes[-1], judged.score))
        elif self.judge.pooled:
            self._kept.append((judged.outputs.cpu(), judged.targets.cpu()))
        else:
            self._score_parts(judged.outputs, judged.targets, self.samples)
        if self.judge.r_squared and judged.targets is not None:
            values = judged.targets.float()  # columns on the last axis
            values = values.unsqueeze(1) if values.ndim == 1 else values.flatten(0, -2)
            variance, mean = torch.var_mean(values, 0, correction=0)
            self._spread.append((len(values), mean, variance * len(values)))
        self.samples, self.batches = self.samples + judged.samples, self.batches + 1

    def _score_parts(self, outputs: Tensor, targets: Tensor, first: int) -> None:
        """Samples are dealt to the blocks in turn."""
        for k in range(min(self.blocks, len(outputs))):
            part, own = targets[k :: self.blocks], outputs[k :: self.blocks]
            weight = self._weight(part, len(part), self.judge.settings.metric)
            self._scores.append(((first + k) % self.blocks, weight, self.judge.score(own, part)))

    def _weight(self, targets: Tensor | None, samples: int, function: Any) -> Tensor:
        """How much a mean counts among others: by the targets that count, or by samples where it is taken by
        a function of the user's.  # → []"""
        return torch.tensor(samples) if targets is None or function is not None else count_targets(targets)

    def result(self) -> Evaluation:
        """What all batches together gave."""
        whole = None
        if self._kept:
            outputs, targets = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
            whole = float(self.judge.score(outputs, targets))
            self._score_parts(outputs, targets, 0)
        sizes = torch.stack(self._sizes).cpu().double()
        loss = float((torch.stack(self._losses).cpu().double() * sizes).sum() / sizes.sum())
        block = torch.tensor([block for block, _, _ in self._scores])
        weight = torch.stack([weight for _, weight, _ in self._scores]).cpu().double()
        scores = torch.stack([score.detach() for _, _, score in self._scores]).cpu().double()
        sums = torch.zeros(self.blocks).double().index_add(0, block, scores * weight)
        weights = torch.zeros(self.blocks).double().index_add(0, block, weight)
        parts = (sums / weights)[weights > 0]
        total = sums.sum() / weights.sum() if whole is None else torch.tensor(whole)
        if self.judge.r_squared:
            parts, total = self._explained(parts), self._explained(total)
        return Evaluation(loss, float(total), parts.float())

    def _explained(self, error: Tensor) -> Tensor:
        """R² = 1 − mean squared error / variance of the targets; −1 where an untrained model is below that.

        The variance is that of all targets about the means of their columns, averaged over the columns.
        """
        counts, means, squares = zip(*self._spread, strict=True)
        count = torch.tensor(counts).double().unsqueeze(1)  # [batches, 1] rows
        mean = torch.stack(means).cpu().double()  # [batches, columns]
        away = mean - (count * mean).sum(0) / count.sum()
        variance = (torch.stack(squares).cpu().double() + count * away**2).sum(0).mean() / count.sum()
        return (1.0 - error / (float(variance) or 1.0)).clamp(min=-1.0)
