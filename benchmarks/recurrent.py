"""`python -m benchmarks.recurrent`: which recurrent core, at acting (T = 1) and over a sequence.

The same LSTM five ways: torch's fused one (which cannot reset inside a sequence), torch's cell in a loop,
one product per step over input and hidden state together, our steps under autograd, and ours with its own
backward pass; with oneDNN on and off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.common import one_thread, thread_ms
from esper.tamiyo.policy.recurrent import RecurrentCore

SIZES = (
    (128, 16, 1),
    (128, 128, 1),
    (512, 16, 1),
    (128, 4, 150),
    (128, 16, 150),
    (128, 64, 150),
    (512, 16, 150),
)


class Fused(nn.Module):
    """nn.LSTM; resets are ignored."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:
        hidden, cell = (part.unsqueeze(0).contiguous() for part in state.chunk(2, dim=-1))
        outputs: Tensor = self.lstm(inputs, (hidden, cell))[0]
        return outputs


class CellLoop(nn.Module):
    """nn.LSTMCell in a loop."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, width)

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:
        hidden, cell = state.chunk(2, dim=-1)
        outputs = []
        for step, reset in zip(inputs.unbind(1), resets.unsqueeze(-1).unbind(1), strict=True):
            hidden, cell = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
            hidden, cell = self.cell(step, (hidden, cell))
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class OneProduct(nn.Module):
    """Input and hidden state side by side through one linear layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + width, 4 * width)

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:
        hidden, cell = state.chunk(2, dim=-1)
        outputs = []
        for step, reset in zip(inputs.unbind(1), resets.unsqueeze(-1).unbind(1), strict=True):
            hidden, cell = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
            let_in, keep, candidate, let_out = self.gates(torch.cat((step, hidden), dim=-1)).chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + let_in.sigmoid() * candidate.tanh()
            hidden = let_out.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class Autograd(RecurrentCore):
    """Our steps, with the backward pass left to autograd."""

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:  # type: ignore[override]
        hidden, cell = state.chunk(2, dim=-1)
        outputs = []
        projections = self.from_input(inputs).unbind(1)
        for projected, reset in zip(projections, resets.unsqueeze(-1).unbind(1), strict=True):
            hidden, cell = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
            gates = projected + self.from_hidden(hidden)
            doors, candidate = gates.split((3 * self.width, self.width), dim=-1)
            let_in, keep, let_out = doors.sigmoid().chunk(3, dim=-1)
            cell = torch.addcmul(keep * cell, let_in, candidate.tanh())
            hidden = let_out * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class Ours(RecurrentCore):
    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, state, resets)[0]


CORES = {
    "nn.LSTM": Fused,
    "LSTMCell": CellLoop,
    "one product": OneProduct,
    "autograd": Autograd,
    "ours": Ours,
}


def measure(core: nn.Module, width: int, rows: int, steps: int) -> float:
    """ms: a forward pass without gradients at acting, forward and backward over a sequence."""
    inputs, state = torch.randn(rows, steps, width), torch.zeros(rows, 2 * width)
    resets = torch.rand(rows, steps) < 0.02

    def act() -> None:
        with torch.no_grad():
            core(inputs, state, resets)

    def learn() -> None:
        core.zero_grad()
        core(inputs, state, resets).sum().backward()

    return thread_ms(act if steps == 1 else learn)


def main() -> None:
    print(f"{'width':>6}{'rows':>6}{'steps':>6}  {'oneDNN':<7}" + "".join(f"{name:>13}" for name in CORES))
    for width, rows, steps in SIZES:
        for enabled in (True, False):
            with one_thread(), torch.backends.mkldnn.flags(enabled=enabled):
                times = [measure(core(width, width), width, rows, steps) for core in CORES.values()]
            state = "on" if enabled else "off"
            line = "".join(f"{ms:>10.2f} ms" for ms in times)
            print(f"{width:>6}{rows:>6}{steps:>6}  {state:<7}{line}", flush=True)


if __name__ == "__main__":
    main()
