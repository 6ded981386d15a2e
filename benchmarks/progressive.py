"""What growing into a model costs once all blocks are active: `python -m benchmarks.progressive`

    python -m benchmarks.progressive                    eager, on one thread of a CPU
    python -m benchmarks.progressive --device cuda      eager and compiled, in bfloat16

Two copies of a textbook GPT, and of a ResNet, take optimizer steps in turns: one in a plain loop, and one
that `esper.Progressive` has grown to its full size and whose loop goes on to call `grower.step()`. A round is
a few steps of each, and rounds take turns in who begins. Printed are the medians of all rounds and, with
quartiles, their ratios. On a CPU a step is thread CPU time and memory is that of weights, gradients and
optimizer state; on a GPU it is wall time and the peak of what torch allocated for one copy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.common import line_of, machine_name, one_thread, synchronize
from benchmarks.textbook import GPT, resnet
from esper import Progressive

MODELS = ("gpt", "resnet")
STEPS_TO_GROWTH = 2


@dataclass(frozen=True)
class Result:
    """One line of the table and of `--json`."""

    model: str
    compiled: bool
    plain_ms: float
    grown_ms: float
    ratio: float
    ratio_low: float  # quartiles of the rounds
    ratio_high: float
    plain_mb: float
    grown_mb: float


class Loop:
    """A model, its optimizer and one batch; grown: a loop that has grown into the model."""

    def __init__(self, name: str, device: str, compiled: bool, grown: bool) -> None:
        torch.manual_seed(0)
        self.others = 0 if device == "cpu" else torch.cuda.memory_allocated()
        self.device, gpu = device, device != "cpu"
        if name == "gpt":
            width, context, batch = (384, 256, 32) if gpu else (64, 64, 4)
            self.model: nn.Module = GPT(256, context, width, depth=8, heads=4)
            inputs = torch.randint(0, 256, (batch, context + 1))
            self.inputs, self.targets = inputs[:, :-1].to(device), inputs[:, 1:].to(device)
        else:
            width, side, batch = (64, 32, 128) if gpu else (8, 16, 8)
            self.model = resnet(3, 10, width, stages=3, depth=4)
            self.inputs = torch.randn(batch, 3, side, side, device=device)
            self.targets = torch.randint(0, 10, (batch,), device=device)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.grower: Progressive | None = None
        if grown:
            example = (self.inputs[:2],)
            self.grower = Progressive(
                self.model, self.optimizer, 2 * STEPS_TO_GROWTH, grow_at=0.5, example=example
            )
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        for _ in range(STEPS_TO_GROWTH + 2):  # beyond the growth, so that nothing is compiled later
            self.step()
        assert self.grower is None or self.grower.whole

    def step(self) -> None:
        """Take one optimizer step, with gradients that are freed after it."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device != "cpu"):
            logits = self.call(self.inputs)
        F.cross_entropy(logits.flatten(0, -2).float(), self.targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.grower is not None:
            self.grower.step()

    def ms(self, steps: int) -> float:
        """Return what one of some steps takes."""
        clock = time.thread_time if self.device == "cpu" else time.perf_counter
        synchronize(self.device)
        start = clock()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        return 1e3 * (clock() - start) / steps

    def megabytes(self) -> float:
        """Return the memory of training: a GPU's peak, or weights, gradients and optimizer state."""
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return (torch.cuda.max_memory_allocated() - self.others) / 2**20
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        held = [*self.model.parameters(), *self.model.parameters(), *self.model.buffers(), *state]
        return sum(tensor.nbytes for tensor in held) / 2**20


def measure(name: str, device: str, compiled: bool, seconds: float) -> Result:
    """Let both loops take turns for some seconds, and at least five rounds."""
    Loop(name, device, compiled=False, grown=False)  # libraries take their workspaces
    gc.collect()
    plain = Loop(name, device, compiled, grown=False)
    memory = [plain.megabytes()]
    other = Loop(name, device, compiled, grown=True)
    memory.append(other.megabytes())
    steps = max(1, round(50 / plain.ms(3)))  # 50 ms are long against the clock and a kernel launch
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        first, second = (plain, other) if len(times) % 2 else (other, plain)
        pair = first.ms(steps), second.ms(steps)
        times.append(pair if first is plain else pair[::-1])
    low, ratio, high = statistics.quantiles((ours / theirs for theirs, ours in times), n=4)
    medians = (statistics.median(column) for column in zip(*times, strict=True))
    return Result(name, compiled, *medians, ratio, low, high, *memory)


def print_table(results: list[Result], machine: str) -> None:
    """Print the results for people."""
    table = Table(title=f"a training step with all blocks active, {machine}", title_justify="left")
    for column in ("model", "mode", "plain ms", "grown ms", "ratio", "quartiles", "plain MB", "grown MB"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    for row in results:
        table.add_row(
            row.model, "compiled" if row.compiled else "eager", f"{row.plain_ms:.3f}", f"{row.grown_ms:.3f}",
            f"{row.ratio:.4f}", f"{row.ratio_low:.4f} to {row.ratio_high:.4f}", f"{row.plain_mb:,.1f}",
            f"{row.grown_mb:,.1f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure the models and print a table, or lines of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progressive", description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring for each line")
    parser.add_argument("--json", action="store_true", help="one object per line")
    given = parser.parse_args(arguments)
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"there is no model {unknown.pop()}; give some of {', '.join(MODELS)}")
    machine, results = machine_name(given.device), []
    with one_thread():
        for name in given.models:
            for compiled in (False, True) if given.device != "cpu" else (False,):
                results.append(measure(name, given.device, compiled, given.seconds))
                if given.json:
                    print(line_of(results[-1], machine), flush=True)
    if not given.json:
        print_table(results, machine)


if __name__ == "__main__":
    main()
