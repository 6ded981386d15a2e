"""Which kernels the minibatches of a task spend their time in.

    python -m benchmarks.kernel_times --task text --members 384
    python -m benchmarks.kernel_times --task digits --members 12 --device cpu

A third of the members is left alone, a third grows now and then, a third at random, for four steps of four
minibatches. The same episode is timed without the profiler first.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.population import machine_name, synchronise
from esper.lifecycle.config import LifecycleConfig
from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import play
from esper.simic.steps import EnvironmentSpec
from esper.tamiyo.blocks import Blocks
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Periodic, RandomLegal, Static
from esper.tasks import load_task, task_names
from studies.command_line import existing_device, positive

STEPS, BATCHES = 4, 4
GERMINATION_RATE = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=task_names(), default="text")
    parser.add_argument("--members", type=positive, default=384)
    parser.add_argument("--lines", type=positive, default=25, help="of the table")
    parser.add_argument("--device", type=existing_device, default="auto")
    args = parser.parse_args()
    device = torch.device(args.device)
    thirds: dict[str, Controller] = {
        "left alone": Static(),
        "periodic": Periodic(),
        "random": RandomLegal(GERMINATION_RATE),
    }
    blocks = Blocks(thirds)
    spec = EnvironmentSpec(
        task=load_task(args.task),
        members=blocks.members(torch.arange(-(-args.members // len(thirds)))),
        gamma=1.0,
        device=args.device,
        episode=EpisodeConfig(steps=STEPS, clock="steps"),
        lifecycle=LifecycleConfig(),
        population=PopulationConfig(batches_per_epoch=BATCHES),
    )
    world = GrowthEnvironment(spec)
    play(world, blocks, 0)
    synchronise(device)
    begun = time.perf_counter()
    play(world, blocks, 1)
    synchronise(device)
    seconds = time.perf_counter() - begun
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as measured:
        play(world, blocks, 2)
        synchronise(device)
    print(
        f"{args.task} on {machine_name(args.device)}: {seconds:.2f} s for {STEPS * BATCHES} minibatches of "
        f"{len(spec.members)} members"
    )
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(measured.key_averages().table(sort_by=order, row_limit=args.lines, max_name_column_width=80))


if __name__ == "__main__":
    main()
