"""The recurrent core: an LSTM whose resets happen inside the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RecurrentCore(nn.Module):
    """An LSTM over [N, T] that forgets before every step that is marked as a reset.

    The inputs of all steps are projected by one product; a step is left with one product and the gates.
    """

    # benchmarks/recurrent.py on x86: nn.LSTM is 1.5 to 3 times faster over a sequence but knows no resets and
    # is 2 times slower at acting with oneDNN on; LSTMCell and one product per step are no faster than this.

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
        return 2 * self.width

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [N, T, I], state [N, 2W], resets [N, T] bool → outputs [N, T, W], state [N, 2W]"""
        hidden, cell = state.chunk(2, dim=-1)
        outputs = []
        projections = self.from_input(inputs).unbind(1)
        for projected, reset in zip(projections, resets.unsqueeze(-1).unbind(1), strict=True):
            hidden, cell = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
            hidden, cell = self._step(projected + self.from_hidden(hidden), cell)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), torch.cat((hidden, cell), dim=-1)

    def _step(self, gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The gates and the memory are FP32, whatever precision multiplied.  # gates [N, 4W], cell [N, W]"""
        doors, candidate = gates.float().split((3 * self.width, self.width), dim=-1)
        let_in, keep, let_out = doors.sigmoid().chunk(3, dim=-1)
        cell = torch.addcmul(keep * cell, let_in, candidate.tanh())
        return let_out * cell.tanh(), cell
