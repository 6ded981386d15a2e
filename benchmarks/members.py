"""Larger members beside every fair way to train many networks: time, share of the device, memory.

    python -m benchmarks.members --device cuda
    python -m benchmarks.members --hosts tiny --members 2 --precision float32 --device cpu --repeats 1

A step is one minibatch of training of every member with AdamW and clipped gradients. The ways:

    population            the rows of esper
    grouped               the same with torch's grouped convolutions and no kernels of its own, as HFTA does
    vmap                  torch.func.vmap over stacked weights, eager
    vmap, graph           the same captured in a CUDA graph
    compiled vmap         torch.compile of the gradients under vmap
    compiled vmap, graph  the same captured in a CUDA graph
    compiled loop         one compiled module after another; one is run, the rest is scaled

The share is of the rate that a large matrix product reaches in the same precision in the same run. Memory is
the most that was allocated at a time. A way that cannot run (no GPU, too little memory) has no line.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks.common import line_of, machine_name, read_results, synchronize
from esper.lifecycle.slot_states import SlotStates
from esper.population import network
from esper.population.config import PopulationConfig
from esper.population.data import Clock
from esper.population.hosts import Host, build_host
from esper.population.population import Population
from esper.simic.costs import TRAINING_PASSES, ForwardCosts
from studies.command_line import existing_device, positive
from tests.slots import shared_data

BATCH, BATCHES, CLASSES = 64, 16, 10  # an epoch has as many minibatches as in benchmarks.population
CLIP_NORM = 5.0  # as a population clips by default
PRECISIONS = ("float32", "bfloat16")
WAYS = (
    *("population", "grouped", "vmap", "vmap, graph", "compiled vmap", "compiled vmap, graph"),
    "compiled loop",
)
# preset, shape of an input, options
HOSTS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "tiny": ("resmlp", (16,), {"width": 8, "hidden": 16, "depth": 1}),
    "resmlp": ("resmlp", (64,), {"width": 128, "hidden": 512, "depth": 4}),
    "resnet": ("resnet", (3, 32, 32), {"width": 32, "depth": 2, "stages": 3}),
    "gpt": ("gpt", (64,), {"width": 128, "depth": 4, "heads": 4, "expansion": 4}),
    # of three to five million parameters
    "large-resmlp": ("resmlp", (64,), {"width": 384, "hidden": 1536, "depth": 4}),
    "large-resnet": ("resnet", (3, 32, 32), {"width": 64, "depth": 2, "stages": 3}),
    "large-gpt": ("gpt", (64,), {"width": 256, "depth": 6, "heads": 4, "expansion": 4}),
}


@dataclass(frozen=True)
class Result:
    """One line of the table; the time is of one minibatch of all members."""

    host: str
    parameters: int
    precision: str
    n: int
    way: str
    ms: float
    share: float  # of a large product's rate
    gib: float  # NaN on a CPU
    batch: int = BATCH


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean wall time of a call after two that warm up."""
    for _ in range(2):
        call()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / repeats * 1e3


