"""Does growing into GPT-2 pay in the transformers Trainer? Plain and grown, at equal FLOPs and equal steps.

    python -m studies.growth_trainer --device cuda --out FILE                       every arm at every rate
    python -m studies.growth_trainer --device cuda --out FILE --arms finals --test  five seeds
    python -m studies.growth_trainer --read FILE                                    the tables
    python -m studies.growth_trainer --quick --out FILE                             a minute on a CPU

Several processes with the same --out share the runs. Begin the finals when the pilot is over: they take for
each arm the rate with the least validation loss among its runs of seed 0 in --out, or the first of --rates
where there are none.

The model is GPT2LMHeadModel with bytes as its vocabulary; the data are the sources of the standard library
and of torch. A grown arm adds `callbacks=[esper.TransformersProgressive(...)]` to plain training. Arms have
the FLOPs of --budget; the one of equal steps has the optimizer steps, and so the epochs, of plain training.
All have the same batches, and the same learning-rate schedule by compute: warm-up, flat, linear decay over
the last 40 %. The seconds are those of `trainer.train()`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import esper
from benchmarks.textbook import forward_flops
from esper.tasks.task import Split, Task
from esper.utils.errors import UserError
from esper.utils.statistics import paired_interval
from studies import command_line, gpt
from studies.growth_grid import EQUAL_STEPS_AT

DECAY = 0.4  # of the compute
VALIDATION = 2048  # windows
IGNORED = -100  # a label that has no loss


@dataclass(frozen=True)
class Arm:
    """One network and how it trains."""

    budget: float = 4e15  # FLOPs; with `equal_steps`, of the plain run that has as many steps
    depth: int = 8
    width: int = 384
    batch: int = 128
    start: int = 0  # active layers at first; 0: all
    grow_at: float = 0.3  # of the compute; with `equal_steps`, of the steps
    equal_steps: bool = False
    rate: float = 1e-3
    seed: int = 0
    warmup: float = 0.02  # of the compute

    @property
    def name(self) -> str:
        """Name the arm without budget, rate and seed."""
        warmup = "" if self.warmup == Arm.warmup else f", warm-up {self.warmup:g}"
        if not self.start:
            return f"plain {self.depth}x{self.width}{warmup}"
        steps = ", equal steps" if self.equal_steps else ""
        return f"{self.start}→{self.depth}x{self.width} at {self.grow_at:g}{steps}{warmup}"


class Windows(Dataset[Any]):
    """Windows of bytes on a device; a batch is one indexing operation.

    The model shifts labels itself, so a window of n bytes has n - 1 targets. The first label has none, and is
    ignored: versions of the Trainer differ in whether they count it where they average.
    """

    def __init__(self, split: Split, device: str) -> None:
        self.bytes = split.inputs.to(torch.uint8).to(device)  # [windows, context]

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return a batch; the DataLoader prefers this to item by item."""
        rows = torch.tensor(indices).to(
            self.bytes.device, non_blocking=True
        )  # a blocking copy waits for the GPU
        tokens = self.bytes[rows].long()
        labels = tokens.clone()
        labels[:, 0] = IGNORED
        return {"input_ids": tokens, "labels": labels}


