"""How much memory a member takes while it trains, counted on the CPU with one member of the kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import Host
from esper.population.population import Population

COPIES = 3  # of weights and moments: kept, trained, and the governor's last good ones
ROWS = 2  # of a member in a minibatch: its own, and that of a seed in isolation


def member_bytes(
    make_host: Callable[[], Host], config: PopulationConfig, inputs: Tensor, targets: Tensor
) -> int:
    """What a member takes at most: every slot holds the blueprint with the most parameters.

    inputs, targets: at least one minibatch of samples. Counted are weights and moments, and what a minibatch
    keeps for its gradients, in the precision of the config.
    """
    alone = config.model_copy(update={"initial_weights": 1, "seed_weights": 1, "batches_per_epoch": 1})
    population = Population(make_host, alone, torch.arange(1))
    table = population.bodies.seed_parameters()
    fits = population.growable()[0]
    largest = [int(b) for b in torch.where(fits, table, -1).argmax(dim=1)]
    records = [
        SlotRecord(stage=Stage.HOLDING, blueprint=Blueprint(b), style=Style.LINEAR_ADD, alpha=1.0)
        for b in largest
    ]
    states = SlotStates.from_records([records])
    population.germinate(states.blueprint >= 0, states.blueprint)
    population.look(states)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    count = config.batch_size
    data = MemberData.shared(inputs[:count], targets[:count], 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        population.train_epoch(states, data, Clock(0, 0, 1))
    tensors = [*population.hosts.tensors().values(), *population.parts.tensors().values()]
    return COPIES * sum(tensor.nbytes for tensor in tensors) + ROWS * sum(kept.values())