def free_memory(device: torch.device) -> None:
    """Let go of the networks that nobody holds, and of what was compiled for them."""
    gc.collect()  # the parts of a population refer to each other in circles
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def product_rate(device: torch.device, precision: torch.dtype) -> float:
    """FLOP/s of a large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=precision) for _ in range(2))
    return 2e3 * size**3 / milliseconds(lambda: a @ b, device, 10)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def compiled_step(host: Host, x: Tensor, y: Tensor, precision: torch.dtype) -> Callable[[], object]:
    """One member's minibatch in plain PyTorch."""
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-3, fused=True)
    model = torch.compile(host)

    def step() -> None:
        with torch.autocast(x.device.type, precision, enabled=precision != torch.float32):
            loss = loss_of(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(host.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def stacked_step(
    hosts: list[nn.Module], x: Tensor, y: Tensor, precision: torch.dtype, compiled: bool, graph: bool
) -> Callable[[], object]:
    """All members under vmap, with one optimizer over stacked weights."""
    weights, buffers = stack_module_state(hosts)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, fused=True, capturable=x.is_cuda)
    base = hosts[0]

    def loss(one: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
        # Without its cache of casts, which would leave the memory of a graph.
        with torch.autocast(x.device.type, precision, precision != torch.float32, cache_enabled=False):
            return loss_of(functional_call(base, (one, held), (x,)), y)

    def clipped(one: dict[str, Tensor], held: dict[str, Tensor]) -> dict[str, Tensor]:
        found = grad(loss)(one, held)
        norm = sum(value.square().sum() for value in found.values()).sqrt()
        scale = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
        return {name: value * scale for name, value in found.items()}

    gradients = torch.compile(vmap(clipped), dynamic=False) if compiled else vmap(clipped)

    def step() -> None:
        found = gradients({name: value.detach() for name, value in weights.items()}, buffers)
        for name, value in weights.items():
            value.grad = found[name].contiguous()  # as a fused optimizer wants it
        optimizer.step()

    return captured(step) if graph else step


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph, captured after three steps that warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Measurement:
    """One host in one precision on one device."""

    def __init__(
        self, name: str, precision: str, device: torch.device, repeats: int, batch: int = BATCH
    ) -> None:
        self.name, self.precision, self.device, self.repeats = name, precision, device, repeats
        self.batch = batch
        self.preset, shape, _ = HOSTS[name]
        tokens = self.preset == "gpt"
        self.inputs = torch.randint(CLASSES, (batch, *shape)) if tokens else torch.randn(batch, *shape)
        self.targets = torch.randint(CLASSES, (batch, *shape) if tokens else (batch,))
        self.x, self.y = self.inputs.to(device), self.targets.to(device)
        self.rate = product_rate(device, getattr(torch, precision))
        alone = Population(self.make, PopulationConfig(initial_weights=1), torch.arange(1)).network
        self.parameters = alone.host_parameters
        forward = ForwardCosts.of(alone, self.inputs[:1], torch.device("cpu")).host
        self.flops = TRAINING_PASSES * batch * forward  # of one member
        self._loop: tuple[float, float] | None = None  # of one member of a compiled loop

    def make(self) -> Host:
        _, shape, options = HOSTS[self.name]
        return build_host(self.preset, shape, CLASSES, **options)

    def population_step(self, members: int, method: str) -> Callable[[], object]:
        """An epoch of BATCHES minibatches of a population."""
        config = PopulationConfig(
            batch_size=self.batch, batches_per_epoch=BATCHES, precision=self.precision, initial_weights=2
        )
        with patch.object(network, "convolution_method", return_value=method):
            population = Population(self.make, config, torch.arange(members), device=self.device)
        states = SlotStates.empty(members, population.num_slots, self.device)
        data = shared_data(self.inputs, self.targets, members).to(self.device)
        return partial(population.train_epoch, states, data, Clock(0, 0, 10))

    def timed(
        self, way: str, members: int, make_step: Callable[[], Callable[[], object]]
    ) -> tuple[float, float]:
        """Milliseconds of a call and GiB at its peak; NaN where it runs out of memory or cannot run."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            took = milliseconds(make_step(), self.device, self.repeats)
            return took, torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan
        except RuntimeError as error:
            print(f"{self.name}, {members} members, {way}: {str(error).splitlines()[0]}", file=sys.stderr)
            return math.nan, math.nan
        finally:
            free_memory(self.device)

    def measure(self, members: int, way: str) -> Result | None:
        """One way to train so many members, or None where it cannot run."""
        precision = getattr(torch, self.precision)
        own, cuda = network.convolution_method(self.device), self.device.type == "cuda"
        if way.endswith("graph") and not cuda:
            return None
        if way == "grouped" and (self.preset != "resnet" or own == "grouped"):
            return None  # no convolutions, or none of its own
        if way in ("population", "grouped"):
            method = own if way == "population" else "grouped"
            ms, gib = self.timed(way, members, lambda: self.population_step(members, method))
            ms /= BATCHES
        elif way == "compiled loop":
            if self._loop is None:
                host = self.make().to(self.device)
                self._loop = self.timed(way, 1, lambda: compiled_step(host, self.x, self.y, precision))
            # Weights, gradients and moments of the others stay where they are.
            ms, gib = members * self._loop[0], self._loop[1] + 16 * self.parameters * (members - 1) / 2**30
        else:
            kind = {"compiled": way.startswith("compiled"), "graph": way.endswith("graph")}

            def make_step() -> Callable[[], object]:
                hosts: list[nn.Module] = [self.make().to(self.device) for _ in range(members)]
                return stacked_step(hosts, self.x, self.y, precision, **kind)

            ms, gib = self.timed(way, members, make_step)
        if ms != ms:
            return None
        share = self.flops * members / ms * 1e3 / self.rate
        figures = (round(value, 3) for value in (ms, share, gib))
        return Result(self.name, self.parameters, self.precision, members, way, *figures, self.batch)


def show(results: list[Result], machine: str) -> None:
    """Print the table, with each time as a multiple of the population's."""
    table = Table(title=f"A minibatch ({machine})")
    for name in (*Result.__dataclass_fields__, "times the population"):
        table.add_column(name, justify="right")
    ours = {(r.host, r.precision, r.n, r.batch): r.ms for r in results if r.way == "population"}
    for r in results:
        beside = r.ms / ours.get((r.host, r.precision, r.n, r.batch), math.nan)
        table.add_row(*[str(value) for value in asdict(r).values()], f"{beside:.2f}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", choices=HOSTS, nargs="+", default=["resmlp", "resnet", "gpt"])
    parser.add_argument("--members", type=positive, nargs="+", default=[16, 128, 512, 2048])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--batch", type=positive, default=BATCH, help="samples of a minibatch")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=PRECISIONS)
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    parser.add_argument("--read", type=Path, help="show the lines of a file instead of measuring")
    args = parser.parse_args()
    results: list[Result] = []
    machine = machine_name(args.device)
    if args.read:
        results, machine = read_results(parser, args.read, Result)
    for host in () if args.read else args.hosts:
        for precision in args.precision:
            measurement = Measurement(host, precision, torch.device(args.device), args.repeats, args.batch)
            for members, way in product(args.members, args.ways):
                result = measurement.measure(members, way)
                results += [] if result is None else [result]
                if args.json and result is not None:
                    print(line_of(result, machine), flush=True)
    if not args.json:
        show(results, machine)


if __name__ == "__main__":
    main()
