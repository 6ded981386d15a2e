"""Random lives of random populations: seeds of every kind are born, train, are folded in or end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.hosts import HOST_PRESETS, Host
from esper.population.population import Population
from tests.population.worlds import CLASSES, SMALL, Fold, OneAfterAnother, plant, record
from tests.slots import SlotRecord, shared_data, states_from_records

ALPHAS = (0.25, 0.5, 0.75, 1.0)  # the plan holds them in float32
GROWN_STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)


@contextmanager
def doubles() -> Iterator[None]:
    """Everything that is made meanwhile is float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def random_host(rng: np.random.Generator, preset: str) -> tuple[Callable[[], Host], tuple[int, ...]]:
    """A small host of a preset with one to three slots or more, and the shape of its inputs."""
    depth, width = int(rng.integers(1, 3)), int(rng.choice([2, 4]))
    shape: tuple[int, ...] = (int(rng.integers(3, 6)),)
    options = {"depth": depth, "width": width}
    if preset in ("cnn", "resnet"):
        shape = (int(rng.integers(1, 3)), *[6] * int(rng.integers(1, 3)))
    if preset == "resnet":
        options |= {"stages": int(rng.integers(1, 3)), "hidden": int(rng.integers(1, 5))}
    if preset == "resmlp":
        options["hidden"] = int(rng.integers(1, 6))
    if preset == "gpt":
        options |= {"heads": int(rng.choice([1, 2])), "expansion": int(rng.integers(1, 3))}
        options["width"] *= 2  # a norm over two features passes hardly more gradient on than rounding errors
    return partial(HOST_PRESETS[preset], shape, CLASSES, **options), shape


class Life:
    """A population that lives at random, with plain modules beside it that live the same life."""

    def __init__(self, preset: str, seed: int, members: int = 3, mirrored: bool = True, **settings: Any):
        self.rng = rng = np.random.default_rng(seed)
        make_host, shape = random_host(rng, preset)
        drawn = {
            "folds": int(rng.integers(1, 4)),
            "widest": int(rng.integers(1, 4)),
            "optimizer": str(rng.choice(["adamw", "sgd"])),
            "weight_decay": 0.1,
            "clip_norm": float(rng.choice([0.05, 1e9])),
            "seed_lr": 3e-3,
        }
        config = PopulationConfig(**{**SMALL, **drawn, **settings})
        self.population = Population(make_host, config, torch.arange(members), seed)
        dice = torch.Generator().manual_seed(seed)
        inputs: Tensor = torch.randn(24, *shape, generator=dice)
        targets = torch.randint(CLASSES, (24, *shape) if preset == "gpt" else (24,), generator=dice)
        if preset == "gpt":
            inputs = torch.randint(CLASSES, (24, *shape), generator=dice)
        self.data = shared_data(inputs, targets, members)
        self.inputs = inputs[:5]
        self.states = SlotStates.empty(members, self.population.num_slots)
        self.folds: list[list[Fold]] = [[] for _ in range(members)]
        self.plain = OneAfterAnother(self.population, self.states) if mirrored else None
        self.epochs = 0

    def sow(self, awake: bool = True, share: float = 0.6, stages: tuple[Stage, ...] = GROWN_STAGES) -> None:
        """New seeds of any kind that fits in some of the empty slots, in any stage and at any strength."""
        fits = self.population.growable()
        records = [
            [
                self._seed(fits[i, s], stages) if self.rng.random() < share else None
                for s in range(fits.shape[1])
            ]
            for i in range(fits.shape[0])
        ]
        self.states = plant(self.population, states_from_records(records), awake)
        if self.plain is not None:
            for i, s in self.seeds():
                name, style = int(self.states.blueprint[i, s]), int(self.states.style[i, s])
                self.plain.germinate(i, s, name, style)
            self.plain.change(self.states)

    def _seed(self, fits: Tensor, stages: tuple[Stage, ...]) -> SlotRecord:
        """A seed of a blueprint that fits; those that grow blocks are drawn as often as all others."""
        allowed = fits.nonzero().flatten().tolist()
        growing = [b for b in allowed if b >= Blueprint.CLONE]
        name = self.rng.choice(growing if growing and self.rng.random() < 0.5 else allowed)
        stage = Stage(int(self.rng.choice([int(s) for s in stages])))
        alpha = float(self.rng.choice(ALPHAS)) if stage is Stage.BLENDING else None
        return record(stage, int(name), int(self.rng.integers(len(Style))), alpha)

    def seeds(self) -> list[tuple[int, int]]:
        """Member and slot of every seed."""
        return [(int(i), int(s)) for i, s in (self.states.blueprint >= 0).nonzero().tolist()]

    def train(self, epochs: int = 1, clock: Clock | None = None) -> None:
        for _ in range(epochs):
            now = clock or Clock(0, self.epochs, 100)
            self.population.train_epoch(self.states, self.data, now)
            if self.plain is not None:
                self.plain.epoch(self.data, now)
            self.epochs += 1

    def at_full_strength(self, where: Tensor) -> SlotStates:
        """The seeds where True at alpha 1 and all others gone.  # where [N, S]"""
        states = self.states
        return states.replace(
            stage=torch.where(where, int(Stage.FOSSILIZED), int(Stage.DORMANT)),
            alpha=torch.where(where, 1.0, 0.0).to(states.alpha.dtype),
            blueprint=torch.where(where, states.blueprint, -1),
        )

    def fold_some(self, share: float = 0.7) -> Tensor:
        """Some seeds, where there is room, become part of their hosts; the others end.  # → [N, S] which"""
        where = torch.zeros_like(self.states.stage, dtype=torch.bool)
        for i, s in self.seeds():
            taken = sum(slot == s for slot, _, _ in self.folds[i])
            where[i, s] = taken < self.population.config.folds and self.rng.random() < share
        self.population.prune((self.states.blueprint >= 0) & ~where)
        self.population.fold(where, self.states.style)
        for i, s in self.seeds():
            if where[i, s]:
                self.folds[i].append((s, int(self.states.blueprint[i, s]), int(self.states.style[i, s])))
            if self.plain is not None:
                if where[i, s]:
                    self.plain.fold(i, s)
                else:
                    self.plain.prune(i, s)
        self.states = SlotStates.empty(*self.states.stage.shape)
        if self.plain is not None:
            self.plain.change(self.states)
        return where

    def grow(self, rounds: int) -> Life:
        """Some rounds of seeds that are folded in, and new seeds at the end."""
        self.train()
        for _ in range(rounds):
            self.sow()
            self.train()
            self.fold_some()
            self.train()
        self.sow()
        return self
