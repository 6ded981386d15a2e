"""All arms on one held-out task: a few programs, each of which trains every network that it can at once.

    arms       every controller, trained or scripted, and the ablations of the lifecycle: one program
    finals     the networks that controllers ended with, from the start, for as many minibatches
    equal      the same for as many FLOPs as growth spent; so the host, and the best of several hosts
    frontier   static hosts of other widths, one program each
    search     a random search over sizes at the same number of steps
    pruning    a host of twice the width, pruned to the size of the grown networks

What has been found is written after every program, beside what other programs found before under the same
settings. finals, equal and pruning need what arms played, so that they run with it. A network that never
changes is charged for its training, and for no validation but the one that chooses the best of several.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.foundation.errors import UserError
from esper.population.hosts import build_host
from esper.tamiyo.blocks import Blocks
from esper.tasks.task import Task
from studies.ablations import CHANGES, AblatedEnvironment
from studies.alternatives import random_search, static_widths
from studies.arms import ABLATED, entrants, policies
from studies.calibration import calibrate, other_members
from studies.command_line import positive
from studies.finals import final_slots, train_fixed, training_alone
from studies.held_out import HELD_OUT, held_out_task
from studies.pruning import prune_from_big
from studies.records import Arm, Calibration, Evaluation, Played, arm_of, play_and_test
from studies.setting import STEPS, Setting, tidy
from studies.variants import MAIN, variant_of

FIRST_MEMBER = 5000
CALIBRATION_MEMBERS = 64  # at most
CHUNKS = {"text": 512, "mnist5000": 2048}  # members that go through the network together; others: 4096
LEAST_CHUNK = 128
QUICK_TASKS = ("spirals", "digits", "mnist1d")
QUICK_MEMBERS = 6


@dataclass
class Course:
    """One task on its way through the programs."""

    setting: Setting
    task: Task
    members: Tensor  # [n] ids
    policies: Path | None
    found: Evaluation
    ablations: bool = True
    played: Played | None = None  # of the program of controllers
    spans: dict[str, slice] = field(default_factory=dict)

    @property
    def host_parameters(self) -> int:
        return self.found.host_parameters

    @property
    def seeds(self) -> list[str]:
        """The training seeds of the study's own controller."""
        return [name for name in self.spans if variant_of(name) == MAIN and "," not in name]

    def controllers(self) -> Played:
        if self.played is None:
            raise RuntimeError("finals, equal and pruning need the program 'arms' before them: name it too")
        return self.played


