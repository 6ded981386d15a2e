"""The recurrent core: an LSTM whose resets happen inside the sequence.

Measured on x86: over 150 steps nn.LSTM takes .9 (64 rows) to .3 (4 rows) of this core's time,
but knows no resets, and acts up to 5 times slower with oneDNN on. The same loop under autograd takes as long
at 64 rows, twice as long at 4, and twice the launches on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class RecurrentCore(nn.Module):
    """An LSTM over [N, T] that forgets before every step that is marked as a reset.

    The inputs of all steps are projected by one product; a step is left with one product and the gates.
    """

    def __init__(self, input_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(input_size, 4 * width)  # let in, keep, let out, candidate
        self.from_hidden = nn.Linear(width, 4 * width, bias=False)
        nn.init.orthogonal_(self.from_input.weight)
        nn.init.zeros_(self.from_input.bias)
        for gate in self.from_hidden.weight.data.chunk(4):
            nn.init.orthogonal_(gate)
        self.from_input.bias.data[width : 2 * width] = 1.0  # the memory is kept to begin with

    @property
    def state_size(self) -> int:
        """Numbers of memory per row: what is put out, and the cell."""
        return 2 * self.width

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [N, T, I], state [N, 2W], resets [N, T] bool → outputs [N, T, W], state [N, 2W]"""
        projected = self.from_input(inputs).transpose(0, 1)  # [T, N, 4W]
        weight = self.from_hidden.weight.to(projected.dtype)
        resets = resets.T.unsqueeze(-1)  # [T, N, 1]
        if torch.is_grad_enabled():
            outputs, state = _Unrolled.apply(projected, weight, state, resets)  # type: ignore[no-untyped-call]
        else:
            outputs, state, _ = unroll(projected, weight, state, resets)
        return outputs.transpose(0, 1), state


class Tape(NamedTuple):
    """What the backward pass needs to know of every step."""

    hidden: list[Tensor]  # [N, W] before the step
    cell: list[Tensor]  # [N, W] before the step
    gates: list[Tensor]  # [N, 4W] squashed: let in, keep, let out, candidate
    squashed: list[Tensor]  # [N, W] tanh of the cell after the step


def unroll(projected: Tensor, weight: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor, Tape]:
    """Step after step; gates and memory are FP32, whatever precision multiplies.

    projected [T, N, 4W], weight [4W, W], state [N, 2W], resets [T, N, 1] → outputs [T, N, W], state [N, 2W]
    """
    width = weight.shape[1]
    hidden, cell = state.split(width, dim=-1)
    tape, outputs = Tape([], [], [], []), []
    for projection, reset in zip(projected.unbind(0), resets.unbind(0), strict=True):
        hidden, start = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
        gates = torch.addmm(projection, hidden.to(weight.dtype), weight.T).float()
        doors, candidate = gates.split((3 * width, width), dim=-1)
        let_in, keep, let_out = doors.sigmoid_().split(width, dim=-1)
        cell = torch.addcmul(keep * start, let_in, candidate.tanh_())
        squashed = cell.tanh()
        for kept, value in zip(tape, (hidden, start, gates, squashed), strict=True):
            kept.append(value)
        hidden = let_out * squashed
        outputs.append(hidden)
    return torch.stack(outputs), torch.cat((hidden, cell), dim=-1), tape


class _Unrolled(Function):
    """`unroll` with its backward pass written out.

    Whatever does not wait for a later step is done for all steps at once: only two gradients are carried
    from step to step, and the weight's gradient is one product.
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, state, tape = unroll(projected, weight, state, resets)
        ctx.save_for_backward(weight, resets, *(torch.stack(kept) for kept in tape))
        return outputs, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, resets, hidden, cell, gates, squashed = ctx.saved_tensors
        width = weight.shape[1]
        let_in, keep, let_out, candidate = gates.split(width, dim=-1)  # [T, N, W] each
        slopes = torch.stack(  # of each gate before its squashing, per unit of what it moves: [T, N, 4, W]
            (
                candidate * let_in * (1 - let_in),
                cell * keep * (1 - keep),
                squashed * let_out * (1 - let_out),
                let_in * (1 - candidate.square()),
            ),
            dim=2,
        ).unbind(0)
        through = (let_out * (1 - squashed.square())).unbind(0)  # how an output moves with its cell
        carried = keep.masked_fill(resets, 0.0).unbind(0)  # how a cell moves with the one before
        grads, forget = grad_outputs.unbind(0), resets.unbind(0)
        grad_hidden, grad_cell = grad_state.split(width, dim=-1)
        grad_gates = []
        for t in range(len(gates) - 1, -1, -1):
            grad_hidden = grads[t] + grad_hidden
            grad_cell = torch.addcmul(grad_cell, grad_hidden, through[t])
            moved = torch.stack((grad_cell, grad_cell, grad_hidden, grad_cell), dim=1)
            grad_gates.append((slopes[t] * moved).flatten(1).to(weight.dtype))
            grad_hidden = (grad_gates[-1] @ weight).float().masked_fill_(forget[t], 0.0)
            grad_cell = grad_cell * carried[t]
        grad_projected = torch.stack(grad_gates[::-1])
        grad_weight = grad_projected.flatten(0, 1).T @ hidden.flatten(0, 1).to(weight.dtype)
        return grad_projected, grad_weight, torch.cat((grad_hidden, grad_cell), dim=-1), None
