"""Larger members: residual hosts of up to a million parameters, and what share of the device they use.

    python -m benchmarks.members --members 16 64 256 --device cuda --precision bfloat16
    python -m benchmarks.members --hosts tiny --members 2 --device cpu --repeats 1

A step is one minibatch of training of every member. Beside the population: one module after another, each
compiled by torch.compile (one is run, the rest is scaled); torch.func.vmap over stacked weights; and, for
convolutions, the population with torch's grouped ones instead of kernels of its own, which is how HFTA joins
networks. The share is of the rate that a large matrix product reaches in the same precision in the same run;
the traffic is what a step cannot do without, reading weights, moments and gradients and writing all but the
last in float32, as a share of what a plain copy moves in the same time.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks.common import line_of, machine_name, synchronize
from esper.lifecycle.slot_states import SlotStates
from esper.population import network
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import Host, build_host
from esper.population.population import Population
from esper.simic.costs import TRAINING_PASSES, ForwardCosts
from studies.command_line import existing_device, positive

BATCH, BATCHES, CLASSES = 64, 8, 10
UPDATE_BYTES = 4 * (4 + 3)  # of a parameter in a step: weight, two moments and gradient in, three of them out
# preset, shape of an input, options
HOSTS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "tiny": ("resmlp", (16,), {"width": 8, "hidden": 16, "depth": 1}),
    "resmlp": ("resmlp", (64,), {"width": 128, "hidden": 512, "depth": 4}),
    "resnet": ("resnet", (3, 32, 32), {"width": 32, "depth": 2, "stages": 3}),
    "gpt": ("gpt", (64,), {"width": 128, "depth": 4, "heads": 4, "expansion": 4}),
}


@dataclass(frozen=True)
class Result:
    """One line of the table; times are of one minibatch of all members."""

    host: str
    parameters: int
    precision: str
    n: int
    population_ms: float
    compiled_loop_ms: float
    vmap_ms: float
    grouped_ms: float
    tflops: float
    share: float  # of a large product's rate
    traffic: float = math.nan  # of weights, moments and gradients, as a share of a plain copy's rate


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


def product_rate(device: torch.device, precision: torch.dtype) -> float:
    """FLOP/s of a large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=precision) for _ in range(2))
    return 2e3 * size**3 / milliseconds(lambda: a @ b, device, 10)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy of a large tensor reads and writes."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / milliseconds(lambda: target.copy_(source), device, 10)


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
        nn.utils.clip_grad_norm_(host.parameters(), 5.0)
        optimizer.step()

    return step


def stacked_step(
    hosts: list[nn.Module], x: Tensor, y: Tensor, precision: torch.dtype
) -> Callable[[], object]:
    """All members under vmap, with one optimizer over stacked weights."""
    weights, buffers = stack_module_state(hosts)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, fused=True)
    base = hosts[0]

    def loss(one: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
        with torch.autocast(x.device.type, precision, enabled=precision != torch.float32):
            return loss_of(functional_call(base, (one, held), (x,)), y)

    gradients = vmap(grad(loss))

    def step() -> None:
        found = gradients({name: value.detach() for name, value in weights.items()}, buffers)
        for name, value in weights.items():
            value.grad = found[name].contiguous()  # as a fused optimizer wants it
        optimizer.step()

    return step


def measure(args: argparse.Namespace, name: str, members: int, rates: tuple[float, float]) -> Result:
    """One host at one number of members; NaN where a way runs out of memory or cannot run.

    rates: FLOP/s of a product, bytes a second of a copy
    """
    device, precision = torch.device(args.device), getattr(torch, args.precision)
    preset, shape, options = HOSTS[name]

    def make() -> Host:
        return build_host(preset, shape, CLASSES, **options)

    tokens = preset == "gpt"
    inputs = torch.randint(CLASSES, (BATCH, *shape)) if tokens else torch.randn(BATCH, *shape)
    targets = torch.randint(CLASSES, (BATCH, *shape) if tokens else (BATCH,))
    x, y = inputs.to(device), targets.to(device)
    data = MemberData.shared(inputs, targets, members).to(device)

    def population_step(method: str | None = None) -> Callable[[], object]:
        config = PopulationConfig(
            batch_size=BATCH, batches_per_epoch=BATCHES, precision=args.precision, initial_weights=2
        )
        method = method or network.convolution_method(device)
        with patch.object(network, "convolution_method", return_value=method):
            population = Population(make, config, torch.arange(members), device=device)
        states = SlotStates.empty(members, population.num_slots, device)
        return partial(population.train_epoch, states, data, Clock(0, 0, 10))

    def tried(make_step: Callable[[], Callable[[], object]], scale: float) -> float:
        try:
            return scale * milliseconds(make_step(), device, args.repeats)
        except RuntimeError as error:
            print(f"{name}, {members} members: {str(error).splitlines()[0]}")
            return math.nan
        finally:
            gc.collect()  # the parts of a population refer to each other in circles
            if device.type == "cuda":
                torch.cuda.empty_cache()

    ours = tried(lambda: population_step(), 1 / BATCHES)
    grouped = tried(lambda: population_step("grouped"), 1 / BATCHES) if preset == "resnet" else math.nan
    looped = tried(lambda: compiled_step(make().to(device), x, y, precision), members)
    stacked = tried(lambda: stacked_step([make().to(device) for _ in range(members)], x, y, precision), 1.0)
    alone = Population(make, PopulationConfig(initial_weights=1), torch.arange(1)).network
    flops = TRAINING_PASSES * BATCH * ForwardCosts.of(alone, inputs[:1], torch.device("cpu")).host * members
    moved = UPDATE_BYTES * alone.host_parameters * members
    shares = (work / ours * 1e3 / rate for work, rate in zip((flops, moved), rates, strict=True))
    figures = (ours, looped, stacked, grouped, flops / ours / 1e9, *shares)
    return Result(
        name, alone.host_parameters, args.precision, members, *(round(value, 3) for value in figures)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", choices=HOSTS, nargs="+", default=["resmlp", "resnet", "gpt"])
    parser.add_argument("--members", type=positive, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    args = parser.parse_args()
    device = torch.device(args.device)
    rates = product_rate(device, getattr(torch, args.precision)), copy_rate(device)
    speeds = f"{rates[0] / 1e12:.3g} TFLOP/s, {rates[1] / 1e12:.3g} TB/s"
    table = Table(title=f"A minibatch of {BATCH} ({machine_name(args.device)}, {speeds})")
    for name in Result.__dataclass_fields__:
        table.add_column(name, justify="right")
    for host in args.hosts:
        for members in args.members:
            result = measure(args, host, members, rates)
            table.add_row(*[str(value) for value in asdict(result).values()])
            if args.json:
                print(line_of(result, machine_name(args.device)), flush=True)
    if not args.json:
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
