"""When does it pay to grow into a GPT? Fixed and grown networks at equal training FLOPs.

    python -m studies.growth_grid --device cuda --out FILE    every arm; several such processes share them
    python -m studies.growth_grid --read FILE                 the table

Bytes of the sources of the standard library and of torch. A grown arm trains a part of the layers first; the
rest begin as copies. All arms have the same FLOPs, batches, and learning-rate schedule by compute: warm-up
over 2 %, flat, linear decay over the last 40 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.textbook import GPT, batches, decay_groups, forward_flops
from esper.growing.progressive import Progressive
from esper.tasks.task import Split
from esper.utils.statistics import paired_interval
from studies import command_line, gpt

WARMUP, DECAY = 0.02, 0.4  # of the compute
BATCH, CONTEXT, HEADS = 128, 256, 4
VALIDATION = 2048  # windows


@dataclass(frozen=True)
class Arm:
    """One network and how it trains."""

    budget: float  # FLOPs
    depth: int = 8
    width: int = 256
    start: int = 0  # active layers at first; 0: all
    grow_at: tuple[float, ...] = ()  # fractions of the compute
    order: str = "interleaved"
    rate: float = 3e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Name the arm without budget, rate and seed."""
        if not self.start:
            return f"fixed {self.depth}x{self.width}"
        times = "+".join(f"{at:g}" for at in self.grow_at)
        return f"{self.start}→{self.depth}x{self.width} at {times} {self.order}"


def plan(arm: Arm) -> tuple[list[int], list[float]]:
    """Return the steps of each phase and the FLOPs of one step in it."""
    sample = torch.zeros(1, CONTEXT, dtype=torch.long)
    hops = len(arm.grow_at)
    start = arm.start or arm.depth
    depths = [round(start * (arm.depth / start) ** (hop / max(hops, 1))) for hop in range(hops + 1)]
    costs = [3.0 * BATCH * forward_flops(GPT(256, CONTEXT, arm.width, d, HEADS), sample) for d in depths]
    edges = [0.0, *arm.grow_at, 1.0]
    shares = [b - a for a, b in pairwise(edges)]
    return [round(arm.budget * share / cost) for share, cost in zip(shares, costs, strict=True)], costs


def rate_share(progress: float) -> float:
    """Return the learning rate at a fraction of the compute, relative to its peak."""
    return min(progress / WARMUP, 1.0, (1.0 - progress) / DECAY)


