"""The rule of thumb: which schedule suits which budget, as found on the made tasks and on no judged one.

    python -m studies.growth rule --families tables signals --members 16

Every schedule is played on the variants of a family at every budget. `rule_of` reads off, for each budget,
the one with the highest mean validation accuracy; not to grow is one of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper.runs.files import write_atomically
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import play
from esper.tamiyo.controller import Blocks
from studies.growth.environments import BUDGETS, budget_of, judged, spec_of
from studies.growth.evaluation import SCHEDULES, SCRIPTED
from studies.growth.families import FAMILIES, make_tasks

TRIED = Path(__file__).parents[1] / "results" / "growth-rule.json"
CHOICES = ("start", *SCHEDULES)
OTHER_TASKS = 5  # seed of variants that no controller is trained on


def try_schedules(args: argparse.Namespace) -> None:
    """Write {family: {budget: {schedule: [accuracy of each member]}}}; families found before are kept."""
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for family in (family for family in FAMILIES if family.name in args.families):
        tasks = make_tasks(family, seed=OTHER_TASKS)
        blocks = Blocks({name: SCRIPTED[name]() for name in CHOICES})
        members = judged(args.members)
        spec = spec_of(tasks[0], blocks.members(members), args.device, variants=tuple(tasks))
        environment = GrowthEnvironment(spec)
        accuracy = play(environment, blocks, 0).accuracy[-1]
        budgets = budget_of(members).numpy()
        found[family.name] = {
            f"{budget:g}": {
                name: accuracy[span][budgets == budget].round(4).tolist()
                for name, span in blocks.spans(environment.num_members).items()
            }
            for budget in BUDGETS
        }
        write_atomically(args.out, json.dumps(found).encode())
        for budget, arms in found[family.name].items():
            means = {name: round(float(np.mean(values)), 4) for name, values in arms.items()}
            print(f"{family.name:8s} ×{budget:3s} {means}", flush=True)


def rule_of(tried: Path = TRIED) -> dict[float, str]:
    """The schedule for each budget: the best mean over families."""
    families: Sequence[dict[str, dict[str, list[float]]]] = list(json.loads(tried.read_text()).values())
    rule = {}
    for budget in BUDGETS:
        means = {
            name: np.mean([np.mean(found[f"{budget:g}"][name]) for found in families]) for name in CHOICES
        }
        rule[budget] = max(means, key=lambda name: float(means[name]))
    return rule
