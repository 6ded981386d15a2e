"""The whole loop (train, validate, observe, decide, apply, reward, update) in member-steps per second.

    python -m benchmarks.loop --work stated --members 64 512 1024 --device cuda
    python -m benchmarks.loop --work digits --members 16 --steps 5 --device cpu

Host and GPU are told apart: `host ms` is a step without the time in which the host waits for the GPU,
`GPU ms` the time in which a kernel runs, `busy` that time over the step. `--gaps` also prints how long the
GPU waits between two kernels, as profiled, which makes the host slower.

`stated` is a host of 8-16-32 channels over 32×32 images (each segment after the first halves the resolution),
three slots, batch 64, 4 training and 2 validation batches per step, leave-one-out rows, a policy 512 wide;
seeds may be planted at any step, by the choices of an untrained policy.
`images` is the same with a host of three times 8 channels over 8×8 images; `digits` the default image task.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common import line_of, machine_name, synchronize
from esper.lifecycle.stages import SEED_STAGES
from esper.population.config import PopulationConfig
from esper.population.hosts import GlobalMean, Host
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.config import EpisodeConfig, lifecycle_for
from esper.simic.environment import EnvironmentSpec
from esper.simic.learner import Learner
from esper.simic.trainer import Round, Trainer
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.utils.graphs import GraphPool
from studies.command_line import existing_device, positive

BATCH = 64


@dataclass(frozen=True)
class Work:
    shape: tuple[int, int, int]
    widths: tuple[int, int, int]
    policy_width: int


WORKS = {
    "stated": Work((3, 32, 32), (8, 16, 32), 512),
    "images": Work((1, 8, 8), (8, 8, 8), 512),
    "digits": Work((1, 8, 8), (8, 8, 8), 128),
}


@dataclass(frozen=True)
class Result:
    """One line of the table; times are of one decision step."""

    work: str
    precision: str
    n: int
    member_steps_per_s: float
    step_ms: float
    shares: dict[str, float]  # of the wall time of an instrumented episode
    syncs_per_step: float
    graphs_per_step: float = float("nan")  # CUDA graphs captured while it was timed
    peak_gb: float = float("nan")
    gpu_busy: float = float("nan")  # share of wall time in which a kernel ran
    host_ms: float = float("nan")  # without waiting for the GPU
    gpu_ms: float = float("nan")  # in which a kernel ran
    kernels: float = float("nan")  # launched or replayed
    seeds: float = float("nan")  # of a member, on the mean over an episode


def random_task(work: Work) -> Task:
    """Random images with random labels: throughput does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        return Split(
            torch.randn(count, *work.shape, generator=generator),
            torch.randint(0, 10, (count,), generator=generator),
        )

    return Task(
        name="random images",
        topology="cnn",
        input_shape=work.shape,
        num_classes=10,
        train=split(4 * BATCH),
        validation=split(2 * BATCH),
        held_out=TestSplit(split(BATCH)),
        host=HostSpec("cnn"),
    )


def make_host(work: Work) -> Host:
    channels = (work.shape[0], *work.widths)
    segments = [
        nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride=2 if k else 1, padding=1, bias=False),
            nn.GroupNorm(1, c_out),
            nn.ReLU(),
        )
        for k, (c_in, c_out) in enumerate(pairwise(channels))
    ]
    head = nn.Sequential(GlobalMean(), nn.Linear(work.widths[-1], 10))
    return Host(segments, "cnn", head, work.widths, spatial_dims=2)


def make_trainer(args: argparse.Namespace, num_members: int) -> Trainer:
    work, ppo = WORKS[args.work], PPOConfig(epochs=1)
    population = PopulationConfig(
        batch_size=BATCH,
        batches_per_epoch=4,
        validation_samples=2 * BATCH,
        rows_per_chunk=args.chunk or num_members,
        initial_weights=64,  # few, so that all are made before the clock starts
        seed_weights=8,
        precision=args.precision,
    )
    spec = EnvironmentSpec(
        task=random_task(work),
        members=torch.arange(num_members),
        gamma=ppo.gamma,
        device=args.device,
        episode=EpisodeConfig(steps=args.steps, clock="steps"),
        lifecycle=lifecycle_for(args.steps).model_copy(update={"allow_unfinished": True}),
        population=population,
        make_host=lambda: make_host(work),
    )
    agent = PPOAgent(TamiyoNet(TamiyoNetConfig(width=work.policy_width)), ppo, args.device)
    return Trainer([spec], [Learner("agent", agent, args.steps)], rounds=100)


