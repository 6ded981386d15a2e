"""Selection among networks of one size: the worse half go on as copies of the better half.

Four networks of the best fixed size train side by side for a whole budget each. After a quarter and after
half of it the worse two take over the weights and the optimizer's state of the better two, and meet the data
in their own order. In the end the best on validation data counts. It costs four budgets, as random search ×4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.population.population import Population
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Episode
from esper.tamiyo.scripted import Static

GROUP = 4
SHARES = (0.25, 0.5)  # of the budget, after which the worse half give way
APART = 12_000  # between the ids of a group: a multiple of the number of budgets, beyond all judged ones


def group_ids(members: Tensor) -> Tensor:
    """The members of every group, first ones first; the first of a group is the one that it stands for.

    # [n] → [GROUP · n]
    """
    return torch.cat([members + k * APART for k in range(GROUP)])


def heirs(accuracy: Tensor, due: Tensor) -> Tensor:
    """From whom each network goes on: itself, or in the worse half of a group that is due its counterpart.

    The worst takes over from the second best, the last but one from the best.
    # [GROUP · n] each → [GROUP · n] int64
    """
    itself = torch.arange(len(accuracy), device=accuracy.device)
    groups = itself.view(GROUP, -1)
    order = accuracy.view(GROUP, -1).argsort(dim=0, descending=True, stable=True)  # [GROUP, n], best first
    ranked = groups.gather(0, order)
    half = GROUP // 2
    source = itself.clone()
    source[ranked[half:].flatten()] = ranked[:half].flatten()
    return torch.where(due, source, itself)


def take_over(population: Population, source: Tensor) -> None:
    """Let every member go on as a copy of another, or of itself, in all of its rows.  # source [N] int64"""
    for value in population.tensors().values():
        rows = value.unflatten(0, (population.num_members, -1))  # a member's slots lie together
        value.copy_(rows.index_select(0, source).flatten(0, 1))


def play_with_selection(environment: GrowthEnvironment) -> Episode:
    """An episode of groups of networks that never grow, to its end."""
    played = Episode(environment, Static())
    done = torch.zeros(len(SHARES), environment.num_members, dtype=torch.bool, device=environment.device)
    while not environment.done:
        seen = played.step().observation
        for k, share in enumerate(SHARES):
            due = (seen.progress >= share) & ~done[k]
            done[k] |= due
            take_over(environment.population, heirs(seen.val_accuracy, due))
    return played
