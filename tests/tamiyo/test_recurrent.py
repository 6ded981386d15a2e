"""The recurrent core against torch's LSTMCell, step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.tamiyo.policy.network import RecurrentCore

ROWS, STEPS, INPUTS, WIDTH = 5, 9, 6, 8


def reference(core: RecurrentCore, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own cell with the same weights, one row and one step at a time."""
    cell = nn.LSTMCell(INPUTS, WIDTH)

    def theirs(own: Tensor) -> Tensor:
        return torch.cat([own.chunk(4)[i] for i in (0, 1, 3, 2)])  # let in, keep, candidate, let out

    weights = {
        "weight_ih": theirs(core.from_input.weight),
        "weight_hh": theirs(core.from_hidden.weight),
        "bias_ih": theirs(core.from_input.bias),
        "bias_hh": torch.zeros(4 * WIDTH),
    }
    outputs, last = [], []
    for row in range(ROWS):
        hidden, memory = state[row : row + 1].chunk(2, dim=-1)
        for t in range(STEPS):
            if resets[row, t]:
                hidden, memory = torch.zeros_like(hidden), torch.zeros_like(memory)
            hidden, memory = functional_call(cell, weights, (inputs[row : row + 1, t], (hidden, memory)))
            outputs.append(hidden)
        last.append(torch.cat((hidden, memory), dim=-1))
    return torch.cat(outputs).view(ROWS, STEPS, WIDTH), torch.cat(last)


def scene(seed: int = 0) -> tuple[RecurrentCore, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    core = RecurrentCore(INPUTS, WIDTH)
    resets = torch.rand(ROWS, STEPS) < 0.25
    return core, torch.randn(ROWS, STEPS, INPUTS), torch.randn(ROWS, 2 * WIDTH), resets


def test_the_core_is_an_lstm_that_resets_inside_the_sequence_and_has_its_gradients() -> None:
    core, inputs, state, resets = scene(4)
    assert resets[:, 1:].any()
    weight = torch.randn(ROWS, STEPS, WIDTH)
    found = []
    for run in (core, lambda *given: reference(core, *given)):
        leaves = [inputs.clone().requires_grad_(), state.clone().requires_grad_(), *core.parameters()]
        outputs, last = run(leaves[0], leaves[1], resets)
        gradients = torch.autograd.grad((outputs * weight).sum() + last.square().sum(), leaves)
        found.append((outputs, last, *gradients))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_a_reset_clears_a_memory_that_is_not_a_number() -> None:
    core, inputs, _, _ = scene(3)
    state = torch.full((ROWS, 2 * core.width), float("nan"))
    resets = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    resets[0, 0] = True
    outputs, _ = core(inputs, state, resets)
    assert outputs[0].isfinite().all()
    assert outputs[1].isnan().all()
