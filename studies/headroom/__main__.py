"""What could a controller win that sets the learning rate and grows? The headroom, measured before training.

    python -m studies.headroom --device cuda --minutes 8 --out FILE      several processes share the groups
    python -m studies.headroom --quick --out FILE                        a minute on an idle core
    python -m studies.headroom --read FILE [FILE ...]                    the table, in a few minutes

Every cell is a made task with label noise, a host of any size of the ladder, a budget and an initial learning
rate; every plan spends the same training FLOPs. A line of JSON for each cell goes to --out. The table says
how many points of test accuracy there are to win: by the best plan for each cell (H1), by what the first 15 %
of the curve tell (H2), and beyond a reactive rule (H3).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from studies import command_line
from studies.growth.environments import tidy
from studies.growth.families import FAMILIES
from studies.headroom.analysis import report
from studies.headroom.cells import QUICK, Scale, draw_group
from studies.headroom.runs import QUICK_ARMS, TWINS, Arms, run_group

GROUPS, QUICK_GROUPS = 64, 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the groups that nobody has taken yet, or print the table of files."""
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each cell")
    parser.add_argument("--families", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--groups",
        type=command_line.positive,
        help=f"populations of cells, by default {GROUPS}, or {QUICK_GROUPS} with --quick",
    )
    parser.add_argument("--cells", type=command_line.positive, default=Scale.cells, help="of a group")
    parser.add_argument("--twins", type=int, choices=range(2, 9), default=TWINS, help="networks of each arm")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no group after these")
    parser.add_argument("--quick", action="store_true", help="small groups of tables")
    parser.add_argument("--read", type=Path, nargs="+", help="files to report on")
    given = parser.parse_args(arguments)
    if given.read:
        texts = map(command_line.read_text, given.read)
        print(report([json.loads(line) for text in texts for line in text.splitlines()]))
        return
    if given.out is None:
        parser.error("give --out to train, or --read to report")
    torch.set_float32_matmul_precision("high")
    scale = QUICK if given.quick else Scale(families=tuple(given.families), cells=given.cells)
    began = time.perf_counter()
    for index in range(given.groups or (QUICK_GROUPS if given.quick else GROUPS)):
        if time.perf_counter() - began > 60 * given.minutes:
            break
        try:  # several processes share the groups: who makes the file first trains the group
            Path(f"{given.out}.{index}.taken").open("x").close()
        except FileExistsError:
            continue
        arms = QUICK_ARMS if given.quick else Arms()
        records = run_group(draw_group(index, scale), given.device, arms, given.twins)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with given.out.open("ab", buffering=0) as file:  # one write, so that processes do not mix their lines
            file.write(lines.encode())
        first = records[0]
        print(
            f"group {index}: {first['family']} size {first['size']} budget ×{first['budget']:.3g} "
            f"{first['updates']} updates, {len(records)} cells, {first['budget_flops']:.3g} FLOPs a run, "
            f"{first['seconds'] * len(records):.1f} s",
            flush=True,
        )
        tidy()


if __name__ == "__main__":
    command_line.run(main)
