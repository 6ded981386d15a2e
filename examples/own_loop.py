"""Grow inside a training loop of one's own: `python examples/own_loop.py`.

The loop is an ordinary one: AdamW with two groups, a schedule, clipping, augmentation. Growth is three lines
of it, marked below. Halfway everything is saved and made anew from the file, as after a stop, which changes
nothing. The same loop without the three lines is what it is compared with, on data that neither has seen, for
the same epochs: growth spends more FLOPs, so this shows the calls, not that growth pays.
"""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper
from esper.growing.result import accuracy, describe_gain

EPOCHS = 30
BATCH = 50


def make_model() -> nn.Sequential:
    """[batch, 1, 8, 8] → [batch, 10]"""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    )


class Loop:
    """A model with its optimizer, its schedule and, where asked, its grower."""

    def __init__(self, data: dict[str, tuple[Tensor, Tensor]], seed: int, epochs: int, grows: bool):
        torch.manual_seed(seed)
        self.data, self.model = data, make_model()
        thick = [p for p in self.model.parameters() if p.ndim > 1]
        thin = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": thick, "weight_decay": 1e-2}, {"params": thin, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        steps = epochs * -(-len(data["train"][1]) // BATCH)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, steps, pct_start=0.05)
        self.grower = None
        if grows:
            self.grower = esper.Grower(  # 1: watch the model and its optimizer
                self.model, self.optimizer, data["train"], data["val"], epochs=epochs, seed=seed, lr=1e-2,
                controller="habit", blueprints=["CONV_LIGHT"],
            )  # fmt: skip

    def train_epoch(self) -> None:
        """One pass over the training data, and a step of the grower."""
        pictures, labels = self.data["train"]
        self.model.train()
        for index in torch.randperm(len(labels)).split(BATCH):
            shift = tuple(torch.randint(-1, 2, (2,)).tolist())
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(pictures[index].roll(shift, (-2, -1))), labels[index]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
        if self.grower is not None:
            self.grower.step()  # 2: measure, decide, grow

    def saved(self) -> bytes:
        """Where the training stands, growth included."""
        assert self.grower is not None
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.optimizer, self.schedule, self.grower)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        """Go on from there."""
        assert self.grower is not None
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.optimizer, self.schedule, self.grower), states, strict=True):
            part.load_state_dict(state)  # the grower last

    def finish(self) -> nn.Module:
        """The trained model, plain."""
        return self.model.eval() if self.grower is None else self.grower.finish()  # 3: a plain model


def main(epochs: int = EPOCHS, seeds: int = 4, samples: int = 1000) -> str:
    """Train with and without growth and compare on test data; small numbers make a quick trial."""
    digits = load_digits()
    pictures = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:samples], "val": order[1000:1300], "test": order[1300:]}
    data = {name: (pictures[index], labels[index]) for name, index in parts.items()}
    inputs, targets = data["test"]
    scores: tuple[list[float], list[float]] = ([], [])
    for seed in range(seeds):
        for grows, found in zip((True, False), scores, strict=True):
            loop = Loop(data, seed, epochs, grows)
            for epoch in range(epochs):
                loop.train_epoch()
                if grows and epoch + 1 == epochs // 2:
                    state, loop = loop.saved(), Loop(data, seed, epochs, grows)
                    loop.load(state)
            plain = loop.finish()
            found.append(float(accuracy(plain(inputs), targets)))
        print(f"seed {seed}: {scores[1][-1]:.3f} without growth, {scores[0][-1]:.3f} with")
    gain = describe_gain(*scores)
    print(f"\n{gain}")
    return gain


if __name__ == "__main__":
    main()
