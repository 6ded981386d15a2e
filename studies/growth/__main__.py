"""Does one grown run get what a sweep over sizes would have found?

    python -m studies.growth train --seconds 400 --out runs/study                    (GPU)
    python -m studies.growth evaluate --policies runs/study --out runs/study         (GPU)
    python -m studies.growth evaluate --quick                       (minutes on two cores, few members)
    torchrun --nproc-per-node=8 -m studies.growth evaluate          (a task at a time on each GPU)
    python -m studies.growth rule                                   (schedules on the made tasks)
    python -m studies.growth report                                 (its tables)
    python -m studies.growth ship --policy runs/study/main-0.safetensors --rounds 60

Every arm spends the same training FLOPs. The test split is read at the end of each program, and nothing is
chosen by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from esper.controllers import PRETRAINED, load_controller
from esper.utils.launch import Launch
from studies.command_line import existing_device, positive, run
from studies.growth import evaluation, rule, training
from studies.growth.environments import CONFIG, HELD_OUT
from studies.growth.families import FAMILIES

QUICK_TASKS = ("spirals", "letter")
QUICK_MEMBERS = 2


def evaluate(args: argparse.Namespace) -> None:
    """All arms on held-out tasks, one file of results for each.

    Several processes take tasks in turn, each whole: what is found does not depend on how many there are.
    """
    learned = (
        training.load_controllers(args.policies, args.device)
        if args.policies
        else {"main-0": load_controller(PRETRAINED, device=args.device)}
    )
    launch = Launch.of()
    tasks = list(args.task or (QUICK_TASKS if args.quick else HELD_OUT))
    for name in tasks[launch.rank :: launch.size]:
        each = args.members or (QUICK_MEMBERS if args.quick else HELD_OUT[name])
        evaluation.evaluate(evaluation.Setup(name, each, args.device, learned), args.programs, args.out)


def report(args: argparse.Namespace) -> None:
    """The tables of the page, from the committed samples."""
    from studies.growth.report import write_tables  # needs the extra "searches"

    write_tables()


def main() -> None:
    """Read the command line and run what it names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("train", help="train controllers on the made tasks, side by side")
    one.add_argument("--trainings", type=positive, default=5, help="controllers, from other first weights")
    one.add_argument("--members", type=positive, default=CONFIG.members, help="of each")
    one.add_argument("--rounds", type=positive, default=CONFIG.rounds)
    one.add_argument("--seconds", type=float, default=600.0)
    names = [family.name for family in FAMILIES]
    one.add_argument("--resume", type=Path, help="a folder of main-*.safetensors to go on from")
    one.add_argument("--families", nargs="+", choices=names, default=names, help="of made tasks, in turn")
    one.set_defaults(run=training.train)

    two = commands.add_parser("evaluate", help="all arms on held-out tasks")
    two.add_argument("--task", nargs="+", choices=list(HELD_OUT), help="all of them if none is named")
    two.add_argument("--policies", type=Path, help="folder of main-*.safetensors; else the shipped one")
    two.add_argument("--members", type=positive, help="networks of each arm at each budget")
    programs = list(evaluation.PROGRAMS)
    two.add_argument("--programs", nargs="+", choices=programs, default=programs, help="of each task")
    two.add_argument("--quick", action="store_true", help=f"{QUICK_MEMBERS} members, two tasks")
    two.set_defaults(run=evaluate)

    three = commands.add_parser("ship", help="write a trained policy into the package")
    three.add_argument("--policy", type=Path, required=True)
    three.add_argument("--rounds", type=positive, required=True, help="that it was trained for")
    three.add_argument("--to", type=Path, default=Path("src/esper/pretrained/tamiyo.safetensors"))
    three.set_defaults(run=training.ship)

    four = commands.add_parser("report", help="write and print the tables of the study of growth")
    four.set_defaults(run=report)

    five = commands.add_parser("rule", help="try the schedules on the made tasks, for a rule of thumb")
    five.add_argument("--families", nargs="+", choices=names, default=names)
    five.add_argument("--members", type=positive, default=16, help="networks of a schedule at each budget")
    five.add_argument("--out", type=Path, default=rule.TRIED)
    five.add_argument("--device", type=existing_device, default="auto")
    five.set_defaults(run=rule.try_schedules)

    for command in (one, two):
        command.add_argument("--out", type=Path, default=Path("runs/study"))
        command.add_argument("--device", type=existing_device, default="auto")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    run(main)
