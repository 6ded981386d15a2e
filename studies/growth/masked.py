"""Two ways to a smaller network from a large one: slimmable networks, and pruning of hidden units.

Plain torch: the members are rows of one tensor under `vmap`, and a hidden unit of a block is switched off by
a 0 in its member's mask. A unit that is off neither says nor learns anything, so that a masked network is the
smaller network; it is charged for what that one costs, by torch's own counter. What every step costs is
known before it is taken, and nothing is read back while members train.

    slimmable          every minibatch trains the first 1/4, 1/2 or all of each block's units, drawn at
                       random; in the end the width with the best validation accuracy is kept
    pruned from big    the whole network for half of the budget, then without its least units
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from esper.population.config import PopulationConfig
from esper.tasks.task import HostSpec, Split, Task
from studies.growth.environments import CONFIG
from studies.growth.masked_network import Floats, Network
from studies.growth.records import Sample, rounded

TRAINING_PASSES = 3  # forward, and twice as much backward
SHARES = (0.25, 0.5, 1.0)  # of each block's units
PRUNED_AT = 0.5  # of the budget
CHOOSING = 8  # members that try each learning rate
DRAWN_AT_ONCE = 64  # minibatches
DATA_STREAM = 1 << 24  # added to the id of a member: what seeds its minibatches seeds no weights


@dataclass(frozen=True)
class Recipe:
    """How the networks are trained: as all others of the study are."""

    batch: int
    peak: float  # learning rate at scale 1
    betas: tuple[float, float]
    weight_decay: float
    clip: float  # of each member's gradient
    warmup: float
    decay: float

    @staticmethod
    def of(config: PopulationConfig) -> Recipe:
        """The same settings as those of a population."""
        return Recipe(
            batch=config.batch_size,
            peak=config.host_lr,
            betas=(config.momentum, config.second_beta),
            weight_decay=config.weight_decay,
            clip=config.clip_norm,
            warmup=config.warmup,
            decay=config.decay,
        )


RECIPE = Recipe.of(CONFIG.population)

# ---- training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The steps of a training, known before it begins. A member takes its steps first and then rests."""

    rate: Tensor  # [T, N] of the peak learning rate; 0 rests
    spent: Floats  # [N] FLOPs after the last step

    @staticmethod
    def of(costs: Floats, flops: float, begun: Floats, limit: float) -> Plan:
        """Steps of these FLOPs, until `limit` FLOPs are spent; to the nearest step.

        costs [T, N], more of them than can be paid; begun [N] FLOPs that were spent before
        """
        after = begun + costs.cumsum(axis=0)
        taken = np.logical_and.accumulate(after - costs / 2 <= limit, axis=0)
        steps = int(taken.any(axis=1).sum())
        done = ((after - costs / 2) / flops)[:steps]  # the share that is spent halfway through a step
        rate = np.minimum(1.0, done / RECIPE.warmup).clip(max=(1.0 - done).clip(min=0.0) / RECIPE.decay)
        spent = begun + (costs * taken).sum(axis=0)
        return Plan(torch.from_numpy((rate * taken[:steps]).astype(np.float32)), spent)


@dataclass
class Learners:
    """N members with their optimizers, and the minibatches that they draw."""

    network: Network
    weights: Tensor  # [N, P]
    rates: Tensor  # [N] peak learning rates
    batches: Iterator[tuple[Tensor, Tensor]]

    def __post_init__(self) -> None:
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps = 0

    @staticmethod
    def of(network: Network, members: Tensor, scales: Sequence[float], device: str) -> Learners:
        """Members by their ids, with the scales of their learning rates."""
        return Learners(
            network=network,
            weights=network.first_weights(members, device),
            rates=RECIPE.peak * torch.tensor(scales, device=device),
            batches=minibatches(network.task.train.to(device), members, RECIPE.batch),
        )

    def train(self, plan: Plan, masks_at: Callable[[int], Tensor]) -> None:
        """Take the steps of a plan; masks_at gives those of each.  # step → [N, U]"""
        gradient = vmap(grad(self.network.loss))
        shares = plan.rate.to(self.weights.device)
        for step, share in enumerate(shares):
            inputs, targets = next(self.batches)
            self._learn(gradient(self.weights, masks_at(step), inputs, targets), share * self.rates)

    def _learn(self, gradient: Tensor, rate: Tensor) -> None:
        """One step of AdamW, clipped member by member.  # [N, P], [N]"""
        beta1, beta2 = RECIPE.betas
        norm = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (RECIPE.clip / (norm + 1e-6)).clamp(max=1.0)
        self.steps += 1
        self.first.lerp_(gradient, 1.0 - beta1)
        self.second.lerp_(gradient.square(), 1.0 - beta2)
        root = (self.second / (1.0 - beta2**self.steps)).sqrt().add_(1e-8)
        move = self.first / (1.0 - beta1**self.steps) / root + RECIPE.weight_decay * self.weights
        self.weights.sub_(rate.unsqueeze(1) * move)


