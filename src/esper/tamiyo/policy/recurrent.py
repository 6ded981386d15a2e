"""The recurrent core: an LSTM whose resets happen inside the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RecurrentCore(nn.Module):
    """An LSTM over [N, T] that forgets before every step that is marked as a reset.

    The inputs of all steps are projected by one product; what is left per step is one product with the
    hidden state and the gates.
    """

    def __init__(self, input_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(input_size, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width, bias=False)
        for gate in self.from_hidden.weight.data.chunk(4):
            nn.init.orthogonal_(gate)
        nn.init.orthogonal_(self.from_input.weight)
        nn.init.zeros_(self.from_input.bias)
        self.from_input.bias.data[width : 2 * width] = 1.0  # the forget gate starts open

    @property
    def state_size(self) -> int:
        return 2 * self.width

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [N, T, I], state [N, 2W], resets [N, T] bool → outputs [N, T, W], state [N, 2W]"""
        hidden, cell = state.chunk(2, dim=-1)
        outputs = []
        for projected, reset in zip(
            self.from_input(inputs).unbind(1), resets.unsqueeze(-1).unbind(1), strict=True
        ):
            hidden, cell = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
            hidden, cell = self._step(projected + self.from_hidden(hidden), cell)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1), torch.cat((hidden, cell), dim=-1)

    def _step(self, gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The gates in FP32, whatever made them.  # gates [N, 4W], cell [N, W]"""
        let_in, keep, candidate, let_out = gates.float().chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + let_in.sigmoid() * candidate.tanh()
        return let_out.sigmoid() * cell.tanh(), cell
