"""One-after-another modules against the population: the same arithmetic, one run, one table.

python -m benchmarks.population --members 4 16 --device cpu
python -m benchmarks.population --members 32 --host mlp --width 64 --device cpu
python -m benchmarks.population --members 128 512 2048 --device cuda --plot population.png
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common import line_of, machine_name, read_results, synchronize
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.extract import extract
from esper.population.hosts import Host, build_host
from esper.population.population import Population
from esper.utils.devices import keep_freed_memory
from studies.command_line import existing_device, positive
from tests.slots import SlotRecord, shared_data, states_from_records

BLUEPRINTS = {
    "cnn": (Blueprint.CONV_LIGHT, Blueprint.NORM, Blueprint.DEPTHWISE, Blueprint.CONV_SMALL),
    "mlp": (Blueprint.LORA, Blueprint.NORM, Blueprint.MLP_SMALL, Blueprint.MLP),
}
SHADOW_SHARE = 0.3
BATCH = 64
LOOPED_MEMBERS = 64  # one-after-another time is linear in members: at most these are run, the rest is scaled


@dataclass(frozen=True)
class Result:
    """One line of the table. `baseline_ms` is one module after another."""

    work: str
    n: int
    slots: int
    ours_ms: float
    baseline_ms: float
    ratio: float
    member_epochs_per_s: float
    kilobytes_per_member: float
    activations_mb: float
    compiled: bool  # of older results; always False now
    precision: str
    host: str = "cnn"
    width: int = 16


def random_states(num_members: int, num_slots: int, seeds: bool, host: str = "cnn") -> SlotStates:
    """Slots filled at random; three members in ten raise an isolated seed in their first slot."""
    generator = torch.Generator().manual_seed(0)

    def record(member: int, slot: int) -> SlotRecord | None:
        draw = torch.rand(3, generator=generator).tolist()
        isolated = slot == 0 and member % 10 < SHADOW_SHARE * 10
        if not seeds:
            return None
        stage = Stage.TRAINING if isolated else Stage.HOLDING
        blueprint = BLUEPRINTS[host][int(draw[1] * len(BLUEPRINTS[host]))]
        alpha = 0.0 if isolated else 1.0
        style = Style.SIGMOID_ADD
        return SlotRecord(stage=stage, blueprint=blueprint, style=style, alpha=alpha, alpha_target=1.0)

    return states_from_records([[record(i, s) for s in range(num_slots)] for i in range(num_members)])


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median time of each call after a warm-up; they take turns, so that all meet the same machine.

    Wall time, but thread CPU time on one thread of a CPU, where other work on the machine would count.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            synchronize(device)
            start = clock()
            call()
            synchronize(device)
            if turn:
                taken.append(clock() - start)
    return [1e3 * statistics.median(taken) for taken in times]


class OneAfterAnother:
    """The members as plain modules, each with its own optimizer; an isolated seed has a pass of its own."""

    def __init__(self, population: Population, states: SlotStates, count: int):
        device = population.device
        raised = states.replace(
            stage=torch.where(states.stage == Stage.TRAINING, int(Stage.HOLDING), states.stage),
            alpha=torch.where(states.stage == Stage.TRAINING, 1.0, states.alpha),
        )
        self.own = [extract(population, states, i).to(device).train() for i in range(count)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in self.own]
        isolated = (states.stage == Stage.TRAINING).any(1)[:count].nonzero().flatten().tolist()
        self.shadows = [extract(population, raised, i).to(device).train() for i in isolated]
        self.shadow_optimizers = []
        for shadow in self.shadows:
            shadow.requires_grad_(False)
            seed = shadow[1].requires_grad_(True)  # the graft behind the first segment
            self.shadow_optimizers.append(torch.optim.AdamW(seed.parameters(), lr=1e-3))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        pairs = [*zip(self.own, self.optimizers, strict=True)]
        pairs += zip(self.shadows, self.shadow_optimizers, strict=True)
        for module, optimizer in pairs:
            self._learn(module, optimizer, inputs, targets)

    @staticmethod
    def _learn(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()


def planted(
    args: argparse.Namespace, num_members: int, seeds: bool
) -> tuple[Population, SlotStates, MemberData]:
    """A population on random images or vectors, with or without seeds."""
    device = torch.device(args.device)
    config = PopulationConfig(batch_size=BATCH, batches_per_epoch=args.batches, precision=args.precision)
    images = args.host == "cnn"
    shape = (args.channels, args.side, args.side) if images else (args.side**2,)

    def make_host() -> Host:
        return build_host(args.host, shape, 10, width=args.width, **({"stride": 1} if images else {}))

    population = Population(make_host, config, torch.arange(num_members), device=device)
    states = random_states(num_members, population.num_slots, seeds, args.host).to(device)
    population.germinate(states.blueprint >= 0, states.blueprint)
    inputs, targets = torch.randn(1024, *shape, device=device), torch.randint(0, 10, (1024,), device=device)
    return population, states, shared_data(inputs, targets, num_members).to(device)


def measure(args: argparse.Namespace, num_members: int, seeds: bool) -> Result:
    device, batches = torch.device(args.device), args.batches
    population, states, data = planted(args, num_members, seeds)
    inputs, targets = data.inputs[0], data.targets[0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    looped = min(num_members, LOOPED_MEMBERS)
    loop = OneAfterAnother(population, states, looped)
    ours, baseline = milliseconds(
        [
            lambda: population.train_epoch(states, data, Clock(0, 0, 10)),
            lambda: loop.step(inputs[:BATCH], targets[:BATCH]),
        ],
        device,
        args.repeats,
    )
    ours, baseline = ours / batches, baseline * num_members / looped
    activations = (torch.cuda.max_memory_allocated() - base) / 2**20 if device.type == "cuda" else 0.0
    stored = sum(t.numel() * t.element_size() for t in population.tensors().values()) / num_members / 1024
    return Result(
        work="train step with seeds" if seeds else "train step",
        n=num_members,
        slots=population.num_slots,
        ours_ms=round(ours, 3),
        baseline_ms=round(baseline, 1),
        ratio=round(baseline / ours, 2),
        member_epochs_per_s=round(num_members / (ours * batches) * 1e3, 1),
        kilobytes_per_member=round(stored, 1),
        activations_mb=round(activations, 1),
        compiled=False,
        precision=args.precision,
        host=args.host,
        width=args.width,
    )


def show(results: list[Result], machine: str) -> None:
    load = f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads"
    table = Table(title=f"Eager loop over modules against the population ({machine}, {load})")
    for name in asdict(results[0]):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*[str(value) for value in asdict(result).values()])
    Console(width=160).print(table)


def plot(results: list[Result], path: Path, machine: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for work, precision, compiled in sorted({(r.work, r.precision, r.compiled) for r in results}):
        line = [r for r in results if (r.work, r.precision, r.compiled) == (work, precision, compiled)]
        line.sort(key=lambda r: r.n)
        label = f"population: {work}, {precision}{', compiled' if compiled else ''}"
        axes.plot([r.n for r in line], [r.ours_ms for r in line], marker="o", label=label)
    for work in sorted({r.work for r in results}):
        sizes = sorted({r.n for r in results if r.work == work})
        slow = [next(r.baseline_ms for r in results if (r.work, r.n) == (work, n)) for n in sizes]
        axes.plot(sizes, slow, "--", marker="x", label=f"eager loop: {work}")
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="ms per training step", title=machine)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=positive, nargs="+", default=[4, 16])
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--host", choices=BLUEPRINTS, default="cnn")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=16, help="minibatches in an epoch")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--read", type=Path, help="show the lines of a file instead of measuring")
    args = parser.parse_args()
    keep_freed_memory()  # as every training of esper does; one module after another gains as well
    results: list[Result] = []
    machine = machine_name(args.device)
    if args.read:
        results, machine = read_results(parser, args.read, Result)
    for seeds in () if args.read else (False, True):
        for num_members in args.members:
            results.append(measure(args, num_members, seeds))
            if args.json:
                print(line_of(results[-1], machine), flush=True)
    if not args.json:
        show(results, machine)
    if args.plot:
        plot(results, args.plot, machine)


if __name__ == "__main__":
    main()