def keep(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collate nothing: `Windows` returns whole batches."""
    return batch


def make_model(depth: int, width: int, context: int) -> nn.Module:
    """Make a GPT-2 of bytes without dropout, with heads of 64 channels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=context, n_embd=width, n_layer=depth, n_head=max(1, width // 64),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


@cache
def step_flops(depth: int, width: int, context: int, batch: int) -> float:
    """Count an optimizer step: the forward pass, and twice as much for the backward pass."""
    sample = torch.zeros(1, context, dtype=torch.long)
    return 3.0 * batch * forward_flops(make_model(depth, width, context), sample)


def plan(arm: Arm, context: int) -> tuple[list[int], list[float]]:
    """Return the steps of each phase and the FLOPs of one step in it."""
    depths, shares = (
        ([arm.start, arm.depth], [arm.grow_at, 1 - arm.grow_at]) if arm.start else ([arm.depth], [1])
    )
    costs = [step_flops(depth, arm.width, context, arm.batch) for depth in depths]
    steps = [round(arm.budget * share / cost) for share, cost in zip(shares, costs, strict=True)]
    if arm.equal_steps:
        total = round(arm.budget / costs[-1])
        first = round(total * arm.grow_at)
        steps = [first, total - first]
    return steps, costs


def rate_shares(steps: Sequence[int], costs: Sequence[float], warmup: float) -> list[float]:
    """Return the learning rate of every step relative to its peak, by the compute spent before it."""
    spent = np.cumsum([0.0, *np.repeat(costs, steps)])
    return [float(min(p / warmup, 1.0, (1.0 - p) / DECAY)) for p in spent / spent[-1]]


def train(
    arm: Arm, task: Task, device: str = "cpu", test: bool = False, compiled: bool = False
) -> dict[str, Any]:
    """Train an arm by a Trainer; return its losses, what it spent, and the seconds of training alone."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    context = task.train.inputs.shape[1]
    steps, costs = plan(arm, context)
    total, shares = sum(steps), rate_shares(steps, costs, arm.warmup)
    torch.manual_seed(arm.seed)
    model = make_model(arm.depth, arm.width, context)
    grower = None
    if arm.start:
        times = {"start": arm.start / arm.depth, "grow_at": steps[0] / total}
        grower = esper.TransformersProgressive(order="interleaved", **times)  # that of the committed results
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=total, per_device_train_batch_size=arm.batch,
            per_device_eval_batch_size=arm.batch, learning_rate=arm.rate, optim="adamw_torch_fused",
            adam_beta2=0.99, weight_decay=0.1, max_grad_norm=1.0, bf16=device != "cpu",
            use_cpu=device == "cpu", torch_compile=compiled, seed=arm.seed,
            data_seed=1000 * arm.seed,  # an epoch adds 1 to it
            dataloader_drop_last=True, dataloader_pin_memory=False, remove_unused_columns=False,
            # The filter reads the loss of each step, and so waits for the device.
            logging_nan_inf_filter=False, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, prediction_loss_only=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, data_collator=keep, train_dataset=Windows(task.train, device),
            callbacks=[grower] if grower else [],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.create_optimizer(), lambda step: shares[step]
        )
        torch._dynamo.reset()  # the limit of graphs counts those of earlier arms too
        began = _now(device)
        trainer.train()
        seconds = _now(device) - began
        assert trainer.state.global_step == total
        assert grower is None or (grower.grower and grower.grower.whole)

        def measure(split: Split) -> float:
            return float(trainer.evaluate(Windows(split, device))["eval_loss"])

        validation = task.validation.subset(torch.arange(min(VALIDATION, len(task.validation))))
        return {
            **asdict(arm),
            "name": arm.name,
            "validation": measure(validation),
            "test": measure(task.test()) if test else None,
            "steps": steps,
            "flops": float(np.dot(steps, costs)),
            "seconds": seconds,
            "parameters": sum(p.numel() for p in model.parameters()),
            "compiled": compiled,
        }


def _now(device: str) -> float:
    """Return the time at which the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def kinds(base: Arm) -> list[Arm]:
    """List what is compared: growth, growth for the steps of plain training, plain and half-size networks."""
    half = base.depth // 2
    grown = replace(base, start=half)
    fewer = replace(grown, grow_at=EQUAL_STEPS_AT, equal_steps=True)
    return [grown, fewer, base, replace(base, depth=half)]


def pilot(base: Arm, rates: Sequence[float], out: Path) -> list[Arm]:
    """List one seed of everything at each rate."""
    return [replace(arm, rate=rate) for rate, arm in product(rates, kinds(base))]


def finals(base: Arm, rates: Sequence[float], out: Path) -> list[Arm]:
    """List five seeds of everything at the rate that was best in the pilot, or the first one."""
    runs = [run for run in read(out) if run["seed"] == 0 and run["budget"] == base.budget]
    best = {run["name"]: run["rate"] for run in sorted(runs, key=lambda run: -run["validation"])}
    return [
        replace(arm, seed=seed, rate=best.get(arm.name, rates[0]))
        for seed, arm in product(range(1, 6), kinds(base))
    ]


ARMS = {"pilot": pilot, "finals": finals}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the mean losses of every arm by budget and rate, then differences paired by seed.

    Only seeds from 1 are paired, those of the finals: by the test loss, or by the validation loss where a run
    was not tested.
    """
    found: dict[tuple[float, str, float], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        found[run["budget"], run["name"], run["rate"]].append(run)
    lines = []
    order = sorted(found, key=lambda key: (key[0], np.mean([run["validation"] for run in found[key]])))
    for budget, name, rate in order:
        same = found[budget, name, rate]
        mean = {key: np.mean([run[key] for run in same]) for key in ("validation", "flops", "seconds")}
        tested = [run["test"] for run in same if run["test"] is not None]
        lines.append(
            f"{gpt.peta(budget):>5}  {name:32} rate {rate:<7g} validation {mean['validation']:.4f}  "
            f"{f'test {np.mean(tested):.4f}  ' if tested else ''}{sum(same[0]['steps'])} steps  "
            f"{gpt.peta(mean['flops'])}  {mean['seconds']:.1f} s  n={len(same)}"
        )
    by_seed: dict[tuple[tuple[float, float], str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        if run["seed"]:
            schedule = run["budget"], run.get("warmup", Arm.warmup)
            by_seed[schedule, run["name"]][run["seed"]] = run
    loss = "test" if all(run["test"] is not None for run in runs if run["seed"]) else "validation"
    lines += ["", f"differences in {loss} loss and in seconds, paired by seed, with 95 % intervals"]
    for (schedule, grown), (other_schedule, other) in product(by_seed, by_seed):
        if schedule != other_schedule or "→" not in grown or "→" in other:
            continue
        ours, theirs = by_seed[schedule, grown], by_seed[schedule, other]
        both = sorted(ours.keys() & theirs.keys())
        change = "{:+.4f} ± {:.4f}".format(*paired_difference(ours, theirs, both, loss))
        clock = "{:+.1f} ± {:.1f} s".format(*paired_difference(ours, theirs, both, "seconds"))
        lines.append(f"{gpt.peta(schedule[0]):>5}  {grown} minus {other}: {change}, {clock}, n={len(both)}")
    return "\n".join(lines)


def paired_difference(
    ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], seeds: Sequence[int], key: str
) -> tuple[float, float]:
    """Return the mean difference of one entry over seeds, and the half-width of its 95 % interval."""
    return paired_interval([ours[seed][key] for seed in seeds], [theirs[seed][key] for seed in seeds])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the arms that nobody has taken yet, and append a line for each to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/growth_trainer.jsonl"))
    parser.add_argument("--arms", choices=ARMS, default="pilot")
    parser.add_argument("--budget", type=float, default=4e15, help="training FLOPs of a run")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3], help="peaks of the rate")
    parser.add_argument("--layers", type=command_line.positive, default=8)
    parser.add_argument("--width", type=command_line.positive, default=384)
    parser.add_argument("--grow-at", type=float, default=0.3, help="fraction of the compute")
    parser.add_argument("--warmup", type=float, default=0.1, help="fraction of the compute")
    parser.add_argument("--test", action="store_true", help="read the test split at the end of each run")
    parser.add_argument("--compile", action="store_true", help="torch_compile of the Trainer")
    parser.add_argument("--quick", action="store_true", help="a tiny model that shows that this runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no arm after these")
    parser.add_argument("--read", type=Path)
    given = parser.parse_args(arguments)
    if given.read:
        print(table(read(given.read)))
        return
    if given.device != "cpu" and torch.cuda.device_count() > 1:
        raise UserError("the Trainer would use all GPUs at once; set CUDA_VISIBLE_DEVICES to one of them")
    base = Arm(given.budget, given.layers, given.width, grow_at=given.grow_at, warmup=given.warmup)
    if given.quick:
        base = replace(base, budget=2e9, depth=4, width=16, batch=32)
    task = gpt.make_task(gpt.QUICK if given.quick else gpt.FULL)
    torch.set_float32_matmul_precision("high")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    ready = given.device == "cpu"
    began = time.perf_counter()
    for arm in ARMS[given.arms](base, given.rates, given.out):
        if time.perf_counter() - began > 60 * given.minutes:
            break
        key = f"{arm.budget:g}-{arm.name}-{arm.rate:g}-{arm.seed}".replace(" ", "_")
        try:  # several processes share the list: who makes the file first trains the arm
            Path(f"{given.out}.{key}.taken").open("x").close()
        except FileExistsError:
            continue
        if not ready:  # the first steps of a process load kernels
            cost = step_flops(arm.depth, arm.width, task.train.inputs.shape[1], arm.batch)
            train(replace(arm, start=0, equal_steps=False, budget=10 * cost), task, given.device)
            ready = True
        result = train(arm, task, given.device, given.test, given.compile)
        with given.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{gpt.peta(arm.budget)} {arm.name}, rate {arm.rate:g}, seed {arm.seed}: "
            f"{result['validation']:.4f}, {result['seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    command_line.run(main)
