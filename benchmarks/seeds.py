"""What a FLOP costs with each kind of seed: bare hosts, classic seeds, clones, new units; alive or folded in.

    python -m benchmarks.seeds --device cuda --members 64 --precision bfloat16 --json > seeds.jsonl
    python -m benchmarks.seeds --device cpu --hosts small-resnet small-resmlp small-gpt --members 4
    python -m benchmarks.seeds --read seeds.jsonl

Every member of an arm holds the same seeds, one in each slot that takes them. The classic seed is the one
that is most like the block ahead of its slot: CONV_HEAVY, MLP or ATTENTION. A round times one epoch of
training of an arm and one of the host that holds classic seeds, so that whatever else the machine does meets
both alike; on a CPU one thread is used and its own time counts. They are compared round by round, per
training FLOP.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lines import line_of, read_results
from benchmarks.population import machine_name, synchronise
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.blocks import AttendToPast
from esper.population.config import PopulationConfig
from esper.population.data import Clock, MemberData
from esper.population.forms import SlotForms
from esper.population.hosts import build_host
from esper.population.population import Population
from esper.simic.costs import ForwardCosts, Work
from studies.command_line import existing_device, positive

CLASSES, SAMPLES = 10, 512
# preset, shape of an input, options
HOSTS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "small-resnet": ("resnet", (1, 8, 8), {"width": 8, "depth": 2, "stages": 2}),
    "small-resmlp": ("resmlp", (16,), {"width": 32, "hidden": 128, "depth": 3}),
    "small-gpt": ("gpt", (16,), {"width": 32, "depth": 2, "heads": 4, "expansion": 4}),
    "resnet": ("resnet", (3, 32, 32), {"width": 32, "depth": 2, "stages": 3}),
    "resmlp": ("resmlp", (64,), {"width": 128, "hidden": 512, "depth": 4}),
    "gpt": ("gpt", (64,), {"width": 128, "depth": 4, "heads": 4, "expansion": 4}),
}
CLASSIC = {"Conv": Blueprint.CONV_HEAVY, "Linear": Blueprint.MLP, "Attend": Blueprint.ATTENTION}
BASE = "classic seeds"


@dataclass(frozen=True)
class Arm:
    """What grows in every slot that takes it, None for nothing."""

    name: str
    blueprint: Blueprint | None  # NOOP stands for the classic one
    folded: bool = False


ARMS = (
    Arm("bare host", None),
    Arm(BASE, Blueprint.NOOP),
    Arm("clones", Blueprint.CLONE),
    Arm("new units", Blueprint.WIDEN_FULL),
    Arm("clones, folded in", Blueprint.CLONE, folded=True),
    Arm("new units, folded in", Blueprint.WIDEN_FULL, folded=True),
)


@dataclass(frozen=True)
class Result:
    """One line of the table; times are medians over the rounds, of one minibatch of all members."""

    host: str
    arm: str
    n: int
    precision: str
    milliseconds: float
    gigaflops: float  # of one minibatch of all members
    picoseconds_per_flop: float
    against_classic: float  # time per FLOP over that of classic seeds, median over the rounds


class Case:
    """One arm of one host, ready to train."""

    def __init__(self, host: str, arm: Arm, args: argparse.Namespace) -> None:
        preset, shape, options = HOSTS[host]
        self.arm, self.device = arm, torch.device(args.device)
        config = PopulationConfig(
            batch_size=args.batch, batches_per_epoch=args.batches, precision=args.precision, folds=1,
            initial_weights=4,
        )  # fmt: skip
        members = torch.arange(args.members)
        make = lambda: build_host(preset, shape, CLASSES, **options)  # noqa: E731
        self.population = population = Population(make, config, members, device=self.device)
        inputs, targets = _samples(preset, shape)
        self.data = MemberData.shared(inputs, targets, args.members).to(self.device)
        self.states = SlotStates.empty(args.members, population.num_slots, self.device)
        if arm.blueprint is not None:
            self._grow([arm.blueprint or classic_seed(slot) for slot in population.bodies.slots])
        costs = ForwardCosts.of(population.bodies, inputs[:1], self.device)
        work = Work(training=args.batch * args.batches, validation=0, ablate=False)
        self.flops = float(costs.epoch(self.states, population, work).sum())

    def _grow(self, blueprints: list[Blueprint]) -> None:
        """A seed at full strength in every slot that takes the blueprint that is meant for it."""
        population, bare = self.population, self.states
        wanted = torch.tensor([int(b) for b in blueprints], device=self.device).expand_as(bare.stage)
        where = population.growable().gather(2, wanted.unsqueeze(2)).squeeze(2)
        population.germinate(where, wanted)
        held = bare.replace(
            stage=torch.where(where, int(Stage.HOLDING), bare.stage),
            blueprint=torch.where(where, wanted, bare.blueprint),
            style=torch.full_like(bare.style, int(Style.LINEAR_ADD)),
            alpha=torch.where(where, 1.0, bare.alpha),
        )
        population.look(held)
        if self.arm.folded:
            population.fold(where, held.style)
            population.look(bare)
        self.states = bare if self.arm.folded else held

    def seconds(self) -> float:
        """The time of one epoch."""
        on_gpu = self.device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.thread_time
        synchronise(self.device)
        begun = clock()
        self.population.train_epoch(self.states, self.data, Clock(0, 0, 10))
        synchronise(self.device)
        return clock() - begun


def classic_seed(slot: SlotForms) -> Blueprint:
    """The blueprint that is most like the block ahead of a slot."""
    assert slot.branch is not None
    attends = isinstance(slot.branch.middle, AttendToPast)
    name = "Attend" if attends else type(slot.branch.first).__name__.rstrip("12d")
    return CLASSIC[name]


def _samples(preset: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    if preset == "gpt":
        tokens = torch.randint(CLASSES, (2, SAMPLES, *shape), generator=dice)
        return tokens[0], tokens[1]
    return torch.randn(SAMPLES, *shape, generator=dice), torch.randint(CLASSES, (SAMPLES,), generator=dice)


def measure(host: str, args: argparse.Namespace) -> Iterator[Result]:
    """All arms of one host, each in rounds with the classic one; no more than two are held at a time."""
    base = Case(host, next(arm for arm in ARMS if arm.name == BASE), args)
    for arm in ARMS:
        case = base if arm.name == BASE else Case(host, arm, args)
        for _ in range(args.warmup):
            case.seconds(), base.seconds()
        rounds = [(case.seconds() / case.flops, base.seconds() / base.flops) for _ in range(args.repeats)]
        per_flop = median(own for own, _ in rounds)
        yield Result(
            host=host,
            arm=arm.name,
            n=args.members,
            precision=args.precision,
            milliseconds=round(per_flop * case.flops / args.batches * 1e3, 4),
            gigaflops=round(case.flops / args.batches / 1e9, 4),
            picoseconds_per_flop=round(per_flop * 1e12, 4),
            against_classic=round(median(own / classic for own, classic in rounds), 3),
        )
        del case
        gc.collect()  # the parts of a population refer to each other in circles
        if args.device == "cuda":
            torch.cuda.empty_cache()


def show(results: list[Result], machine: str) -> None:
    """A line per arm."""
    table = Table(title=f"Training time per FLOP ({machine})")
    for name in asdict(results[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        table.add_row(*[str(value) for value in asdict(result).values()])
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=["resnet", "resmlp", "gpt"])
    parser.add_argument("--members", type=positive, default=16)
    parser.add_argument("--batch", type=positive, default=32, help="samples in a minibatch of a member")
    parser.add_argument("--batches", type=positive, default=4, help="minibatches in an epoch")
    parser.add_argument("--repeats", type=positive, default=9, help="rounds that are timed")
    parser.add_argument("--warmup", type=positive, default=3, help="rounds before them")
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    parser.add_argument("--read", type=Path, help="show the lines of a file instead of measuring")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    machine, results = machine_name(args.device), []
    if args.read:
        results, machine = read_results(parser, args.read, Result)
    for host in () if args.read else args.hosts:
        for result in measure(host, args):
            results.append(result)
            if args.json:
                print(line_of(result, machine), flush=True)
    if not args.json:
        show(results, machine)


if __name__ == "__main__":
    main()
