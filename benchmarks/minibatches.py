"""A minibatch of the study's networks with clones and new units, half of them alive and half folded in.

    python -m benchmarks.minibatches --families signals tables tokens --members 768 --device cuda
    python -m benchmarks.minibatches --families tables --members 6 --device cpu
    python -m benchmarks.minibatches --launches          what a CUDA graph and a single kernel cost the host

Every member of the first half has a seed in each slot, one of them in isolation; those of the others were
folded into their hosts. Times are of one of eight minibatches of 128, the median of five epochs after three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.clocks import gpu_seconds
from benchmarks.lines import line_of
from benchmarks.population import machine_name, synchronise
from esper.foundation.replay import Studio
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotRecord, SlotStates
from esper.lifecycle.stages import Stage
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.hosts import Host, build_host
from esper.population.population import Population
from studies.command_line import existing_device, positive
from studies.growth.families import FAMILIES

BATCHES, SAMPLES = 8, 512
KINDS = (Blueprint.CLONE, Blueprint.WIDEN_FULL, Blueprint.WIDEN_HALF)
PRECISION = {"tokens": "bfloat16"}  # others run in float32
BY_NAME = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Result:
    """One line; milliseconds are of one minibatch of all members."""

    family: str
    precision: str
    n: int
    wall_ms: float
    gpu_ms: float
    kernels: float


def grown_population(name: str, members: int, device: torch.device) -> tuple[Population, SlotStates]:
    """Networks of a family, of which every other one has its seeds folded in."""
    family = BY_NAME[name]
    config = PopulationConfig(
        batch_size=128, batches_per_epoch=BATCHES, folds=2, widest=3, initial_weights=4, seed_weights=1,
        precision=PRECISION.get(name, "float32"),  # type: ignore[arg-type]
    )  # fmt: skip
    host = family.host

    def make() -> Host:
        return build_host(host.preset, family.shape, family.classes, **host.options)

    population = Population(make, config, torch.arange(members), device=device)
    fits = population.growable().cpu()

    def seed(member: int, slot: int) -> SlotRecord:
        wanted = KINDS[(member + slot) % len(KINDS)]
        blueprint = wanted if fits[member, slot, wanted] else Blueprint.WIDEN_FULL
        alone = slot == member % max(population.num_slots, 3)
        stage, alpha = (Stage.TRAINING, 0.0) if alone else (Stage.HOLDING, 1.0)
        return SlotRecord(stage=stage, blueprint=blueprint, style=Style.LINEAR_ADD, alpha=alpha)

    slots = range(population.num_slots)
    planted = SlotStates.from_records([[seed(i, s) for s in slots] for i in range(members)]).to(device)
    population.germinate(planted.blueprint >= 0, planted.blueprint)
    population.look(planted)
    odd = torch.arange(members, device=device).unsqueeze(1) % 2 == 1
    population.fold(odd.expand_as(planted.stage), planted.style)
    population.look(SlotStates.empty(members, population.num_slots, device))
    left = [[SlotRecord() if i % 2 else seed(i, s) for s in slots] for i in range(members)]
    return population, SlotStates.from_records(left).to(device)


def measure(name: str, members: int, device: torch.device) -> Result:
    """Time the minibatches of a family."""
    torch.manual_seed(0)
    population, states = grown_population(name, members, device)
    family = BY_NAME[name]
    tokens = family.topology == "transformer"
    shape = (SAMPLES, *family.shape)
    inputs = torch.randint(0, family.classes, shape) if tokens else torch.randn(shape)
    targets = torch.randint(0, family.classes, shape if tokens else (SAMPLES,))
    data = MemberData.shared(inputs, targets, members).to(device)
    walls = []
    for epoch in range(8):
        synchronise(device)
        begun = time.perf_counter()
        population.train_epoch(states, data, Clock(0, epoch, 20))
        synchronise(device)
        walls.append((time.perf_counter() - begun) / BATCHES * 1e3)
    busy, kernels = float("nan"), float("nan")
    if device.type == "cuda":
        busy, kernels = gpu_seconds(lambda: population.train_epoch(states, data, Clock(0, 8, 20)))
    figures = (median(walls[3:]), busy / BATCHES * 1e3, kernels / BATCHES)
    return Result(name, PRECISION.get(name, "float32"), members, *(round(value, 3) for value in figures))


def show_launches() -> None:
    """Microseconds that the host takes to launch graphs of small kernels, and one kernel by itself."""
    x, studio = torch.randn(64, 64, device="cuda"), Studio()

    def microseconds(call: Callable[[], object], wait: bool) -> float:
        found = []
        for _ in range(30):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            if wait:
                torch.cuda.synchronize()
            found.append((time.perf_counter() - begun) * 1e6)
        return median(found)

    for count in (75, 600):
        graph, _ = studio.capture(lambda count=count: [x.add_(1.0) for _ in range(count)])  # type: ignore[misc]
        launch, done = (microseconds(graph.replay, wait) for wait in (False, True))
        print(f"a graph of {count} kernels: {launch:.0f} µs to launch, {done:.0f} µs until it is done")
    print(f"one kernel by itself: {microseconds(lambda: x.add_(1.0), False):.1f} µs to launch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--members", type=positive, default=768)
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--launches", action="store_true", help="time launches instead; needs a GPU")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.launches:
        if device.type != "cuda":
            parser.error(f"--launches times CUDA graphs and the device is {args.device}; use a GPU")
        show_launches()
        return
    for name in args.families:
        print(line_of(measure(name, args.members, device), machine_name(args.device)), flush=True)


if __name__ == "__main__":
    main()
