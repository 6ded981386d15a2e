"""Networks whose units are switched off: they are the smaller networks, and pay what those cost."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from esper.population.hosts import Host, build_host
from esper.tasks import load_task
from esper.tasks.task import HostSpec
from studies.growth import masked
from studies.growth.masked_network import Network, branches_of, count_flops

HOSTS = {
    "synthetic": HostSpec("resmlp", {"width": 8, "hidden": 8, "depth": 2}),
    "digits": HostSpec("resnet", {"width": 4, "hidden": 6, "depth": 1, "stages": 2}),
    "text": HostSpec("gpt", {"width": 8, "heads": 4, "expansion": 2, "depth": 1}),
}
MEMBERS = torch.arange(3)


def network(name: str = "synthetic") -> Network:
    return Network(load_task(name), HOSTS[name])


def smaller(net: Network, row: torch.Tensor, kept: list[list[int]]) -> Host:
    """The module that has these units of each block alone."""
    host = net.host
    module = build_host(host.preset, net.task.input_shape, net.task.num_classes, **host.options)
    nn.utils.vector_to_parameters(row, module.parameters())
    for branch, units in zip(branches_of(module), kept, strict=True):
        each = branch.second.weight.shape[1] // branch.units
        inner = torch.arange(branch.units * each).view(branch.units, each)[units].flatten()
        outer = torch.cat([inner + part * branch.units * each for part in range(branch.copies)])
        less = copy.deepcopy(branch).with_units(len(units))
        less.first.weight = nn.Parameter(branch.first.weight[outer])
        if branch.first.bias is not None:
            less.first.bias = nn.Parameter(branch.first.bias[outer])
        less.second.weight = nn.Parameter(branch.second.weight[:, inner])
        branch.first, branch.middle, branch.second = less.first, less.middle, less.second
    return module


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("full", [True, False])
def test_a_masked_network_is_the_smaller_network_in_outputs_price_and_parameters(
    name: str, full: bool
) -> None:
    net = network(name)
    row = net.first_weights(torch.tensor([5]), "cpu")[0]
    mask = torch.ones(sum(net.units))
    if not full:
        mask[1::2] = 0.0
    on = [torch.nonzero(part).flatten().tolist() for part in mask.split(net.units)]
    module = smaller(net, row, on)
    inputs = net.task.train.inputs[:4]
    torch.testing.assert_close(net.outputs(row, mask, inputs), module(inputs), atol=1e-5, rtol=1e-4)
    kept = net.units_on(mask.unsqueeze(0))
    assert kept.tolist() == [[len(units) for units in on]]
    assert net.flops.of(kept)[0] == count_flops(module, inputs[:1])
    assert net.parameters.of(kept)[0] == module.num_parameters


def test_one_step_of_the_rows_is_a_step_of_torch_adamw() -> None:
    net = network()
    learners = masked.Learners.of(net, MEMBERS, [0.5] * 3, "cpu")
    reference = nn.Parameter(learners.weights[1].clone())
    recipe = masked.RECIPE
    adamw = torch.optim.AdamW(
        [reference], 0.5 * recipe.peak, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    batches = masked.minibatches(net.task.train, MEMBERS, recipe.batch)
    learners.train(masked.Plan(torch.ones(3, 3), np.zeros(3)), lambda step: torch.ones(3, sum(net.units)))
    for _ in range(3):
        inputs, targets = next(batches)
        adamw.zero_grad()
        net.loss(reference, torch.ones(sum(net.units)), inputs[1], targets[1]).backward()
        nn.utils.clip_grad_norm_([reference], recipe.clip)
        adamw.step()
    torch.testing.assert_close(learners.weights[1], reference.detach(), atol=1e-5, rtol=1e-4)