def minibatches(data: Split, members: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end; what a member draws follows from its id alone.  # → [N, B, *input_shape], [N, B, ...]"""
    device = data.inputs.device
    streams = [torch.Generator().manual_seed(DATA_STREAM + member) for member in members.tolist()]
    while True:
        size = (DRAWN_AT_ONCE, batch)
        drawn = torch.stack([torch.randint(len(data), size, generator=stream) for stream in streams], dim=1)
        if device.type == "cuda":
            drawn = drawn.pin_memory().to(device, non_blocking=True)
        for chosen in drawn:  # [N, B]
            yield data.inputs[chosen], data.targets[chosen]


# ---- the two arms ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Networks at the end of their budget."""

    weights: Tensor  # [N, P]
    masks: Tensor  # [N, U]
    validation: Tensor  # [N]
    spent: Floats  # [N]


Trainer = Callable[[Network, Tensor, Sequence[float]], Trained]  # members and the scales of their rates


@dataclass(frozen=True)
class Trial:
    """Networks of one size on a task, and what they may spend."""

    task: Task
    host: HostSpec
    flops: float  # the budget of each member
    members: Tensor  # [N] ids
    rates: tuple[float, ...]  # scales of the learning rate to choose from
    device: str
    host_flops: float  # of a forward pass of the host that costs are relative to
    budget: float = 1.0  # as it is recorded


def slimmable(trial: Trial) -> Sample:
    """Networks that train at sampled widths and are kept at the one that is best on validation data."""

    def train(network: Network, members: Tensor, scales: Sequence[float]) -> Trained:
        return train_slimmable(Learners.of(network, members, scales, trial.device), members, trial.flops)

    return _judged("slimmable", train, trial)


def pruned(trial: Trial, target_cost: float) -> Sample:
    """Whole networks for half of the budget, then pruned to a cost of at most `target_cost` hosts.

    Raises ValueError where no pruning reaches the target.
    """

    def train(network: Network, members: Tensor, scales: Sequence[float]) -> Trained:
        learners = Learners.of(network, members, scales, trial.device)
        return train_pruned(learners, trial.flops, target_cost * trial.host_flops)

    return _judged("pruned from big", train, trial)


def train_slimmable(learners: Learners, members: Tensor, flops: float) -> Trained:
    """Train at widths that are drawn for every minibatch of a member, then keep the best width of each."""
    network, device = learners.network, learners.weights.device
    units = np.array([[max(1, round(share * n)) for n in network.units] for share in SHARES], dtype=float)
    first = [np.arange(n) < kept[:, None] for n, kept in zip(network.units, units.T, strict=True)]
    table = torch.tensor(np.concatenate(first, axis=1), dtype=torch.float32, device=device)  # [W, U]
    prices = TRAINING_PASSES * RECIPE.batch * network.flops.of(units)  # [W]
    steps = _enough(flops, float(prices.min()))
    draws = [np.random.default_rng(member).integers(len(SHARES), size=steps) for member in members.tolist()]
    widths = np.stack(draws, axis=1)  # [T, N]
    plan = Plan.of(prices[widths], flops, np.zeros(len(members)), flops)
    drawn = torch.from_numpy(widths).to(device)
    learners.train(plan, lambda step: table[drawn[step]])
    masks = [mask.expand(len(members), -1) for mask in table]
    scores = [network.accuracy(learners.weights, mask, network.task.validation) for mask in masks]
    best = torch.stack(scores).max(dim=0)  # of [W, N]
    return Trained(learners.weights, table[best.indices], best.values, plan.spent)


def train_pruned(learners: Learners, flops: float, target: float) -> Trained:
    """Train whole networks, prune each to a forward pass of at most `target` FLOPs, train what is left."""
    network, count = learners.network, len(learners.weights)
    whole = torch.ones(count, sum(network.units), device=learners.weights.device)
    spent = _train_masked(learners, whole, flops, np.zeros(count), PRUNED_AT * flops)
    masks = prune(network, learners.weights, target)
    spent = _train_masked(learners, masks, flops, spent, flops)
    validation = network.accuracy(learners.weights, masks, network.task.validation)
    return Trained(learners.weights, masks, validation, spent)


def _train_masked(learners: Learners, masks: Tensor, flops: float, spent: Floats, limit: float) -> Floats:
    """Train with these masks until `limit` of `flops` is spent; what is spent then.  # [N, U], [N] → [N]"""
    network = learners.network
    prices = TRAINING_PASSES * RECIPE.batch * network.flops.of(network.units_on(masks))  # [N]
    steps = _enough(limit - float(spent.min()), float(prices.min()))
    plan = Plan.of(np.tile(prices, (steps, 1)), flops, spent, limit)
    learners.train(plan, lambda step: masks)
    return plan.spent


def prune(network: Network, weights: Tensor, target: float) -> Tensor:
    """Masks without the least important units of each member, as many as it takes.  # [N, P] → [N, U]

    target: the most that a forward pass may cost. Raises ValueError where all units together are not enough.
    """
    if network.flops.always > target:
        raise ValueError(
            f"the target is {target:.4g} FLOPs; without any hidden unit the {network.host.preset} host costs "
            f"{network.flops.always:.4g}: give a larger target_cost"
        )
    order = vmap(network.importance)(weights).argsort(dim=1).cpu().numpy()  # [N, U], the least first
    each = network.flops.unit[network.block_of_unit][order]  # [N, U]
    left = network.flops.of(np.array(network.units, dtype=float)) - (each.cumsum(axis=1) - each)
    masks = np.ones(order.shape, dtype=np.float32)
    np.put_along_axis(masks, order, left <= target, axis=1)  # gone are those before whom it was too much
    return torch.from_numpy(masks).to(weights.device)


def _enough(flops: float, cheapest: float) -> int:
    """More steps than can be paid; raises ValueError where not one can."""
    if flops < cheapest / 2:
        raise ValueError(
            f"{flops:.4g} FLOPs are left and one minibatch costs {cheapest:.4g}; give more FLOPs"
        )
    return int(flops / cheapest) + 2


def choose_rate(train: Trainer, network: Network, members: Tensor, rates: Sequence[float]) -> float:
    """The scale with the best mean validation accuracy of members with other ids than these."""
    if len(rates) == 1:
        return rates[0]
    others = int(members.max()) + 1 + torch.arange(CHOOSING).repeat(len(rates))
    found = train(network, others, [rate for rate in rates for _ in range(CHOOSING)]).validation
    return rates[int(found.view(len(rates), CHOOSING).mean(1).argmax())]


def _judged(arm: str, train: Trainer, trial: Trial) -> Sample:
    """Choose a learning rate, train the members at it and read the test split once."""
    network, members = Network(trial.task, trial.host), trial.members
    rate = choose_rate(train, network, members, trial.rates)
    end = train(network, members, [rate] * len(members))
    kept = network.units_on(end.masks)
    test = network.accuracy(end.weights, end.masks, network.task.test())
    shapes = Counter("+".join(str(int(units)) for units in member) for member in kept)
    return Sample(
        task=network.task.name,
        arm=arm,
        budget=trial.budget,
        rate=rate,
        validation=rounded(end.validation.cpu().numpy()),
        test=rounded(test.cpu().numpy()),
        parameters=network.parameters.of(kept).round().astype(int).tolist(),
        cost=rounded(network.flops.of(kept) / trial.host_flops, 3),
        events={"budgets": round(float((end.spent / trial.flops).mean()), 4)},
        shapes=dict(shapes.most_common(12)),
    )
