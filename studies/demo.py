"""See in two minutes what growing does: a small GPT trained plainly, with half of its layers, and grown into.

    python -m studies.demo --out runs/demo

All of them predict the next character of the Python standard library's sources, with the same data in the
same order, at equal compute. Each is trained in a process of its own with one thread, and kept in a file as
soon as it is done: after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.config import load_config
from esper.growing.blocks import count_flops
from esper.growing.estimate import TOKENS as LAW
from esper.growing.progressive import Progressive
from esper.runs.console import duration, interval
from esper.runs.files import file_in, read_json, write_atomically
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, ControllerResult, CurvePoint, from_json, paired_differences, to_json
from esper.simic.costs import TRAINING_PASSES
from esper.tasks import Split, load_task
from esper.utils.errors import UserError
from esper.utils.settings import dump
from esper.utils.statistics import mean_interval, paired_interval
from esper.watch.report import write_report
from studies import command_line

LAYERS, WIDTH, HEADS, BATCH = 4, 24, 2, 16
TOKENS = 10.0  # for each parameter of a block, of plain training: few, so that it takes a minute
# The best of 0.006, 0.012 and 0.024 for each of the first three arms, by validation loss, with other seeds.
RATE = 0.012
LESS = 0.8  # of the compute, for the arm that shows what growth saves
FIRST_SEED = 100  # nothing above was chosen with these
POINTS = 12  # of a curve
WORKERS = 2  # processes; more of them gain nothing on two cores
NETWORKS = 4  # in each way


@dataclass(frozen=True)
class DemoArm:
    """One way to train the network."""

    name: str
    layers: int
    grows: bool
    compute: float  # relative to plain training


ARMS = (
    DemoArm("plain", LAYERS, False, 1.0),
    DemoArm("half of the layers", LAYERS // 2, False, 1.0),
    DemoArm("grown", LAYERS, True, 1.0),
    DemoArm(f"grown, {1 - LESS:.0%} less compute", LAYERS, True, LESS),
)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and added to what comes in.  # [B, T, D]"""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for layer in (self.qkv, self.out, self.up, self.down):
            # What all blocks add together stays near 1, as in GPT-2.
            scale = (2 * layers) ** -0.5 if layer in (self.out, self.down) else 1.0
            nn.init.normal_(layer.weight, std=0.1 * scale)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A language model of so many blocks.  # [B, T] int64 → [B, T, vocabulary]"""

    def __init__(self, layers: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(Block(layers) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        for part in (self.tokens, self.positions, self.head):
            nn.init.normal_(part.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight)))


def train(arm: DemoArm, seed: int, tokens: float, path: Path) -> None:
    """Train a network for the FLOPs of its arm, and write what it reached to a file.

    tokens: for each parameter of a block, of plain training.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = load_task("text")
    sizes = (task.num_classes, *task.input_shape)
    example = (task.train.inputs[:BATCH],)
    whole, model = GPT(LAYERS, *sizes), GPT(arm.layers, *sizes)
    batches = tokens * sum(p.numel() for p in whole.blocks.parameters()) / example[0].numel()
    budget = arm.compute * batches * count_flops(whole, example)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    per_step = count_flops(model, example)
    grower, steps = None, round(budget / per_step)
    if arm.grows:  # what half of the blocks save at first is spent on more steps
        when: dict[str, Any] = {"grow_at": LAW.grow_at(tokens), "example": example}
        trial = Progressive(whole, torch.optim.SGD(whole.parameters()), 10_000, **when)
        steps = round(budget / per_step / (1 - trial.saved))
        grower = Progressive(model, optimizer, steps, **when)
    parameters, warm = sum(p.numel() for p in model.parameters()), max(steps // 20, 1)
    glance = task.validation.subset(torch.arange(256))
    order = torch.Generator().manual_seed(seed)
    flops, seconds, curve = 0.0, 0.0, list[CurvePoint]()
    for step in range(steps):
        begun = time.process_time()
        for group in optimizer.param_groups:  # a linear rise, then a linear fall to 0
            group["lr"] = RATE * min((step + 1) / warm, (steps - step) / (steps - warm + 1))
        batch = task.train.subset(torch.randint(len(task.train), (BATCH,), generator=order))
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        flops += TRAINING_PASSES * per_step * (grower.share if grower else 1.0)
        if grower:
            grower.step()
        seconds += time.process_time() - begun
        if (step + 1) * POINTS // steps > step * POINTS // steps:
            loss, accuracy = evaluate(model, glance)
            curve.append(CurvePoint(flops, accuracy, parameters, loss, seconds))
    loss, accuracy = evaluate(model, task.held_out.read())
    measured = ([accuracy], [parameters], [steps], [flops])
    result = ControllerResult(arm.name, [seed], *measured, curve=curve, test_loss=[loss], seconds=[seconds])
    write_atomically(path, to_json(result).encode())


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return the mean loss of a character, and the share of characters that are predicted."""
    logits, targets = model(split.inputs).flatten(0, 1), split.targets.flatten()
    return F.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()


