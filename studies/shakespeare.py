"""What does it take to reach nanoGPT's loss on tinyshakespeare, trained plainly and grown into?

    python -m studies.shakespeare --data input.txt --device cuda --out FILE      lengths, then seeds
    python -m studies.shakespeare --read FILE [--alone FILE]                     the table

nanoGPT publishes a validation loss of 1.4697 for its network of 6 layers, width 384, with dropout of 0.2,
after 5,000 steps of 64 windows of 256 characters. Here every arm trains that network with that optimizer,
and is measured on the whole validation split (the last tenth of the text) after every 50 steps; it ends as
soon as it has the loss. FLOPs and seconds until then count, without compilation and validation.

The schedule ends in a decay, so that its length decides how soon the loss is reached. Each arm takes the
length with the fewest FLOPs, from the same list, in one run each; then it trains for five other seeds.
--alone: grown runs that had the GPU for themselves give the seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.textbook import GPT, batches, decay_groups, forward_flops
from esper.growing.progressive import Progressive
from esper.tasks.task import Split
from esper.utils.statistics import paired_interval
from studies import command_line
from studies.growth_grid import TrainingStep, measure

TARGET = 1.4697  # nats a character, github.com/karpathy/nanoGPT
EVERY = 50  # steps between two measurements
LENGTHS = (1500, 2000, 3000, 5000)
SEEDS = range(1, 6)


@dataclass(frozen=True)
class Arm:
    """How the network trains; a schedule has this many steps, and ends early once the loss is reached."""

    steps: int
    grow_at: float = 0.0  # fraction of the steps after which half of the layers become all; 0: plain
    rate: float = 1e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Name the arm without its seed."""
        kind = f"grown at {self.grow_at:g}" if self.grow_at else "plain"
        return f"{kind}, {self.steps} steps, rate {self.rate:g}"


@dataclass(frozen=True)
class Size:
    """The network and its batches."""

    width: int = 384
    depth: int = 6
    heads: int = 6
    context: int = 256
    batch: int = 64
    warmup: int = 100  # steps


NANOGPT = Size()


