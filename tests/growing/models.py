"""Models as strangers write them."""

from __future__ import annotations

from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growing.criterion import Criterion, UserStep
from esper.growing.settings import check_settings
from esper.lifecycle.config import GateConfig, LifecycleConfig

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))  # a few epochs see a whole life


def rising_score(sign: int = 1) -> UserStep:
    """A step whose score only rises, so that the last epoch is the best, or, with -1, only falls."""
    judge, scores = Criterion(check_settings({})), count()
    return lambda model, batch: (judge(model, batch).loss, sign * next(scores) / 1e6)


def small_cnn(width: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    )


def small_mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, outputs))


class Residual(nn.Module):
    """Skip connections and functions in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.second(torch.relu(self.first(x)))
        x = F.relu(self.down(x))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A block that takes a mask and returns a tuple, as in many published transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor]:
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return (x + self.mlp(x),)


class Attention(nn.Module):
    """Causal self-attention with one layer for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """The shape of nanoGPT."""

    def __init__(self, width: int = 8, depth: int = 2, heads: int = 2, vocabulary: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(nn.Module):
    """Embeddings, a ModuleList of blocks, a check of the length, and a mask made from it."""

    def __init__(self, vocabulary: int = 7, context: int = 6, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, time = tokens.shape
        assert batch > 0
        if time > self.context:
            raise ValueError("too long")
        mask = torch.ones(time, time, device=tokens.device).triu(1).bool()
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)[0]
        return self.head(self.norm(x))


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.tokens(x))))


def images(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three easy classes: where the bright square is.  # [n, 1, 8, 8], [n]"""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    x = 0.3 * torch.randn(count, 1, 8, 8, generator=draw)
    for label in range(3):
        x[labels == label, :, :, 2 * label : 2 * label + 3] += 1.0
    return x, labels


def table(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes by the largest of the first three columns.  # [n, 5], [n]"""
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def text(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Counting round and round from a random start.  # [n, 6], [n, 6]"""
    start = torch.randint(0, 7, (count, 1), generator=torch.Generator().manual_seed(seed))
    run = (start + torch.arange(7)) % 7
    return run[:, :-1], run[:, 1:]


def classes_of(model: nn.Module) -> set[str]:
    """Every class in a model, by the package it comes from: what someone needs installed to unpickle it."""
    return {f"{type(part).__module__}.{type(part).__qualname__}" for part in model.modules()}


class Recurrent(nn.Module):
    """A layer that returns a tuple with its state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.tokens(x))
        return self.head(hidden[:, -1])


def _convolutions(before: int, after: int) -> nn.Sequential:
    layers = (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Skips across the whole network, in-place layers, one class for every point."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = _convolutions(1, 4), _convolutions(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.join = _convolutions(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.down(x)
        deep = self.up(self.deep(F.max_pool2d(shallow, 2)))
        return self.head(self.join(torch.cat([shallow, deep], dim=1)))


class TwoInputs(nn.Module):
    """Two inputs, a dictionary as output, weights that are used twice, a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(3, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.left(left) + self.right(right))
        h = self.body(h) if h.mean() > -1 else h
        return {"logits": self.head(torch.relu(h))}