def train(arm: Arm, task: Any, device: str, test: bool = False) -> dict[str, Any]:
    """Train an arm; return its validation loss, the curve and the seconds, and its test loss if asked for."""
    torch.manual_seed(arm.seed)
    model = GPT(256, CONTEXT, arm.width, arm.depth, HEADS).to(device)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=arm.rate, betas=(0.9, 0.99), fused=True)
    steps, costs = plan(arm)
    total, grower = sum(steps), None
    if arm.start:
        at = [sum(steps[: hop + 1]) / total for hop in range(len(arm.grow_at))]
        example = (torch.zeros(1, CONTEXT, dtype=torch.long, device=device),)
        grower = Progressive(
            model, optimizer, total, start=arm.start / arm.depth, grow_at=at, order=arm.order, example=example
        )
    torch._dynamo.reset()  # the limit of graphs counts those of earlier arms too
    forward = torch.compile(lambda tokens: model(tokens)) if device != "cpu" else model
    take = batches(task.train.to(device), BATCH, True, arm.seed)
    validation = task.validation.subset(torch.arange(min(VALIDATION, len(task.validation)))).to(device)
    spent, curve, began = 0.0, [], time.perf_counter()
    per_step = [cost for cost, count in zip(costs, steps, strict=True) for _ in range(count)]
    every = max(1, total // 20)
    for step, cost in enumerate(per_step):
        for group in optimizer.param_groups:
            group["lr"] = arm.rate * rate_share(spent / arm.budget)
        inputs, targets = take()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = forward(inputs)
        F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent += cost
        if grower is not None:
            grower.step()
        if (step + 1) % every == 0 or step + 1 == total:
            curve.append((spent, time.perf_counter() - began, measure(forward, validation, device)))
    return {
        **asdict(arm),
        "name": arm.name,
        "validation": curve[-1][2],
        "test": measure(forward, task.test().to(device), device) if test else None,
        "steps": steps,
        "flops": spent,
        "seconds": time.perf_counter() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve,
    }


@torch.no_grad()
def measure(forward: Any, split: Split, device: str) -> float:
    """Return the loss on a split, in nats for each byte."""
    total = torch.zeros((), device=device)
    for start in range(0, len(split), BATCH):
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = forward(split.inputs[start : start + BATCH])
        targets = split.targets[start : start + BATCH].flatten()
        total += F.cross_entropy(logits.float().flatten(0, -2), targets, reduction="sum")
    return float(total) / split.targets.numel()


def pilot() -> list[Arm]:
    """List one seed of everything at 1 PFLOP, and the better half of it at 4."""
    arms = []
    for budget in (1e15, 4e15):
        arms += [Arm(budget), Arm(budget, depth=4)]
        arms += [Arm(budget, start=4, grow_at=(at,)) for at in (0.1, 0.3, 0.5, 0.8)]
        arms += [Arm(budget, start=4, grow_at=(0.5,), order="stacked")]
        arms += [Arm(budget, start=2, grow_at=(0.15, 0.4)), Arm(budget, start=1, grow_at=(0.3,))]
    one = 1e15
    arms += [Arm(one, depth=2), Arm(one, rate=1.5e-3), Arm(one, rate=6e-3), Arm(one, depth=4, rate=6e-3)]
    arms += [Arm(one, start=4, grow_at=(0.5,), rate=rate) for rate in (1.5e-3, 6e-3)]
    arms += [Arm(one, start=1, grow_at=(0.8,)), Arm(4e15, rate=1.5e-3)]
    return arms


def finals() -> list[Arm]:
    """List five seeds of the best growth at 4 PFLOP, of its final network and of the half-size one."""
    return [
        replace(arm, seed=seed)
        for seed in range(1, 6)
        for arm in (Arm(4e15, start=4, grow_at=(0.3,)), Arm(4e15), Arm(4e15, depth=4))
    ]


ARMS = {"pilot": pilot, "finals": finals}


def table(path: Path) -> str:
    """Return the mean validation loss of every arm by budget, then the test losses of the finals."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[tuple[float, str, float], list[float]] = defaultdict(list)
    tested: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)  # by seed: loss, seconds
    for run in runs:
        found[run["budget"], run["name"], run["rate"]].append(run["validation"])
        if run.get("test") is not None:
            tested[run["name"]][run["seed"]] = run["test"], run["seconds"]
    lines = ["validation loss"] + [
        f"{gpt.peta(budget):>5}  {name:40} rate {rate:g}  {np.mean(losses):.4f}  n={len(losses)}"
        for (budget, name, rate), losses in sorted(found.items(), key=lambda x: (x[0][0], np.mean(x[1])))
    ]
    grown = next((name for name in tested if "→" in name), None)
    lines += ["", "test loss of the finals, seconds, and the grown network minus each, paired by seed"]
    for name, by_seed in tested.items():
        losses, seconds = zip(*by_seed.values(), strict=True)
        line = f"{name:47} {np.mean(losses):.4f}  n={len(losses)}  {np.mean(seconds):.1f} s"
        if grown is not None and name != grown:
            both = sorted(by_seed.keys() & tested[grown].keys())
            pair = ([tested[arm][seed][0] for seed in both] for arm in (grown, name))
            line += "  {:+.4f} ± {:.4f}".format(*paired_interval(*pair))
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the arms that nobody has taken yet, and append a line for each to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arms", choices=ARMS, default="pilot")
    parser.add_argument("--read", type=Path)
    given = parser.parse_args(arguments)
    if given.read:
        print(table(given.read))
        return
    task = gpt.make_task(gpt.FULL)
    torch.set_float32_matmul_precision("high")
    for number, arm in enumerate(ARMS[given.arms]()):
        try:  # several processes share the list: who makes the file first trains the arm
            Path(f"{given.out}.{number}.taken").open("x").close()
        except FileExistsError:
            continue
        result = train(arm, task, given.device, given.arms == "finals")
        with given.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{gpt.peta(arm.budget)} {arm.name}: {result['validation']:.4f}, {result['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    command_line.run(main)
