"""Does a GPT that grows by copies beat fixed depths at equal training FLOPs?

    python -m studies.gpt                       both budgets, three seeds: about twelve minutes on one H200
    python -m studies.gpt --quick --device cpu  minutes on two cores, far too small to say anything
    torchrun --nproc-per-node=5 -m studies.gpt  an arm in each process
    python -m studies.gpt --read                the tables of the committed results

Bytes of the sources of the standard library and of torch, which every machine with torch has. Arms: 2, 4, 6
and 8 layers, and 2 layers that become 4 after 5 % and 8 after 30 % of the budget, each time by copies of
trained layers.

The committed results were made with token embeddings of standard deviation 0.5; the host now has 0.02.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from esper.population.config import PopulationConfig
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.utils.gather import Gather, broadcast
from studies import command_line
from studies.equal_compute import Arm, Result, Setting, choose_rate, picture, read, run_arms, table

RESULTS = Path(__file__).parent / "results"
RATES = (0.5, 1.0, 2.0)  # of the learning rate below, tried for every arm at the smaller budget
SUFFIXES = (".py", ".pyi", ".h")
HELD_OUT = 20  # one file in this many is for validation, and one for the test


@dataclass(frozen=True)
class Size:
    """How large a study is."""

    width: int
    heads: int
    context: int
    batches: tuple[int, ...]  # sequences in a minibatch, for each budget
    budgets: tuple[float, ...]  # FLOPs
    megabytes: int
    depths: tuple[int, ...] = (2, 4, 6, 8)
    members: int = 3
    per_step: int = 20  # minibatches of a decision step


FULL = Size(256, 4, 256, (64, 128), (1.0e15, 4.1e15), 60)
QUICK = Size(16, 2, 16, (4, 4), (5.0e8, 2.0e9), 1, depths=(1, 2), members=2, per_step=5)


def sources(megabytes: int) -> dict[str, np.ndarray]:
    """Bytes of source files in three splits, file by file, by a hash of their names."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    found: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    total = 0
    for root in roots:
        files = (path for path in root.rglob("*") if path.suffix in SUFFIXES)
        for path in sorted(p for p in files if "site-packages" not in p.relative_to(root).parts):
            if total >= megabytes * 1_000_000:
                break
            name = path.relative_to(root).as_posix()
            part = {0: "validation", 1: "test"}.get(crc32(name.encode()) % HELD_OUT, "train")
            text = path.read_bytes()
            found[part].append(text)
            total += len(text)
    return {part: np.frombuffer(b"\n".join(texts), dtype=np.uint8) for part, texts in found.items()}


def make_task(size: Size) -> Task:
    """Predict the next byte."""

    def split(data: np.ndarray) -> Split:
        count = (len(data) - 1) // size.context
        tokens = torch.from_numpy(data[: count * size.context + 1].astype(np.int64))
        return Split(tokens[:-1].view(count, -1), tokens[1:].view(count, -1))

    parts = {name: split(data) for name, data in sources(size.megabytes).items()}
    return Task(
        name="sources",
        topology="transformer",
        input_shape=(size.context,),
        num_classes=256,
        train=parts["train"],
        validation=shuffled(parts["validation"]),
        held_out=TestSplit(shuffled(parts["test"]).subset(torch.arange(min(len(parts["test"]), 2048)))),
        host=HostSpec("gpt"),
    )


def peta(flops: float) -> str:
    """A budget as it is named in files and tables."""
    return f"{flops / 1e15:.3g}P"


def shuffled(split: Split) -> Split:
    """The same samples in a fixed random order, so that the first ones stand for all."""
    return split.subset(torch.from_numpy(np.random.default_rng(0).permutation(len(split))))


