"""Grow a small language model: `python examples/grow_transformer.py`.

The model is a class of one's own with a ModuleList of blocks, as such models are usually written. It is not
edited: its forward is traced, and a slot is found after every block. The ungrown models train for the same
epochs, so that growth spends more FLOPs: this shows the calls, not that growth pays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import esper
from esper.growing.gain import Gain, gain_on_test
from esper.tasks import load_task

EPOCHS = 12


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


def main(epochs: int = EPOCHS, members: int = 5) -> Gain:
    """Train with and without growth and compare on test data; small numbers make a quick trial."""
    text = load_task("text")
    train, val, test = text.train, text.validation, text.test()
    runs = {
        controller: esper.grow(
            lambda: LanguageModel(text.num_classes, text.input_shape[0]),
            train=(train.inputs[:1536], train.targets[:1536]),
            val=(val.inputs[:256], val.targets[:256]),
            slots=["blocks"],  # after each block
            blueprints=["MLP", "FLEX_ATTENTION"],
            controller=controller,
            epochs=epochs,
            members=members,
            lr=1e-2,
        )
        for controller in ("static", "heuristic")
    }
    grown = runs["heuristic"]
    print(grown.report())
    gain = gain_on_test(grown, runs["static"], test.inputs[:512], test.targets[:512])
    print(f"\n{gain}")
    return gain


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small lose more than they gain by sharing work
    main()
