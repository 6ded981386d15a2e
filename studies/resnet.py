"""Does a residual network that grows by copies beat fixed depths at equal training FLOPs, on images?

    python -m studies.resnet                       both budgets, four seeds: minutes on one GPU
    python -m studies.resnet --quick --device cpu  a minute on one core, far too small to say anything
    torchrun --nproc-per-node=4 -m studies.resnet  an arm in each process
    python -m studies.resnet --read                the table of the committed results

Images of letters and digits in many fonts, turned, sheared and noisy (`studies.glyphs`). Arms: 1, 2 and 4
blocks in each stage, and 1 block that becomes 2 after 5 % and 4 after 30 % of the budget by copies. Learning
rates are chosen for each arm on validation data, at each budget.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from esper.population.config import PopulationConfig
from esper.utils.gather import Gather
from studies import command_line, glyphs
from studies.equal_compute import (
    Arm,
    Result,
    Setting,
    choose_rate,
    comparison,
    picture,
    read,
    run_arms,
    table,
)

RESULTS = Path(__file__).parent / "results"
RATES = (0.125, 0.25, 0.5, 1.0)  # of the learning rate below
EACH = 2  # networks that try a rate
GROWTH = "clone@0.05+clone@0.30x2"


@dataclass(frozen=True)
class Size:
    """How large a study is."""

    name: str
    width: int
    stages: int
    side: int
    batch: int
    budgets: tuple[float, ...]  # FLOPs
    images: tuple[int, int, int] = (60_000, 2_000, 4_000)  # training, validation, test
    members: int = 4
    per_step: int = 20  # minibatches of a decision step

    @property
    def arms(self) -> list[Arm]:
        """Every fixed depth, then growth from the least to the greatest."""
        shape = {"width": self.width, "stages": self.stages}
        fixed = [Arm(f"fixed, {d} blocks a stage", {**shape, "depth": d}) for d in (1, 2, 4)]
        grown = Arm("grown, 1→2→4 blocks a stage", {**shape, "depth": 1}, GROWTH, folds=3)
        return [*fixed, grown]

    def path(self, folder: Path, budget: float) -> Path:
        """The file of the results at one budget."""
        return folder / f"{self.name}-{budget / 1e12:g}T.jsonl"


FULL = Size("resnet", 16, 3, 24, 128, (1.0e13, 4.0e13))
QUICK = Size("resnet", 4, 1, 12, 16, (2.0e8, 4.0e8), (500, 100, 100), members=2, per_step=5)


def study(size: Size, budgets: list[int], device: str, out: Path, gather: Gather) -> None:
    """All arms at the chosen budgets, smallest first."""
    task = glyphs.make_task(size.side, size.images)
    config = PopulationConfig(
        batch_size=size.batch, batches_per_epoch=size.per_step, validation_samples=1000, host_lr=4e-3,
        seed_lr=4e-3, weight_decay=0.05, second_beta=0.99, clip_norm=1.0, schedule="flat", warmup=0.02,
        decay=0.4, widest=1, initial_weights=4096,
        precision="bfloat16" if device.startswith("cuda") else "float32",
    )  # fmt: skip
    for flops in (size.budgets[budget] for budget in sorted(budgets)):
        setting = Setting(task, "resnet", flops, config, device)
        rate_of = partial(choose_rate, setting=setting, rates=RATES, each=EACH)
        results = run_arms(size.arms, setting, size.members, rate_of, size.path(out, flops), gather)
        print(table(results, "test_accuracy"), flush=True)


def results_in(folder: Path, size: Size) -> dict[str, list[Result]]:
    """What is there, by budget."""
    paths = {f"{flops / 1e12:g} TFLOP": size.path(folder, flops) for flops in size.budgets}
    return {name: read(path) for name, path in paths.items() if path.is_file()}


def draw(path: Path, folder: Path = RESULTS, size: Size = FULL) -> None:
    """The picture of the results in a folder."""
    picture(results_in(folder, size), path, 0.0, 2.0)


def main(gather: Gather) -> None:
    """Run the study, or show the committed one again."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small enough for one core")
    options.add_argument("--read", action="store_true", help="show the results that are there")
    options.add_argument("--device", type=command_line.existing_device, default="auto")
    options.add_argument("--out", type=Path, default=Path("runs/resnet"))
    options.add_argument("--budgets", type=int, nargs="+", default=[0, 1], choices=(0, 1))
    given = options.parse_args()
    size = QUICK if given.quick else FULL
    if not given.read:
        study(size, given.budgets, given.device, given.out, gather)
    if gather.rank > 0:
        return
    print(comparison(results_in(RESULTS if given.read else given.out, size), "test_accuracy"))
    if not given.read:
        draw(given.out / "study_resnet.png", given.out, size)


if __name__ == "__main__":
    command_line.run_shared(main)
