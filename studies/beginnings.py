"""How should new parts begin, and should learning rates rise anew? Measured at equal training FLOPs.

python -m studies.beginnings           MNIST-1D, blocks widened or repeated: four minutes on one core
python -m studies.beginnings --read    the tables of the committed results

The network of `studies.widening`, grown once at 20 % of the budget, with one setting changed at a time; all
arms at a learning rate of 1e-2. Differences are to the defaults, member by member.
"""

from __future__ import annotations

from pathlib import Path

from esper.utils.gather import Gather
from studies import command_line, widening
from studies.equal_compute import Arm, read, run_arms, table

RESULTS = Path(__file__).parent / "results"
FLOPS = widening.FLOPS / 2  # of every member
HOST = {**widening.HOST, "hidden": 4}
VARIANTS: dict[str, dict[str, object]] = {
    "rewarm 20": {"rewarm": 20},
    "rewarm 100": {"rewarm": 100},
    "new_part_warmup 20": {"new_part_warmup": 20},
    "widen_copies .5": {"widen_copies": 0.5},
    "copy_noise .02": {"copy_noise": 0.02},
    "defaults": {},
}
IDLE = {"widen_full": "copy_noise .02", "clone": "widen_copies .5"}  # without effect there


def arms(blueprint: str) -> list[Arm]:
    """Every variant that has an effect, the defaults last."""
    named = {name: change for name, change in VARIANTS.items() if name != IDLE[blueprint]}
    return [Arm(name, HOST, ((0.2, blueprint),), 1, change) for name, change in named.items()]


def path_of(folder: Path, blueprint: str) -> Path:
    """The file of the results of one way to grow."""
    return folder / f"beginnings-{blueprint}.jsonl"


def main(gather: Gather) -> None:
    """Run the study, or show the committed one again."""
    given = widening.read_options(__doc__, FLOPS)
    for blueprint in IDLE:
        path = path_of(given.out, blueprint)
        if given.read and not path.is_file():
            continue
        if given.read:
            results = read(path)
        else:
            setting = widening.setting(given.flops, given.device)
            results = run_arms(arms(blueprint), setting, given.members, lambda arm: 1.0, path, gather)
        print(f"{blueprint}\n{table(results, 'test_accuracy')}\n")


if __name__ == "__main__":
    command_line.run_shared(main)
