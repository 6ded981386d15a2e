"""Are hidden channels that come later as good as channels from the start, at equal training FLOPs?

python -m studies.widening           MNIST-1D, 4 hidden channels that become 8: minutes on two cores
python -m studies.widening --read    the tables of the committed results
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from esper.population.config import PopulationConfig
from esper.tasks import load_task
from esper.utils.gather import Gather
from studies import command_line
from studies.equal_compute import Arm, Setting, choose_rate, read, run_arms, table

RESULTS = Path(__file__).parent / "results"
RATES = (0.5, 1.0, 2.0, 4.0)
FLOPS = 1.2e10  # of every member
HOST = {"width": 4, "depth": 1, "stages": 2, "kernel": 5}
ARMS = (
    Arm("fixed, 4 hidden", {**HOST, "hidden": 4}),
    Arm("fixed, 8 hidden", {**HOST, "hidden": 8}),
    Arm("grown, 4→8 hidden", {**HOST, "hidden": 4}, "widen_full@0.2", folds=1),
)


def setting(flops: float, device: str) -> Setting:
    """The task, and how every arm trains."""
    config = PopulationConfig(
        batch_size=64, batches_per_epoch=20, validation_samples=1000, host_lr=1e-2, seed_lr=1e-2,
        clip_norm=1.0, schedule="flat", warmup=0.03, decay=0.5, initial_weights=4096,
    )  # fmt: skip
    return Setting(load_task("mnist1d"), "resnet", flops, config, device)


def read_options() -> argparse.Namespace:
    """What the command line says."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--read", action="store_true", help="show the results that are there")
    options.add_argument("--flops", type=float, default=FLOPS, help="training FLOPs of every member")
    options.add_argument("--members", type=command_line.positive, default=16)
    options.add_argument("--device", type=command_line.existing_device, default="cpu")
    options.add_argument("--out", type=Path, default=RESULTS)
    return options.parse_args()


def main(gather: Gather) -> None:
    """Run the study, or show the committed one again."""
    given = read_options()
    path = given.out / "widening.jsonl"
    if given.read:
        results = read(path)
    else:
        shared = setting(given.flops, given.device)
        rate_of = partial(choose_rate, setting=shared, rates=RATES, each=2)
        results = run_arms(ARMS, shared, given.members, rate_of, path, gather)
    print(f"{table(results, 'test_accuracy')}\n\n{table(results, 'validation_loss')}")


if __name__ == "__main__":
    command_line.run_shared(main)
