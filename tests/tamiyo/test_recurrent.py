"""The recurrent core against torch's LSTMCell, step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.network import RecurrentCore

ROWS, STEPS, INPUTS, WIDTH = 5, 9, 6, 8


def reference(core: RecurrentCore, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own cell with the same weights, one row and one step at a time."""
    cell = nn.LSTMCell(INPUTS, WIDTH)
    order = [0, 1, 3, 2]  # torch keeps let in, keep, candidate, let out
    with torch.no_grad():
        for own, theirs in (
            (core.from_input.weight, cell.weight_ih),
            (core.from_hidden.weight, cell.weight_hh),
            (core.from_input.bias, cell.bias_ih),
        ):
            theirs.copy_(torch.cat([own.chunk(4)[i] for i in order]))
        cell.bias_hh.zero_()
    outputs = torch.zeros(ROWS, STEPS, WIDTH)
    last = torch.zeros(ROWS, 2 * WIDTH)
    for row in range(ROWS):
        hidden, memory = state[row : row + 1].chunk(2, dim=-1)
        for t in range(STEPS):
            if resets[row, t]:
                hidden, memory = torch.zeros_like(hidden), torch.zeros_like(memory)
            hidden, memory = cell(inputs[row : row + 1, t], (hidden, memory))
            outputs[row, t] = hidden[0]
        last[row] = torch.cat((hidden, memory), -1)[0]
    return outputs, last


def scene(seed: int = 0) -> tuple[RecurrentCore, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    core = RecurrentCore(INPUTS, WIDTH)
    resets = torch.rand(ROWS, STEPS) < 0.25
    return core, torch.randn(ROWS, STEPS, INPUTS), torch.randn(ROWS, 2 * WIDTH), resets


def test_the_core_is_an_lstm_that_resets_inside_the_sequence() -> None:
    core, inputs, state, resets = scene()
    assert resets[:, 1:].any()
    with torch.no_grad():
        outputs, last = core(inputs, state, resets)
        expected, expected_last = reference(core, inputs, state, resets)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=1e-6, rtol=1e-5)


def test_every_gradient_is_that_of_autograd_through_the_reference() -> None:
    core, inputs, state, resets = scene(4)
    weight = torch.randn(ROWS, STEPS, WIDTH)
    found = []
    for run in (core, lambda *given: plain_loop(core, *given)):
        leaves = [inputs.clone().requires_grad_(), state.clone().requires_grad_(), *core.parameters()]
        outputs, last = run(leaves[0], leaves[1], resets)
        found.append(torch.autograd.grad((outputs * weight).sum() + last.square().sum(), leaves))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def plain_loop(core: RecurrentCore, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
    """The same LSTM under autograd."""
    hidden, memory = state.chunk(2, dim=-1)
    outputs = []
    for t in range(inputs.shape[1]):
        keep = ~resets[:, t : t + 1]
        hidden, memory = hidden * keep, memory * keep
        gates = core.from_input(inputs[:, t]) + core.from_hidden(hidden)
        let_in, keep_gate, let_out, candidate = gates.chunk(4, dim=-1)
        memory = keep_gate.sigmoid() * memory + let_in.sigmoid() * candidate.tanh()
        hidden = let_out.sigmoid() * memory.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), torch.cat((hidden, memory), dim=-1)


def test_bf16_products_keep_fp32_memory_and_gradients() -> None:
    core, inputs, state, resets = scene(5)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = core(inputs, state, resets)
    exact, exact_last = core(inputs, state, resets)
    assert outputs.dtype == last.dtype == torch.float32
    torch.testing.assert_close(outputs, exact, atol=0.05, rtol=0.05)
    torch.testing.assert_close(last, exact_last, atol=0.05, rtol=0.05)
    gradients = torch.autograd.grad(outputs.square().sum(), list(core.parameters()))
    expected = torch.autograd.grad(exact.square().sum(), list(core.parameters()))
    for ours, reference_gradient in zip(gradients, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (
            torch.nn.functional.cosine_similarity(ours.flatten(), reference_gradient.flatten(), dim=0) > 0.99
        )


def test_nothing_crosses_a_reset_forwards_or_backwards() -> None:
    core, inputs, state, resets = scene(2)
    resets = torch.zeros_like(resets)
    resets[:, 4] = True
    inputs.requires_grad_()
    outputs, _ = core(inputs, state, resets)
    outputs[:, 4:].sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad[:, :4] == 0).all()
    assert (inputs.grad[:, 4:] != 0).any()


def test_a_reset_clears_a_memory_that_is_not_a_number() -> None:
    core, inputs, _, _ = scene(3)
    state = torch.full((ROWS, core.state_size), float("nan"))
    resets = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    resets[0, 0] = True
    outputs, _ = core(inputs, state, resets)
    assert outputs[0].isfinite().all()
    assert outputs[1].isnan().all()
