"""Optimizers of other packages in a plain loop, with the networks, minibatches and budget of a population.

Whoever trains gets a network and its minibatches, as many as the budget pays for, and leaves it ready to be
tested. None of them reads validation data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

import prodigyopt
import schedulefree
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.population.config import PopulationConfig
from esper.population.data import DataOrder
from esper.population.extract import extract
from esper.population.optimizer import rate_share
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment

Batches = Sequence[tuple[Tensor, Tensor]]
Train = Callable[[nn.Module, Batches, PopulationConfig], None]
SMOOTHING = 0.8  # of the losses of a range test


def plain_accuracy(spec: EnvironmentSpec, train: Train) -> list[float]:
    """Train each network of a population by itself; return its test accuracy in points."""
    environment, config = GrowthEnvironment(spec), spec.population
    environment.reset(0)
    tasks, found = environment.population.tasks, []
    order = DataOrder(spec.seed, spec.members, environment.training_samples, config.batch_size)
    chosen = [order.batch(0, step) for step in range(spec.episode.steps * config.batches_per_epoch)]
    for row, member in enumerate(spec.members.tolist()):
        task = tasks[member % len(tasks)]
        network = extract(environment.population, environment.slots, row).train()
        picks = [samples[row] for samples in chosen]
        train(network, [(task.train.inputs[pick], task.train.targets[pick]) for pick in picks], config)
        with torch.no_grad():
            test = task.test()
            right = network.eval()(test.inputs).argmax(1) == test.targets
        found.append(round(100.0 * float(right.float().mean()), 3))
    return found


def descend(
    network: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    rates: Sequence[float],
    config: PopulationConfig,
) -> list[float]:
    """Make a step on each minibatch at its rate, with the recipe's clipping; return the losses."""
    losses = []
    for (inputs, targets), rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adamw(rate: float) -> Train:
    """Train by torch's AdamW at a rate, with the recipe's schedule."""
    return lambda network, batches, config: _descend_scheduled(
        network, batches, _adamw(network, config), rate, config
    )


def prodigy(first: float, factor: float) -> Train:
    """Train by Prodigy, which finds its rate, with the recipe's schedule; first: `d0`, factor: `d_coef`."""

    def train(network: nn.Module, batches: Batches, config: PopulationConfig) -> None:
        with redirect_stdout(None):  # it prints what kind of weight decay it has
            optimizer = prodigyopt.Prodigy(
                network.parameters(), lr=1.0, betas=(config.momentum, config.second_beta),
                weight_decay=config.weight_decay, safeguard_warmup=True, use_bias_correction=True,
                d0=first, d_coef=factor,
            )  # fmt: skip
        _descend_scheduled(network, batches, optimizer, 1.0, config)

    return train


def schedule_free(rate: float) -> Train:
    """Train by schedule-free AdamW at a rate that never falls, after the recipe's warm-up."""

    def train(network: nn.Module, batches: Batches, config: PopulationConfig) -> None:
        optimizer = schedulefree.AdamWScheduleFree(
            network.parameters(), lr=rate, betas=(config.momentum, config.second_beta),
            weight_decay=config.weight_decay, warmup_steps=round(config.warmup * len(batches)),
        )  # fmt: skip
        optimizer.train()
        descend(network, batches, optimizer, [rate] * len(batches), config)
        optimizer.eval()

    return train


def range_test(share: float, divisor: float) -> Train:
    """Spend a share of the budget on ever higher rates, then train anew at the best of them / divisor.

    The best is that at which the smoothed training loss is least.
    """

    def train(network: nn.Module, batches: Batches, config: PopulationConfig) -> None:
        steps = math.ceil(share * len(batches))
        rates = torch.logspace(-4, 0, steps).tolist()
        fresh = copy.deepcopy(network.state_dict())
        losses = descend(network, batches[:steps], _adamw(network, config), rates, config)
        smooth, mean = [], 0.0
        for step, loss in enumerate(losses, start=1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            smooth.append(mean / (1 - SMOOTHING**step))
        network.load_state_dict(fresh)
        adamw(rates[smooth.index(min(smooth))] / divisor)(network, batches[steps:], config)

    return train


def _descend_scheduled(
    network: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    peak: float,
    config: PopulationConfig,
) -> None:
    """Descend at rates of the recipe's schedule: up, flat, down to 0."""
    shares = rate_share(torch.arange(len(batches)) / len(batches), config)
    descend(network, batches, optimizer, (peak * shares).tolist(), config)


def _adamw(network: nn.Module, config: PopulationConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        network.parameters(), betas=(config.momentum, config.second_beta), weight_decay=config.weight_decay
    )