@contextmanager
def train_networks(folder: Path, networks: int) -> Iterator[list[Future[None]]]:
    """Train the networks that a run folder lacks in other processes; they end with the context.

    Yields what is being trained, to be waited for inside. Raises `UserError` where a process was lost.
    """
    (folder / "networks").mkdir(exist_ok=True)
    seeds = range(FIRST_SEED, FIRST_SEED + networks)
    jobs = [(arm, seed, TOKENS, folder / file_of(arm, seed)) for seed in seeds for arm in ARMS]
    missing = [job for job in jobs if not job[-1].exists()]
    workers = max(min(WORKERS, os.cpu_count() or 1, len(missing)), 1)
    # A fork of a process that has run torch may hang; fresh processes do not.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    # Ctrl-C is sent to all processes. New ones ignore it from their first moment on: this one ends them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainings = [pool.submit(train, *job) for job in missing]
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield trainings
    except BrokenProcessPool:
        raise UserError(
            "a process that trained networks ended, perhaps for lack of memory; "
            f"go on with: python -m studies.demo --out {folder}"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def file_of(arm: DemoArm, seed: int) -> str:
    """Return the name of the file, in a run folder, that holds what one network reached."""
    return f"networks/{ARMS.index(arm)}-{seed}.json"


def compare_networks(folder: Path, networks: int) -> Comparison:
    """Return the networks of a run folder side by side, with the verdict."""
    arms = []
    for arm in ARMS:
        seeds = range(FIRST_SEED, FIRST_SEED + networks)
        paths = [file_in(folder, file_of(arm, seed)) for seed in seeds]
        each = [from_json(ControllerResult, read_json(path), str(path)) for path in paths]
        columns = {
            f.name: [value for one in each for value in getattr(one, f.name)] for f in fields(each[0])[1:]
        }
        # A curve has the same steps for all networks of an arm.
        points = zip(*(map(astuple, one.curve) for one in each), strict=True)
        columns["curve"] = [CurvePoint(*np.mean(list(point), axis=0).tolist()) for point in points]
        arms.append(ControllerResult(arm.name, **columns))
    host = f"a GPT of {LAYERS} layers, width {WIDTH}"
    return Comparison("text", host, arms, paired_differences(arms), [], verdicts(arms))


def verdicts(arms: Sequence[ControllerResult]) -> list[str]:
    """Say in sentences what the losses of the arms, in the order of ARMS, show."""
    plain, half, grown, less = arms

    def compare_losses(one: ControllerResult, other: ControllerResult) -> tuple[float, float, str]:
        mean, ci = paired_interval(one.test_loss, other.test_loss)
        losses = " against ".join(f"{mean_interval(arm.test_loss)[0]:.3f}" for arm in (one, other))
        return mean, ci, f"{losses}, difference {interval(mean, ci, '+.3f')}"

    saving, saving_ci, saving_text = compare_losses(less, plain)
    gain, gain_ci, gain_text = compare_losses(grown, plain)
    if saving + saving_ci < 0:
        share = 1 - mean_interval(less.flops)[0] / mean_interval(plain.flops)[0]
        first = (
            f"Same network, {share:.0%} less compute: grown into, it has the lower test loss ({saving_text})."
        )
    elif gain + gain_ci < 0:
        first = f"Same network, same compute, lower loss: grown into against trained plainly, {gain_text}."
    elif gain - gain_ci > 0:
        first = f"Growing was worse than plain training of the same network here: test loss {gain_text}."
    else:
        first = (
            f"No difference: the grown network and the plainly trained one have test losses of {gain_text}."
        )
    second = (
        f"At equal compute, grown against plain: test loss {gain_text}, {len(plain.members)} networks each."
    )
    size, size_ci, size_text = compare_losses(half, grown)
    word = "is not clearly apart from" if abs(size) <= size_ci else "is behind" if size > 0 else "is ahead of"
    third = f"Half of the layers from the start {word} the grown network at equal compute: {size_text}."
    if size + size_ci < 0:
        first += " With so little compute half of its layers is better still."
        third += " With more compute all layers are ahead (docs/handbook.md)."
    return [first, second, third]


def open_folder(path: Path, networks: int) -> RunFolder:
    """Begin a run folder, or go on with that of a demo; raises a UserError for any other folder."""
    if not (path / "config.yaml").exists():
        config = load_config(overrides=["task=text"])
        return RunFolder.create(
            path, kind="demo", request={"networks": networks}, config=dump(config), seed=FIRST_SEED
        )
    folder = RunFolder.read(path)
    begun = folder.request.get("networks")
    if folder.kind != "demo" or begun != networks:
        held = f"a demo of {begun} networks" if folder.kind == "demo" else f"a run of 'esper {folder.kind}'"
        raise UserError(f"{path} holds {held}; choose another folder for --out")
    return RunFolder.open(path)


def main(arguments: Sequence[str] | None = None) -> Comparison:
    """Train the networks, write a report, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the folder of the run")
    parser.add_argument(
        "--networks", type=command_line.positive, default=NETWORKS, help="in each way, two or more"
    )
    given = parser.parse_args(arguments)
    if given.networks < 2:
        parser.error("--networks is 1; give at least 2, so that differences have an interval")
    folder = open_folder(given.out, given.networks)
    print(
        "A small language model, trained to predict the next character of Python's own sources: plainly,\n"
        "with half of its layers, and grown into (half of the layers first, the others later as copies)."
    )
    total, begun = given.networks * len(ARMS), time.monotonic()
    with folder:
        with train_networks(given.out, given.networks) as trainings:
            for count, training in enumerate(as_completed(trainings), 1):
                training.result()
                left = (time.monotonic() - begun) / count * (len(trainings) - count)
                done = total - len(trainings) + count
                print(f"   {done} of {total} networks are trained, about {duration(left)} left", flush=True)
        comparison = compare_networks(given.out, given.networks)
        folder.write(comparison)
        page = write_report(folder)
    print("\nWhat came out:")
    for sentence in comparison.verdicts:
        print(f"- {sentence}")
    print(f"\nFigures and curves: open {page} in a browser.")
    return comparison


if __name__ == "__main__":
    command_line.run(main)
