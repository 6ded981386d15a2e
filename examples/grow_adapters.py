"""Grow adapters into a trained and frozen network: `python -m examples.grow_adapters`.

A small GPT learns the sources of Python's standard library and is frozen. Then it has to learn English prose,
the language reference that Python ships with, by adapters alone. Grown: a low-rank seed (LORA) after each of
its blocks, which stays if it is shown to help. The usual way: LoRA of rank 1 in every linear layer, which has
exactly as many parameters as a seed after every block, trained for at least as many FLOPs. Both by the same
loop, and compared on text that neither has seen.
"""

from __future__ import annotations

import copy
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

import esper
from esper.growing.result import Grown
from esper.tasks import load_task
from esper.tasks.text import CONTEXT, encode
from esper.utils.statistics import mean_interval

EPOCHS = 10
WIDTH = 32
Windows = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"{time} tokens for a context of {self.context}")
        mask = torch.ones(time, time, device=tokens.device).triu(1).bool()
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_lora(model: nn.Module) -> nn.Module:
    """A copy with LoRA in every linear layer of its blocks."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                owner, _, own = name.rpartition(".")
                setattr(block.get_submodule(owner), own, LowRank(module))
    return model


def prose(windows: tuple[int, ...]) -> list[Windows]:
    """Neighbouring parts of the language reference, in windows of characters."""
    text = "".join(topics[name] for name in sorted(topics))
    tokens = encode(text)[: sum(windows) * CONTEXT + 1]
    inputs, targets = (tokens[start : start + sum(windows) * CONTEXT].view(-1, CONTEXT) for start in (0, 1))
    return list(zip(inputs.split(windows), targets.split(windows), strict=True))


def trained(model: nn.Module, data: list[Windows], epochs: int, **settings: Any) -> Grown:
    """A model after some epochs, grown or not as the settings say."""
    chosen = {"lr": 1e-2, "batch_size": 64, "progress": False} | settings
    return esper.grow(model, train=data[0], val=data[1], slots=["blocks"], epochs=epochs, **chosen)


def main(
    epochs: int = EPOCHS, seeds: int = 3, windows: tuple[int, ...] = (1024, 512, 512)
) -> tuple[float, float]:
    """Pretrain and freeze, then grow adapters and train the usual ones; compare on test data.

    Returns the mean gain of growth and the half-width of its 95 % interval.
    """
    code = load_task("text")
    first = 3 * windows[0]
    sources = [
        (part.inputs[:count], part.targets[:count])
        for part, count in ((code.train, first), (code.validation, windows[1]))
    ]
    torch.manual_seed(0)
    model = LanguageModel(code.num_classes, CONTEXT, width=WIDTH, depth=4)
    for block in model.blocks:  # as in a GPT, four times as many hidden units
        hidden = 4 * WIDTH
        block.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)
        )
    model = trained(model, sources, epochs, controller="static").model.requires_grad_(False)

    data, scores = prose(windows), list[list[float]]()
    inputs, targets = data[2]
    once = trained(with_lora(model), data, 1, controller="static").record.flops[0]
    for seed in range(seeds):
        grown = trained(model, data, epochs, controller="schedule:lora@0", seed=seed)
        enough = -int(-grown.record.flops[0] // once)  # epochs of the other that cost as much
        torch.manual_seed(seed)
        everywhere = trained(with_lora(model), data, enough, controller="static", seed=seed)
        models = (grown.model, everywhere.model, model)
        scores.append([float((each(inputs).argmax(-1) == targets).float().mean()) for each in models])
        sizes = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in models[:2]]
        print(
            f"seed {seed}: frozen {scores[-1][2]:.3f}; grown {scores[-1][0]:.3f}, {sizes[0]:,} parameters in "
            f"{epochs} epochs; LoRA everywhere {scores[-1][1]:.3f}, {sizes[1]:,} in {enough}"
        )
    print(grown.report())
    mean, half = mean_interval([adapted - usual for adapted, usual, _ in scores])
    print(f"\nGrown against LoRA everywhere: {100 * mean:+.2f} ± {100 * half:.2f} points of test accuracy.")
    return mean, half


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
