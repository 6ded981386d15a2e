"""Optimizers of other packages in a plain loop, with the networks, minibatches and budget of a population.

Functions that plan take a network and all of its minibatches and may use up some of the first. None reads
validation data.
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
from torch.optim import AdamW, Optimizer

from esper.population.config import PopulationConfig
from esper.population.data import DataOrder
from esper.population.extract import extract
from esper.population.optimizer import rate_share
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment

Batches = Sequence[tuple[Tensor, Tensor]]
Plan = tuple[Optimizer, list[float]]  # with the rate of each minibatch that is left
SMOOTHING = 0.8  # of the losses of a range test


def plain_accuracy(spec: EnvironmentSpec, make_plan: Callable[..., Plan], *given: float) -> list[float]:
    """Train each network of a population by itself, with a plan of these parameters; return its accuracy."""
    environment, config = GrowthEnvironment(spec), spec.population
    environment.reset(0)
    tasks, found = environment.population.tasks, []
    order = DataOrder(spec.seed, spec.members, environment.training_samples, config.batch_size)
    chosen = [order.batch(0, step) for step in range(spec.episode.steps * config.batches_per_epoch)]
    for row, member in enumerate(spec.members.tolist()):
        task = tasks[member % len(tasks)]
        network = extract(environment.population, environment.slots, row).train()
        batches = [(task.train.inputs[some[row]], task.train.targets[some[row]]) for some in chosen]
        optimizer, rates = make_plan(*given, network, batches, config)
        descend(network, batches[-len(rates) :], optimizer, rates, config)
        if isinstance(optimizer, schedulefree.AdamWScheduleFree):
            optimizer.eval()  # to the averaged weights
        test = task.test()
        with torch.no_grad():
            right = network.eval()(test.inputs).argmax(1) == test.targets
        found.append(round(100.0 * float(right.float().mean()), 3))
    return found


def descend(
    network: nn.Module, batches: Batches, optimizer: Optimizer, rates: list[float], config: PopulationConfig
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


def scheduled(peak: float, batches: Batches, config: PopulationConfig) -> list[float]:
    """Return rates by the recipe's schedule: up, flat, down to 0."""
    rates: list[float] = (peak * rate_share(torch.arange(len(batches)) / len(batches), config)).tolist()
    return rates


def adamw(rate: float, network: nn.Module, batches: Batches, config: PopulationConfig) -> Plan:
    """Plan torch's AdamW at a rate, with the recipe's schedule."""
    betas = config.momentum, config.second_beta
    optimizer = AdamW(network.parameters(), betas=betas, weight_decay=config.weight_decay)
    return optimizer, scheduled(rate, batches, config)


def prodigy(
    first: float, factor: float, network: nn.Module, batches: Batches, config: PopulationConfig
) -> Plan:
    """Plan Prodigy, which finds its rate, with the recipe's schedule; first: `d0`, factor: `d_coef`."""
    with redirect_stdout(None):  # it prints what kind of weight decay it has
        optimizer = prodigyopt.Prodigy(
            network.parameters(), betas=(config.momentum, config.second_beta), d0=first, d_coef=factor,
            weight_decay=config.weight_decay, safeguard_warmup=True, use_bias_correction=True,
        )  # fmt: skip
    return optimizer, scheduled(1.0, batches, config)


def schedule_free(rate: float, network: nn.Module, batches: Batches, config: PopulationConfig) -> Plan:
    """Plan schedule-free AdamW at a rate that never falls, after the recipe's warm-up."""
    optimizer = schedulefree.AdamWScheduleFree(
        network.parameters(), lr=rate, betas=(config.momentum, config.second_beta),
        weight_decay=config.weight_decay, warmup_steps=round(config.warmup * len(batches)),
    )  # fmt: skip
    optimizer.train()
    return optimizer, [rate] * len(batches)


def range_test(
    share: float, divisor: float, network: nn.Module, batches: Batches, config: PopulationConfig
) -> Plan:
    """Spend a share of the budget on ever higher rates, then plan AdamW anew at the best of them / divisor.

    The best is that at which the smoothed training loss is least.
    """
    steps, fresh = math.ceil(share * len(batches)), copy.deepcopy(network.state_dict())
    rates = torch.logspace(-4, 0, steps).tolist()
    losses = descend(network, batches[:steps], adamw(0.0, network, batches, config)[0], rates, config)
    smooth, mean = [], 0.0
    for step, loss in enumerate(losses, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smooth.append(mean / (1 - SMOOTHING**step))
    network.load_state_dict(fresh)
    return adamw(rates[smooth.index(min(smooth))] / divisor, network, batches[steps:], config)