def load_text(path: Path, context: int) -> tuple[Split, Split, int]:
    """Return windows for training (the first nine tenths) and validation, and the number of characters."""
    text = path.read_text(encoding="utf-8")
    characters = {character: k for k, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([characters[character] for character in text])
    cut = len(codes) * 9 // 10

    def split(part: torch.Tensor) -> Split:
        count = (len(part) - 1) // context
        part = part[: count * context + 1]
        return Split(part[:-1].view(count, context), part[1:].view(count, context))

    return split(codes[:cut]), split(codes[cut:]), len(characters)


def rate_share(step: int, steps: int, warmup: int) -> float:
    """Return nanoGPT's learning rate relative to its peak: linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(arm: Arm, data: tuple[Split, Split, int], device: str, size: Size = NANOGPT) -> dict[str, Any]:
    """Train until the loss is reached or the schedule ends; return FLOPs, seconds and the curve."""
    training, validation, vocabulary = data[0].to(device), data[1].to(device), data[2]
    torch.manual_seed(arm.seed)
    model = GPT(vocabulary, size.context, size.width, size.depth, size.heads, dropout=0.2)
    sample = training.inputs[:1].cpu()
    flops = 3.0 * size.batch * forward_flops(model, sample)
    model.to(device).train()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=arm.rate, betas=(0.9, 0.99), fused=True)
    grower = None
    if arm.grow_at:
        options = {"grow_at": arm.grow_at, "example": (sample.to(device),)}
        grower = Progressive(model, optimizer, arm.steps, order="interleaved", **options)  # as committed
        model.train()
    update = TrainingStep(model, [optimizer], device, bfloat16=device != "cpu")
    take = batches(training, size.batch, True, arm.seed)
    curve: list[tuple[float, float, float]] = []
    spent, measuring, began = 0.0, 0.0, time.perf_counter()
    for step in range(arm.steps):
        update(take(), arm.rate * rate_share(step, arm.steps, size.warmup))
        spent += flops * (1.0 if grower is None else grower.share)
        if grower is not None and grower.step():
            update.reset()
        if (step + 1) % EVERY == 0:
            if device != "cpu":
                torch.cuda.synchronize()
            paused = time.perf_counter()
            loss, _ = measure(model, validation, device, device != "cpu")
            curve.append((spent, paused - began - update.compiling - measuring, loss))
            measuring += time.perf_counter() - paused
            # What has half of its layers is not the network that was asked for.
            if loss <= TARGET and (grower is None or grower.whole):
                break
    return {
        **asdict(arm),
        "name": arm.name,
        "reached": curve[-1][2] <= TARGET,
        "steps_taken": step + 1,
        "flops": spent,
        "training_seconds": curve[-1][1],
        "best": min(loss for *_, loss in curve),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
        "curve": curve,
    }


def cheapest(runs: Sequence[dict[str, Any]], grown: bool) -> Arm | None:
    """Return the arm of seed 0 that reached the loss for the fewest FLOPs, None if none did."""
    tried = [r for r in runs if r["seed"] == 0 and r["reached"] and bool(r["grow_at"]) == grown]
    best = min(tried, key=lambda run: run["flops"], default=None)
    return best and Arm(best["steps"], best["grow_at"], best["rate"])


def count_steps(run: dict[str, Any]) -> tuple[int, int]:
    """Return the steps that a run made with half of the layers, and with all of them."""
    half = min(round(run["grow_at"] * run["steps"]), run["steps_taken"])
    return half, run["steps_taken"] - half


def time_steps(runs: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the seconds of a step with half of the layers, and with all, by least squares."""
    counts = np.array([count_steps(run) for run in runs])
    return np.linalg.lstsq(counts, np.array([run["training_seconds"] for run in runs]), rcond=None)[0]


def table(runs: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]] = ()) -> str:
    """Return every arm, then the seeds of the cheapest plain and grown one, paired.

    With runs that were `alone` on their GPU, the seconds of the pairs are those that their steps take there.
    """
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in (*runs, *alone):
        by_name[run["name"]].append(run)
    lines = [f"FLOPs and seconds of training until {TARGET}"]
    for name, group in sorted(by_name.items(), key=lambda item: np.mean([r["flops"] for r in item[1]])):
        reached = sum(run["reached"] for run in group)
        flops, seconds, best = (
            np.mean([run[key] for run in group]) for key in ("flops", "training_seconds", "best")
        )
        lines.append(
            f"{name:36} {flops / 1e15:.3f} PFLOP {seconds:6.1f} s  least loss {best:.4f}  "
            f"reached {reached} of {len(group)}"
        )
    if alone:
        half, whole = time_steps(alone)
        lines.append(f"a step alone: {1e3 * whole:.2f} ms, with half of the layers {1e3 * half:.2f} ms")
        runs = [{**run, "training_seconds": count_steps(run) @ np.array([half, whole])} for run in runs]
    chosen = [cheapest(runs, grown) for grown in (True, False)]
    if all(chosen):
        pairs = [{r["seed"]: r for r in runs if r["name"] == arm.name and r["seed"]} for arm in chosen if arm]
        seeds = sorted(pairs[0].keys() & pairs[1].keys())
        for key, unit in (("flops", "FLOPs"), ("training_seconds", "seconds")) if len(seeds) > 1 else ():
            ratios = [pairs[0][seed][key] / pairs[1][seed][key] - 1 for seed in seeds]
            mean, half = paired_interval(ratios, [0.0] * len(ratios))
            change = f"{100 * mean:+.1f} ± {100 * half:.1f} % {unit}"
            means = " and ".join(f"{np.mean([pair[seed][key] for seed in seeds]):.3g}" for pair in pairs)
            lines.append(f"grown against plain: {change}, {len(seeds)} seeds, means {means}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the lengths of each arm and then its seeds; a line for each goes to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="tinyshakespeare: input.txt of karpathy/char-rnn")
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a JSON line for each run; goes on with it")
    parser.add_argument("--grow-at", type=float, nargs="+", default=[0.2, 0.4], help="fractions of the steps")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after these")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--alone", type=Path, help="with --read: grown runs that had the GPU for themselves")
    given = parser.parse_args(arguments)
    if given.read:
        files = [path.read_text().splitlines() if path else [] for path in (given.read, given.alone)]
        print(table(*([json.loads(line) for line in lines] for lines in files)))
        return
    if given.out is None or given.data is None:
        parser.error("give --data and --out")
    torch.set_float32_matmul_precision("high")
    data = load_text(given.data, Size.context)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    runs = [json.loads(line) for line in lines]
    began = time.perf_counter()

    def run(arms: Sequence[Arm]) -> None:
        for arm in arms:
            done = any(r["name"] == arm.name and r["seed"] == arm.seed for r in runs)
            if done or time.perf_counter() - began > 60 * given.minutes:
                continue
            runs.append(train(arm, data, given.device))
            with given.out.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
            print(f"{arm.name}, seed {arm.seed}: {runs[-1]['best']:.4f}", flush=True)

    run([Arm(n, at, r) for n in LENGTHS for r in given.rates for at in (0.0, *given.grow_at)])
    chosen = [arm for grown in (False, True) if (arm := cheapest(runs, grown))]
    run([replace(arm, seed=seed) for seed in SEEDS for arm in chosen])
    print(table(runs))


if __name__ == "__main__":
    command_line.run(main)
