"""Train many small perceptrons at once, each on a stream of its own at rates of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import schedulefree
import torch
from torch import Tensor

from studies.streams.data import SHAPES, Bank

BETAS, DECAY, CLIP = (0.9, 0.99), 0.01, 1.0  # AdamW, as in the recipe of the preset `demo`
SIZES = [size for fan_in, fan_out in SHAPES for size in (fan_in * fan_out, fan_out)]  # of the parameters
LAST_LAYER = sum(SIZES[:-2])  # where its parameters begin


def forward(parameters: Tensor, inputs: Tensor, absent: Tensor) -> Tensor:
    """Return logits; classes that are absent [N, CLASSES] get none.  # [N, P], [N, B, F] → [N, B, CLASSES]"""
    parts, hidden = parameters.split(SIZES, dim=1), inputs
    for k, shape in enumerate(SHAPES):
        hidden = torch.baddbmm(parts[2 * k + 1][:, None], hidden, parts[2 * k].view(-1, *shape))
        hidden = hidden.relu() if k < 2 else hidden
    return hidden.masked_fill(absent[:, None], -20.0)


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the share of right answers.  # [N, B, CLASSES], [N, B] → [N]"""
    return (scores.argmax(2) == targets).float().mean(1)


def loss_and_gradient(
    parameters: Tensor, inputs: Tensor, targets: Tensor, absent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [N], the clipped gradient [N, P] and the accuracy [N] of a minibatch."""
    leaf = parameters.detach().requires_grad_()
    scores = forward(leaf, inputs, absent)
    loss = (scores.logsumexp(2) - scores.gather(2, targets[..., None])[..., 0]).mean(1)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    gradient *= (CLIP / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
    return loss.detach(), gradient, accuracy(scores.detach(), targets)


@dataclass
class Seen:
    """What a controller may read; columns are minibatches that were trained on."""

    losses: Tensor  # [N, length]
    accuracies: Tensor  # [N, length]


Policy = Callable[[int, Seen], tuple[Tensor, Tensor]]  # minibatch → rates [N], responses [N]


def train(bank: Bank, policy: Policy, arms: int) -> Tensor:
    """Train `arms` copies of the networks of a bank, arm by arm, with AdamW at a policy's rates.

    Returns the accuracy before training over the stream and that at the end, in points.  # [arms, rows, 2]
    """
    parameters = bank.initial.repeat(arms, 1)
    first, second = torch.zeros_like(parameters), torch.zeros_like(parameters)
    absent, count = bank.absent.repeat(arms, 1), torch.zeros(len(parameters), 1)
    seen = Seen(*(torch.zeros(len(parameters), bank.length) for _ in range(2)))
    for step in range(bank.length):
        rates, responses = policy(step, seen)
        if bool((responses > 0).any()):
            kept = (responses == 0).float()[:, None]  # a reset forgets moments and their count
            first, second, count = first * kept, second * kept, count * kept
            anew = (responses == 2).nonzero()[:, 0]
            parameters[anew, LAST_LAYER:] = bank.initial[anew % bank.rows, LAST_LAYER:]
        inputs, targets = (x.repeat(arms, *[1] * (x.ndim - 1)) for x in bank.minibatch(step))
        seen.losses[:, step], gradient, seen.accuracies[:, step] = loss_and_gradient(
            parameters, inputs, targets, absent
        )
        count = count + 1
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = ((1 - BETAS[1] ** count) ** 0.5) * rates[:, None] / (1 - BETAS[0] ** count)
        parameters.mul_(1 - DECAY * rates[:, None]).sub_(scale * first / (second.sqrt() + 1e-8))
    return _scores(bank, parameters, seen.accuracies)


def _scores(bank: Bank, parameters: Tensor, accuracies: Tensor) -> Tensor:
    inputs, targets = bank.last_rule()
    with torch.no_grad():
        end = [accuracy(forward(arm, inputs, bank.absent), targets) for arm in parameters.split(bank.rows)]
    online = accuracies.mean(1).view(-1, bank.rows)
    return 100.0 * torch.stack([online, torch.stack(end)], dim=2)


def train_schedule_free(bank: Bank, rate: float) -> Tensor:
    """Train with schedule-free AdamW; answers are those of its averaged weights.  # → [1, rows, 2]"""
    weights, found = torch.nn.Parameter(bank.initial.clone()), torch.zeros(bank.rows, bank.length)
    optimizer = schedulefree.AdamWScheduleFree(
        [weights], lr=rate, betas=BETAS, weight_decay=DECAY, warmup_steps=round(0.03 * bank.length)
    )
    for step in range(bank.length):
        inputs, targets = bank.minibatch(step)
        optimizer.eval()
        with torch.no_grad():
            found[:, step] = accuracy(forward(weights, inputs, bank.absent), targets)
        optimizer.train()
        weights.grad = loss_and_gradient(weights, inputs, targets, bank.absent)[1]
        optimizer.step()
    optimizer.eval()
    return _scores(bank, weights.detach(), found)