def arms(course: Course) -> Iterator[Arm]:
    learned = policies(course.policies, course.setting.device)
    ours = {name: make() for name, make in learned.items() if variant_of(name) == MAIN}
    others = other_members(min(CALIBRATION_MEMBERS, max(2, len(course.members) // 2)))
    matched = calibrate(course.setting, course.task, ours, others)
    course.found = replace(course.found, calibration=matched)
    print(_told(matched), flush=True)
    tidy()
    taking_part = entrants(learned, matched.rate, ABLATED if course.ablations else ())
    blocks = Blocks({name: entrant.controller for name, entrant in taking_part.items()})
    ids = blocks.members(course.members)
    course.spans = blocks.spans(len(ids))
    changed = {change: torch.zeros(len(ids), dtype=torch.bool) for change in CHANGES}
    for name, entrant in taking_part.items():
        if entrant.change:
            changed[entrant.change][course.spans[name]] = True
    world = AblatedEnvironment(course.setting.spec(course.task, ids), changed)
    course.played = play_and_test(world, blocks)
    alone = replace(course.played, spent=training_alone(world))
    for name, span in course.spans.items():
        played = alone if name == "static" else course.played
        yield arm_of(name, played, course.host_parameters, span)


def _told(matched: Calibration) -> str:
    return (
        f"trained controllers germinate {matched.wanted:.2f} seeds a member; random ones at a rate of "
        f"{matched.rate:.3f} are expected to germinate {matched.expected:.2f}"
    )


def finals(course: Course) -> Iterator[Arm]:
    """What controllers ended with, from the start, for as many minibatches."""
    names = [*course.seeds, "heuristic"]
    slots = final_slots(course.controllers(), [course.spans[name] for name in names])
    played = train_fixed(course.setting, course.task, course.members.repeat(len(names)), slots)
    yield from _fixed_arms(course, played, names, "static-final of {}")


def equal(course: Course) -> Iterator[Arm]:
    """Networks that never change, for as many FLOPs as growth spent on the mean over members and seeds:
    what it ended with, the bare host, and the best of several hosts on validation data."""
    played, seeds = course.controllers(), course.seeds
    spans = [course.spans[name] for name in seeds]
    budget = float(np.mean([played.spent[-1, span] for span in spans]))
    ids, slots = course.members.repeat(len(seeds)), final_slots(played, spans)
    finals = train_fixed(course.setting, course.task, ids, slots, budget)
    yield from _fixed_arms(course, finals, seeds, "static-final of {}, equal FLOPs")
    tidy()
    for name, restarts in {"static, equal FLOPs": 1, "best of restarts, equal FLOPs": 0}.items():
        hosts = train_fixed(course.setting, course.task, course.members, None, budget, restarts)
        yield from _fixed_arms(course, hosts, [name], "{}")


def _fixed_arms(course: Course, played: Played, names: list[str], title: str) -> Iterator[Arm]:
    """One arm for every block of the members."""
    n = len(course.members)
    for k, name in enumerate(names):
        arm = arm_of(title.format(name), played, course.host_parameters, slice(k * n, (k + 1) * n))
        yield replace(arm, growth=None)


def frontier(course: Course) -> Iterator[Arm]:
    yield from static_widths(course.setting, course.task, course.members, course.host_parameters)


def search(course: Course) -> Iterator[Arm]:
    yield random_search(course.setting, course.task, course.members, course.host_parameters)


def pruning(course: Course) -> Iterator[Arm]:
    played = course.controllers()
    grown = [played.record.parameters[-1, course.spans[name]] for name in course.seeds]
    target = round(float(np.mean(grown)))
    yield prune_from_big(course.setting, course.task, course.members, target, course.host_parameters)


PROGRAMS: dict[str, Callable[[Course], Iterator[Arm]]] = {
    "arms": arms,
    "finals": finals,
    "equal": equal,
    "frontier": frontier,
    "search": search,
    "pruning": pruning,
}


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, on any task."""

    members: int = 256
    policies: Path | None = None  # the controller of the package if there is no folder
    programs: tuple[str, ...] = tuple(PROGRAMS)
    ablations: bool = True
    out: Path = Path("runs/study")


FOLLOWERS = ("finals", "equal", "pruning")  # of arms


def check(request: Request, device: str) -> None:
    """Refuse what cannot be done before anything is trained."""
    if "arms" in request.programs:
        policies(request.policies, device)
        return
    early = [name for name in request.programs if name in FOLLOWERS]
    if early:
        raise UserError(f"{', '.join(early)} need what arms played; give --programs arms {' '.join(early)}")


def evaluate_task(setting: Setting, task: Task, request: Request) -> Evaluation:
    """Run programs on one task, one line for each arm, and keep what was found so far."""
    host, members = task.host, request.members
    options = ", ".join(f"{key}={value}" for key, value in host.options.items())
    own = build_host(host.preset, task.input_shape, task.num_classes, **host.options)
    course = Course(
        setting=setting,
        task=task,
        members=torch.arange(FIRST_MEMBER, FIRST_MEMBER + members),
        policies=request.policies,
        ablations=request.ablations,
        found=Evaluation(
            task=task.name,
            host=f"{host.preset}({options})",
            host_parameters=own.num_parameters,
            members=members,
            steps=setting.steps,
            batches=setting.batches,
        ),
    )
    course.found = course.found.continued(request.out)
    failed = []
    for name in request.programs:
        try:
            run_program(course, name)
        except Exception:  # a program that fails costs the others nothing
            traceback.print_exc()
            failed.append(name)
        course.found.write(request.out)
        tidy()
    if failed:
        raise ProgramsFailed(f"{task.name}: {', '.join(failed)} failed; see above")
    return course.found


class ProgramsFailed(Exception):
    """Some programs of a task came to no end; what the others found is written."""


def run_program(course: Course, name: str) -> None:
    """One program, with smaller chunks of members where the device has too little memory."""
    begun, before = time.perf_counter(), course.found.without(name)
    try:
        course.found = before
        for arm in PROGRAMS[name](course):
            course.found = replace(course.found, arms=[*course.found.arms, replace(arm, program=name)])
            print(line_of(course.task.name, name, arm, time.perf_counter() - begun), flush=True)
        return
    except torch.OutOfMemoryError:
        if course.setting.chunk <= LEAST_CHUNK:
            raise
    course.found = before
    course.setting = replace(course.setting, chunk=course.setting.chunk // 2)
    tidy()
    print(f"too little memory: {name} again, {course.setting.chunk} members at a time", flush=True)
    run_program(course, name)


def line_of(task: str, program: str, arm: Arm, seconds: float) -> str:
    return (
        f"{task:16s} {program:8s} {arm.name:38s} test {np.mean(arm.test_accuracy):.4f}  "
        f"parameters {np.mean(arm.parameters):6.0f}  Φ {np.mean(arm.potential):.4f}  {seconds:6.1f} s"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", nargs="+", choices=HELD_OUT, help="all of them if none is named")
    parser.add_argument(
        "--policies", type=Path, help="folder of variant-seed.safetensors; else the shipped one"
    )
    parser.add_argument("--members", type=positive, help="networks of each arm (256)")
    parser.add_argument("--steps", type=int, default=STEPS, help="decision steps")
    parser.add_argument("--batches", type=int, default=24, help="minibatches in a decision step")
    parser.add_argument("--data", type=Path, help="folder of exported tasks")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--ablations", action=argparse.BooleanOptionalAction, help="of the lifecycle")
    parser.add_argument("--chunk", type=int, help="members that go through the network together")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MEMBERS} members on three tasks")


def evaluate(args: argparse.Namespace) -> None:
    """All arms on held-out tasks, one file of results for each."""
    if args.device == "cpu":
        torch.set_num_threads(1)
    request = Request(
        members=args.members or (QUICK_MEMBERS if args.quick else Request.members),
        policies=args.policies,
        programs=tuple(args.programs),
        ablations=not args.quick if args.ablations is None else args.ablations,
        out=args.out,
    )
    check(request, args.device)
    failures = []
    for name in args.task or (QUICK_TASKS if args.quick else HELD_OUT):
        chunk = args.chunk or CHUNKS.get(name, 4096)
        setting = Setting(args.steps, args.batches, args.device, args.graphs, chunk=chunk)
        try:
            evaluate_task(setting, held_out_task(name, args.data), request)
        except ProgramsFailed as error:
            failures.append(str(error))
    if failures:
        raise SystemExit("\n".join(failures))
