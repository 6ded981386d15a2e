"""Does growth pay? Train controllers on made tasks, judge them on tasks that they never saw.

    python -m studies.growth train --seconds 500 --out runs/study                 (GPU)
    python -m studies.growth evaluate --task mnist1d --policies runs/study --out runs/study
    python -m studies.growth evaluate --quick                      (a small one, minutes on two cores)
    python -m studies.growth ship --policy runs/study/main-0.safetensors --rounds 30
    python -m studies.report                                       (the table and the figure of docs/study.md)

Every arm of an evaluation has the same members: the same initial hosts, the same order of data, the same
number of epochs. What is compared is what a controller made of them. The test split is read at the end of
each program, and nothing is chosen by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from esper.builders import LEARNER, agent_schema, make_agent
from esper.telemetry.checkpoints import save_checkpoint
from studies import training
from studies.command_line import existing_device, run
from studies.evaluation import add_options, evaluate
from studies.held_out import HELD_OUT, export_tasks
from studies.variants import MAIN, config_of


def export(args: argparse.Namespace) -> None:
    """Write held-out tasks for a machine that lacks their packages."""
    export_tasks(args.tasks or HELD_OUT, args.out)


def ship(args: argparse.Namespace) -> None:
    """Write a trained policy as the controller that comes with the package."""
    config = config_of(f"{MAIN}-0")
    agent = make_agent(config, torch.device("cpu"))
    agent.load_state_dict(load_file(args.policy[0]))
    record = {"config": config.model_dump(mode="json"), "round": args.rounds}
    tensors = {f"{LEARNER}.{name}": value for name, value in agent.state_dict().items()}
    save_checkpoint(args.to, tensors, record, agent_schema())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("train", help="train controllers on the made tasks, side by side")
    training.add_options(one)
    one.set_defaults(run=training.train)

    two = commands.add_parser("evaluate", help="all arms on held-out tasks")
    add_options(two)
    two.set_defaults(run=evaluate)

    three = commands.add_parser("export", help="write held-out tasks as plain tensors")
    three.add_argument("tasks", nargs="*", help="all of them if none is named")
    three.set_defaults(run=export)

    four = commands.add_parser("ship", help="make a policy the controller of the package")
    four.add_argument("--policy", type=Path, nargs=1, required=True)
    four.add_argument("--rounds", type=int, required=True, help="rounds that it was trained for")
    four.add_argument("--to", type=Path, default=Path("src/esper/pretrained/tamiyo.safetensors"))
    four.set_defaults(run=ship)

    for command in (two, three):
        command.add_argument("--out", type=Path, default=Path("runs/study"))
        command.add_argument("--device", type=existing_device, default="auto")
        command.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    run(main)