def arms(size: Size) -> list[Arm]:
    """Every fixed depth, then growth from the least depth to the greatest."""
    shape = {"width": size.width, "heads": size.heads}
    fixed = [Arm(f"fixed {depth} layers", {**shape, "depth": depth}) for depth in size.depths]
    least, greatest = size.depths[0], size.depths[-1]
    doubled, rest = 2 * least, (greatest - 2 * least) // least
    schedule = f"clone@0.05+clone@0.30x{rest}" if rest else "clone@0.05"
    steps = f"{least}→{doubled}→{greatest}" if rest else f"{least}→{doubled}"
    return [*fixed, Arm(f"grown {steps}, copies", {**shape, "depth": least}, schedule, folds=1 + rest)]


def known_rate(rates: Mapping[str, float], setting: Setting, arm: Arm) -> float:
    """The learning rate's scale of an arm, which is chosen where it is not known."""
    return rates[arm.name] if arm.name in rates else choose_rate(arm, setting, RATES)


def study(
    size: Size, budgets: Sequence[int], device: str, out: Path, gather: Gather, rate: float | None = None
) -> None:
    """All arms at the chosen budgets, smallest first; learning rates are chosen at the first, or given."""
    task = make_task(size)
    print(
        f"{sum(len(s) for s in (task.train, task.validation)) * size.context / 1e6:.1f} MB of text",
        flush=True,
    )
    rates = {arm.name: rate for arm in arms(size)} if rate else {}
    if min(budgets) > 0 and not rate:
        first = out / f"gpt-{peta(size.budgets[0])}.jsonl"
        rates = broadcast(gather, {} if gather.rank else {result.arm: result.rate for result in read(first)})
    for budget in sorted(budgets):
        flops, batch = size.budgets[budget], size.batches[budget]
        config = PopulationConfig(
            batch_size=batch, batches_per_epoch=size.per_step, validation_samples=256, validation_batch=64,
            host_lr=1.5e-3, seed_lr=1.5e-3, weight_decay=0.1, second_beta=0.99, clip_norm=1.0,
            schedule="flat", warmup=0.02, decay=0.4, widest=1, initial_weights=4096,
            precision="bfloat16" if device.startswith("cuda") else "float32",
        )  # fmt: skip
        setting = Setting(task, "gpt", flops, config, device)
        path, rate_of = out / f"gpt-{peta(flops)}.jsonl", partial(known_rate, rates, setting)
        results = run_arms(arms(size), setting, size.members, rate_of, path, gather)
        rates = {result.arm: result.rate for result in results}
        print(table(results), flush=True)


def results_in(folder: Path) -> dict[str, list[Result]]:
    """What is there, by budget."""
    paths = sorted(folder.glob("gpt-*P.jsonl"), key=lambda path: float(path.stem[4:-1]))
    return {path.stem[4:]: read(path) for path in paths}


def draw(path: Path, folder: Path = RESULTS) -> None:
    """The picture of the results in a folder."""
    found = results_in(folder)
    low = min(loss for results in found.values() for result in results for _, loss in result.curve)
    picture({f"{budget}FLOP": results for budget, results in found.items()}, path, low - 0.02, 2 * low)


def main(gather: Gather) -> None:
    """Run the study, or show the committed one again."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small enough for two cores")
    options.add_argument("--read", action="store_true", help="show the results that are there")
    options.add_argument(
        "--rate", type=float, help="the learning rate's scale of every arm, instead of a choice"
    )
    options.add_argument("--device", type=command_line.existing_device, default="auto")
    options.add_argument("--out", type=Path, default=Path("runs/gpt"))
    options.add_argument(
        "--budgets", type=int, nargs="+", default=[0, 1], choices=(0, 1), help="which of both"
    )
    given = options.parse_args()
    if given.read:
        for budget, results in results_in(RESULTS).items():
            print(f"{budget}FLOP\n{table(results)}")
        return
    study(QUICK if given.quick else FULL, given.budgets, given.device, given.out, gather, given.rate)
    if gather.rank == 0:
        draw(given.out / "study_gpt.png", given.out)


if __name__ == "__main__":
    command_line.run_shared(main)
