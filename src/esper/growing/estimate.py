"""Will it pay to grow into a model? A law that was fitted to measured runs, and the advice that follows.

`python -m studies.growth_law` prints the runs and the fit; docs/handbook.md tells them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.growing.blocks import (
    FEWEST_BLOCKS,
    BlockList,
    check_module,
    count_flops,
    drop_nested,
    find_blocks,
    keep_skippable,
    refuse_lazy,
)
from esper.simic.costs import TRAINING_PASSES
from esper.utils.errors import UserError

Advice = Literal["grow", "take half of the depth", "do not grow"]
# Of the parameters, and of the FLOPs of a dense model, that have to be in blocks: in the models that were
# measured it was nearly all. A wide output layer, or experts of which few run, leave less to skip.
LEAST_SHARE = 0.8


@dataclass(frozen=True)
class Law:
    """What growth saves at equal loss, as a share of the FLOPs of plain training."""

    targets: str  # what a model predicts, in the plural
    measured: tuple[float, float]  # targets per parameter, the least and the most
    sizes: tuple[float, float]  # parameters, the least and the most
    smaller_below: float  # targets per parameter: with fewer, half of the depth is level or ahead,
    maybe_smaller_below: float = 0.0  # and with fewer than these it was ahead in some cases
    saves: float = 0.0  # share of FLOPs at 20 targets per parameter
    fade: float = 0.0  # what it loses with each factor of e in the targets per parameter
    margin: float = 0.0  # half-width of what is quoted, wide enough for what was measured with other data
    useful_sizes: tuple[float, float] = (0.0, math.inf)  # parameters: elsewhere it was behind in some runs
    fewest_blocks: int = 0  # with fewer it was measured once, and level
    epochs: float = math.inf  # passes over the data: with more of them growth was not measured
    most: float = 0.0  # targets per parameter: with more, plain training is level or ahead; 0: always
    first: float = 0.0  # targets per parameter for half of the blocks, in FLOPs of the whole model

    def saved(self, per_parameter: float) -> float:
        """Return the expected share of FLOPs, within the range of targets that was measured."""
        least, most = self.measured
        return self.saves - self.fade * math.log(min(max(per_parameter, least), most) / 20)

    def grow_at(self, per_parameter: float, equal_compute: bool = True) -> float:
        """Return the best time to grow, as a fraction of the steps, where half of the blocks begin.

        equal_compute: what growth saves is spent on more steps. Otherwise half of the blocks train for no
        longer than growth saves for certain, so that the loss stays that of plain training.
        """
        compute = min(0.5, self.first / per_parameter)
        best = 2 * compute / (1 + compute)  # a step costs half before the growth
        certain = max(0.0, self.saved(per_parameter) - self.margin)
        return best if equal_compute else min(best, 2 * certain)  # half of the blocks cost half


# A GPT of 8 layers at 4, 6 and 12 PFLOP, any two of which predict the third within 0.02. On English the
# same GPT gained 0.0027 of loss, which would be 0.06 of the FLOPs on the curve of source code: hence the
# margin. 13 million parameters at 14 tokens (five seeds) and 14 million at 12.6 (one, named beforehand)
# gained about as much, and 25 million at 11.6 were behind. The rest was measured with copies behind their
# sources: the best time is 0.3 of the compute at 14 tokens a parameter and 0.12 at 43, about the same amount;
# half of the depth is ahead at 3.6 tokens; 0.2 million parameters were behind half of the depth at 20 tokens,
# 21 million level (the middle ahead in a run), and so was Muon; a Llama was far behind at one of two rates.
TOKENS = Law(
    "tokens",
    saves=0.176,
    fade=0.049,
    margin=0.12,
    measured=(14.2, 43.0),
    sizes=(6.3e6, 6.4e6),
    useful_sizes=(3e6, 1.5e7),
    fewest_blocks=8,
    epochs=5.0,
    smaller_below=14.0,
    most=43.0,
    first=4.6,
)
# Samples with one label. From 1.4 to 14 samples a parameter a ResNet on CIFAR-10 and two perceptrons on
# `letter` were level with the better of whole and half, or behind it; a ViT was ahead in accuracy at 0.95 and
# 1.9, and behind in loss. Below 1 half of the depth was level with grown networks or ahead of them, but for
# that ViT; it still was at 1.4 for one of the perceptrons, and at 1.8 for the ResNet.
SAMPLES = Law("samples", measured=(0.2, 14), sizes=(3.6e4, 3.6e6), smaller_below=1.0, maybe_smaller_below=2.0)


@dataclass(frozen=True)
class Estimate:
    """What growing into a model can be expected to do."""

    name: str  # of the model's class
    parameters: int  # without embeddings
    blocks: int  # that can be skipped
    targets: float  # that training sees, over all epochs
    flops: float  # of plain training; NaN where they are not known
    law: Law = field(repr=False)
    epochs: float = 1.0
    share: float = 1.0  # of the parameters that is in blocks, or of their FLOPs that a token takes
    layer_norms: bool = True  # in the blocks

    @property
    def per_parameter(self) -> float:
        """Targets for each parameter."""
        return self.targets / self.parameters

    @property
    def advice(self) -> Advice:
        """What to do."""
        if self._like_measured and self.per_parameter < self.law.smaller_below:
            return "take half of the depth"
        return "do not grow" if self.grow_at is None else "grow"

    @property
    def _like_measured(self) -> bool:
        """Whether the size is useful, and nearly all is in blocks, which all run, and have a GPT's norms."""
        least, most = self.law.useful_sizes
        in_blocks = self.blocks >= FEWEST_BLOCKS and self.share >= LEAST_SHARE
        return least <= self.parameters <= most and in_blocks and self.layer_norms

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        law = self.law
        if self.blocks < FEWEST_BLOCKS:
            return (
                f"{self.name} has {self.blocks} blocks of one shape in a row with weights of their own that "
                f"are not frozen, fewer than {FEWEST_BLOCKS}"
            )
        if not self.layer_norms:
            return f"{self.name} has no LayerNorm in its blocks, and with other norms a run was behind"
        if self.share < LEAST_SHARE:
            return (
                f"{100 * self.share:.0f} % of {self.name} is in blocks that run for each {law.targets[:-1]}, "
                f"and growth was measured where nearly all is (at least {100 * LEAST_SHARE:.0f} %)"
            )
        each = f"{self.per_parameter:.2g}" if self.per_parameter < 10 else f"{round(self.per_parameter, 1):g}"
        seen = f"training sees {each} {law.targets} for each parameter of {self.name}"
        least, most = law.useful_sizes
        if self.advice == "do not grow" and self._like_measured and self.blocks < law.fewest_blocks:
            return f"{self.name} has {self.blocks} blocks; savings were measured from {law.fewest_blocks} on"
        if self.advice == "do not grow" and self.epochs > law.epochs:
            return f"training takes {self.epochs:g} epochs; savings were measured for at most {law.epochs:g}"
        if self.advice == "do not grow" and (self.per_parameter <= law.most or self.parameters < least):
            limit = f"above {most:,.0f} growth was level with plain training or behind it but for one run"
            if self.parameters < least:
                limit = f"below {least:,.0f} growth was ahead in some runs and behind in others"
            return f"{self.name} has {self.parameters:,} parameters without embeddings, and {limit}"
        if self.advice == "do not grow" and not law.most:
            if self.per_parameter < law.maybe_smaller_below:
                seen += ", where half of the depth was ahead in some cases"
            return f"{seen}; for such data growth was level or behind in all but the accuracy of one ViT"
        if self.advice == "do not grow":
            return f"{seen}; above {law.most:g} growth was measured at 85 alone, twice, and was behind"
        if self.advice == "grow":
            return f"{seen}; between {law.smaller_below:g} and {law.most:g} growth was ahead at equal FLOPs"
        return f"{seen}; below {law.smaller_below:g} half of the depth was mostly as good where measured"

    @property
    def saved(self) -> float:
        """The share of FLOPs, and about of the time, that growth saves at equal loss; 0 without growth."""
        return 0.0 if self.grow_at is None else self.law.saved(self.per_parameter)

    @property
    def grow_at(self) -> float | None:
        """When to grow from half of the blocks, as a fraction of the steps, at equal FLOPs; None: never."""
        law, measured = self.law, self._like_measured and self.blocks >= self.law.fewest_blocks
        pays = self.per_parameter <= law.most and self.epochs <= law.epochs
        return law.grow_at(self.per_parameter) if pays and measured else None

    @property
    def grow_at_equal_steps(self) -> float | None:
        """The same for as many steps as plain training: earlier, so that the loss is no worse."""
        return None if self.grow_at is None else self.law.grow_at(self.per_parameter, equal_compute=False)

    def __str__(self) -> str:
        law, (least, most), (smallest, largest) = self.law, self.law.measured, self.law.sizes
        lines = [
            f"{self.name}: {self.parameters:,} parameters without embeddings, {self.blocks} equal blocks",
            f"plain training: {self.targets:.3g} {law.targets}"
            + ("" if math.isnan(self.flops) else f", {self.flops:.3g} FLOPs"),
            f"{self.advice}: {self.reason}",
        ]
        if not least <= self.per_parameter <= most or not smallest <= self.parameters <= largest:
            lines.append(
                f"outside of the range that was fitted: {least:g} to {most:g} {law.targets} a parameter, "
                f"{smallest:,.0f} to {largest:,.0f} parameters"
            )
        equal_steps = self.grow_at_equal_steps
        if self.advice == "grow" and self.grow_at is not None and equal_steps is not None:
            lines.append(
                f"grown from half of the blocks after {100 * self.grow_at:.0f} % of the steps, it reaches "
                f"the loss of plain training for {100 * self.saved:.0f} ± {100 * law.margin:.0f} % fewer "
                f"FLOPs; with as many steps as plain training, grow after {100 * equal_steps:.0f} %\n"
                "tune the learning rate first: what growth saves depends on it; measured with dense GPTs "
                "over bytes and AdamW"
            )
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    *,
    tokens: float | None = None,
    samples: float | None = None,
    epochs: float = 1,
    example: Any = None,
) -> Estimate:
    """Estimate whether it pays to grow into a model, how much it saves, and when to grow.

    tokens: that a language model sees in training, over all `epochs`; or
    samples: of training data with one label each, seen `epochs` times
    example: the arguments of the model for one sample, a tensor, a tuple or a dict, to count FLOPs; without
        it they are 6 for each parameter and token, or sample, and not known of convolutions

    Raises a UserError for what is no module, and unless one of tokens and samples is a number above 0.
    """
    check_module(model)
    if (tokens is None) == (samples is None):
        given = "neither tokens nor samples are" if tokens is None else "both tokens and samples are"
        raise UserError(
            f"{given} given; give --tokens N (tokens=N in Python) for a language model, or --samples N "
            "(samples=N) for one label a sample"
        )
    for name, value in {"tokens": tokens, "samples": samples, "epochs": epochs}.items():
        number = hasattr(value, "__float__") and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise UserError(f"{name} is {value!r}; give a number above 0")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    targets = samples * epochs if samples is not None else tokens or 0.0
    refuse_lazy(model, type(model).__name__)
    if callable(example):
        raise UserError("example is a function; give the arguments of the model, a tensor, a tuple or a dict")
    unknown = any(p.ndim > 2 for p in model.parameters())
    forward = math.nan if unknown else 2.0 * count_parameters(model, tied=True)
    if example is not None:
        forward = count_flops(model, example) / (1 if tokens is None else _count_tokens(example))
    law = SAMPLES if tokens is None else TOKENS
    return estimate_targets(model, targets, TRAINING_PASSES * forward * targets, law, epochs, example)