PHASES: tuple[tuple[str, Callable[[Trainer], Any], str], ...] = (
    ("train", lambda t: t.environment.population, "train_epoch"),
    ("validate", lambda t: t.environment.population, "validate"),
    ("decide", lambda t: t.learners["agent"].agent, "act"),
    ("apply", lambda t: t.environment, "_apply"),
    ("finish", lambda t: t.environment, "_finish"),
    ("update", lambda t: t.learners["agent"].agent, "update"),
)


@contextmanager
def captures() -> Iterator[list[int]]:
    """Counts the CUDA graphs that are captured meanwhile."""
    count, capture = [0], GraphPool.capture

    def counted(pool: GraphPool, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        count[0] += 1
        return capture(pool, function)

    with patch.object(GraphPool, "capture", counted):
        yield count


def host_seconds(call: Callable[[], object]) -> float:
    """Wall seconds of a call without those in which the host waits for the GPU."""
    waited = 0.0

    def waiting(read: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            begun = time.perf_counter()
            torch.cuda.synchronize()
            waited += time.perf_counter() - begun
            return read(tensor, *args, **kwargs)

        return run

    reads = {name: waiting(getattr(torch.Tensor, name)) for name in ("cpu", "tolist", "item")}
    events = waiting(torch.cuda.Event.synchronize)
    torch.cuda.synchronize()
    with patch.multiple(torch.Tensor, **reads), patch.object(torch.cuda.Event, "synchronize", events):
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun - waited


def kernel_spans(call: Callable[[], object]) -> list[tuple[float, float]]:
    """When each kernel of a call began and ended, in microseconds, in their order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end)
        for event in prof.events() or ()
        if event.device_type == DeviceType.CUDA
    )


def busy_and_gaps(spans: list[tuple[float, float]]) -> tuple[float, list[float]]:
    """How long any of these spans, in order of their starts, lasts, and the gaps between them."""
    total, gaps, until = 0.0, list[float](), spans[0][0] if spans else 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        gaps += [start - until] if start > until else []
        until = max(until, end)
    return total, gaps


def print_gaps(gaps: list[float], steps: int) -> None:
    """How many gaps of each length, in microseconds, a step has, and how long they are together."""
    for shortest, longest in pairwise((0, 1, 5, 20, 100, math.inf)):
        some = [gap for gap in gaps if shortest <= gap < longest]
        count, ms = len(some) / steps, sum(some) / steps / 1e3
        print(f"gaps of {shortest} to {longest} µs: {count:.0f} a step, {ms:.2f} ms")


@contextmanager
def phase_clock(trainer: Trainer, device: torch.device) -> Iterator[dict[str, float]]:
    """Wall seconds by phase; waits for the device around each, so it is not used for throughput."""
    seconds = {name: 0.0 for name, _, _ in PHASES}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = time.perf_counter()
            result = call(*args, **kwargs)
            synchronize(device)
            seconds[name] += time.perf_counter() - start
            return result

        return run

    with ExitStack() as patched:
        for name, owner, method in PHASES:
            call = timed(name, getattr(owner(trainer), method))
            patched.enter_context(patch.object(owner(trainer), method, call))
        yield seconds


def count_syncs(trainer: Trainer) -> int:
    """Host synchronisations of one round, as torch reports them."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.play_round()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def measure(args: argparse.Namespace, num_members: int) -> Result:
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # the last trainer's parts refer to each other in circles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(args, num_members)
    for _ in range(args.warm):
        trainer.play_round()
    return _timed(args, trainer, num_members, device)


def _play(
    args: argparse.Namespace, trainer: Trainer, device: torch.device
) -> tuple[float, int, dict[str, Round]]:
    """Seconds of a round, CUDA graphs captured in all of them, and the last one."""
    synchronize(device)
    start = time.perf_counter()
    with captures() as captured:
        rounds = [trainer.play_round() for _ in range(args.rounds)]
    synchronize(device)
    return (time.perf_counter() - start) / args.rounds, captured[0], rounds[-1]


def _timed(args: argparse.Namespace, trainer: Trainer, num_members: int, device: torch.device) -> Result:
    """The figures of a trainer that is warm."""
    on_gpu = device.type == "cuda"
    seconds, captured, last = _play(args, trainer, device)
    stages = last["agent"].record.ticked_stage  # [T, N, S]
    host = host_seconds(trainer.play_round) if on_gpu else seconds
    with phase_clock(trainer, device) as phases:
        trainer.play_round()
    total = sum(phases.values())
    steps, busy, kernels = args.steps, math.nan, math.nan
    if on_gpu and (args.profile or args.gaps):
        spans = kernel_spans(trainer.play_round)
        total, gaps = busy_and_gaps(spans)
        busy, kernels = total / 1e6, len(spans)
        if args.gaps:
            print_gaps(gaps, steps)
    return Result(
        work=args.work,
        precision=args.precision,
        n=num_members,
        member_steps_per_s=round(num_members * steps / seconds, 1),
        step_ms=round(seconds / steps * 1e3, 2),
        shares={name: round(value / total, 3) for name, value in phases.items()},
        peak_gb=round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else 0.0,
        graphs_per_step=round(captured / steps / args.rounds, 2) if on_gpu else 0.0,
        syncs_per_step=round(count_syncs(trainer) / steps, 1) if on_gpu else 0.0,
        gpu_busy=round(busy / seconds, 3),
        host_ms=round(host / steps * 1e3, 2),
        gpu_ms=round(busy / steps * 1e3, 2),
        kernels=round(kernels / steps, 1),
        seeds=round(float(np.isin(stages, [int(s) for s in SEED_STAGES]).sum(2).mean()), 2),
    )


COLUMNS = {
    "work": "work",
    "precision": "precision",
    "n": "members",
    "member_steps_per_s": "member-steps/s",
    "step_ms": "step, ms",
    "shares": "phases",
    "peak_gb": "peak GB",
    "syncs_per_step": "syncs/step",
    "graphs_per_step": "graphs/step",
    "host_ms": "host ms",
    "gpu_ms": "GPU ms",
    "gpu_busy": "busy",
    "kernels": "kernels",
    "seeds": "seeds",
}


def show(results: list[Result], machine: str) -> None:
    table = Table(title=f"The whole loop ({machine})")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for result in results:
        shares = " ".join(f"{name} {share:.0%}" for name, share in result.shares.items())
        row = asdict(result) | {"shares": shares}
        table.add_row(*[str(row[name]) for name in COLUMNS])
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=WORKS, default="digits")
    parser.add_argument("--members", type=positive, nargs="+", default=[16])
    parser.add_argument("--steps", type=int, default=10, help="decision steps in an episode")
    parser.add_argument("--rounds", type=positive, default=3, help="timed episodes")
    parser.add_argument(
        "--warm", type=positive, default=12, help="episodes before them, until buckets have settled"
    )
    parser.add_argument(
        "--chunk", type=positive, help="members that go through the network together; by default all"
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--profile", action="store_true", help="also measure how busy the GPU is")
    parser.add_argument(
        "--gaps", action="store_true", help="also print how long the GPU waits between kernels"
    )
    parser.add_argument("--json", action="store_true", help="one object per line instead of a table")
    args = parser.parse_args()
    results: list[Result] = []
    machine = machine_name(args.device)
    for num_members in args.members:
        results.append(measure(args, num_members))
        if args.json:
            print(line_of(results[-1], machine), flush=True)
    if not args.json:
        show(results, machine)


if __name__ == "__main__":
    main()
