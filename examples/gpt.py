"""A small GPT and its data, which other examples train: the characters of Python's standard library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.tasks import Split, load_task

VOCABULARY, CONTEXT = 97, 32


class GPT(nn.Module):
    """[batch, time] characters → [batch, time, VOCABULARY] logits of the next ones."""

    def __init__(self, width: int = 32, depth: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        future = torch.ones(time, time, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=future)
        return self.head(self.norm(x))


def make() -> nn.Module:
    """Make the model that the examples train in minutes on a CPU."""
    torch.manual_seed(0)
    return GPT()


def make_large() -> nn.Module:
    """Make one of 6 million parameters: `esper estimate examples/gpt.py:make_large --tokens 1.3e8`."""
    return GPT(width=256, heads=4)


def make_loaders(batch_size: int = 64, samples: int | None = None) -> tuple[DataLoader, DataLoader]:
    """Return loaders of (inputs, targets) for training and validation."""
    task = load_task("text")

    def load(split: Split, shuffle: bool) -> DataLoader:
        data = TensorDataset(split.inputs[:samples], split.targets[:samples])
        return DataLoader(data, batch_size, shuffle=shuffle, drop_last=shuffle)

    return load(task.train, shuffle=True), load(task.validation, shuffle=False)