def _count_tokens(example: Any) -> int:
    """Count the tokens of the arguments of a model: its labels, its ids, or the steps of its features."""
    named = dict(example) if isinstance(example, Mapping) else {}
    first = [named.get(name) for name in ("labels", "decoder_input_ids", "input_ids")]
    tensors = [leaf for leaf in tree_leaves([first, named or example]) if isinstance(leaf, Tensor)]
    counts = [x.numel() for x in tensors if x.ndim == 2 and x.dtype in (torch.int64, torch.int32)]
    counts += [x[..., 0].numel() for x in tensors[:1] if x.ndim == 3 and x.is_floating_point()]
    if not counts:
        raise UserError("example has no tokens: no ids [batch, time] or features [batch, time, width]")
    return max(1, counts[0])


def estimate_targets(
    model: nn.Module, targets: float, flops: float, law: Law, epochs: float, example: Any = None
) -> Estimate:
    """Estimate from the targets that training sees, and the FLOPs that it takes without growth."""
    lists = find_blocks(model)
    lists = drop_nested(lists if example is None else keep_skippable(model, lists, example))
    parameters, dense = count_parameters(model), count_parameters(model, tied=True)
    inside = sum(count_parameters(block) for each in lists for block in each.blocks)
    share, layer_norms = 1.0, True
    if law is TOKENS:
        kinds = {type(part).__name__ for each in lists for part in each.blocks[0].modules()}
        # T5LayerNorm is an RMSNorm.
        layer_norms = not lists or any("LayerNorm" in kind and "T5" not in kind for kind in kinds)
        # Without an example it is not known how many of the parameters a token takes.
        taken = 1.0 if math.isnan(flops) else flops / (2 * TRAINING_PASSES * dense * targets)
        share = min(inside / dense, taken)
        if lists and example is not None:  # an output layer may be a function of the embedding's weight
            share = min(share, _flops_inside(model, lists, example))
    name, blocks = type(model).__name__, sum(map(len, lists))
    return Estimate(name, parameters, blocks, targets, flops, law, epochs, share, layer_norms)


def _flops_inside(model: nn.Module, lists: Sequence[BlockList], example: Any) -> float:
    """Return the share of the FLOPs of a forward pass that blocks take."""
    with ExitStack() as skipping:
        for each in lists:
            skipping.callback(each.activate, range(len(each)))
            each.activate(())
        outside = count_flops(model, example)
    return 1.0 - outside / max(1, count_flops(model, example))


def count_parameters(model: nn.Module, tied: bool = False) -> int:
    """Count parameters without embeddings, which only look up; tied: with those an output layer shares."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if tied:
        looked_up -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return max(1, sum(p.numel() for p in model.parameters() if id(p) not in looked_up))
