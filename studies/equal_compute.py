"""Arms that spend equal training FLOPs: fixed networks of several sizes, and growth by a schedule.

Every arm is a host and a schedule (none for a fixed network). Its members differ in their first weights and
in the order of their data; all arms use the same ones. The learning rate of every arm is chosen for it
beforehand, on validation data, by members that take no further part. The test split is read once per arm,
at the end.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from zlib import crc32

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray

from esper.population.config import PopulationConfig
from esper.simic.config import EpisodeConfig, GovernorConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.controller import Controller
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import Static
from esper.tasks.task import HostSpec, Split, Task
from esper.utils.errors import UserError
from esper.utils.gather import Gather, all_gather_values
from esper.utils.statistics import mean_interval

WORLD_SEED = 11
CHOOSING = 1000  # members from this id on choose learning rates
CURVE_POINTS = 120


@dataclass(frozen=True)
class Arm:
    """A host, and how it grows."""

    name: str
    host: Mapping[str, int]
    schedule: str = ""  # as after "schedule:" on the command line
    folds: int = 0

    def controller(self) -> Controller:
        """Whoever decides in this arm."""
        return Schedule.parse(self.schedule) if self.schedule else Static()


@dataclass(frozen=True)
class Setting:
    """What all arms of a study share."""

    task: Task
    preset: str
    flops: float  # of every member
    population: PopulationConfig
    device: str = "cpu"

    def environment(self, arm: Arm, members: torch.Tensor, rates: Sequence[float]) -> GrowthEnvironment:
        """An arm's members; `rates` scale their learning rates."""
        task = replace(self.task, host=HostSpec(self.preset, arm.host))
        return GrowthEnvironment(
            EnvironmentSpec(
                task=task,
                members=members,
                gamma=1.0,
                seed=WORLD_SEED,
                device=self.device,
                episode=EpisodeConfig(clock="compute", flops=self.flops),
                governor=GovernorConfig(enabled=False),
                population=self.population.model_copy(update={"folds": arm.folds}),
                rate_scale=tuple(rates),
            )
        )


@dataclass(frozen=True)
class Result:
    """What one arm reached, member by member."""

    arm: str
    flops: float
    rate: float  # the learning rate's scale
    validation_loss: list[float]
    validation_accuracy: list[float]
    test_loss: list[float]
    test_accuracy: list[float]
    parameters: list[int]
    spent: list[float]
    seconds: float
    curve: list[tuple[float, float]] = field(default_factory=list)  # FLOPs and mean validation loss


def run_arm(arm: Arm, setting: Setting, members: int, rate: float) -> Result:
    """Train an arm's members to the end of their budget and measure them."""
    begun = time.perf_counter()
    environment = setting.environment(arm, torch.arange(members), [rate] * members)
    record = play(environment, arm.controller(), 0)
    test = evaluate_test(environment)
    every = max(1, len(record.loss) // CURVE_POINTS)
    curve = zip(record.spent.mean(1)[::every].tolist(), record.loss.mean(1)[::every].tolist(), strict=True)
    return Result(
        arm=arm.name,
        flops=setting.flops,
        rate=rate,
        validation_loss=record.loss[-1].tolist(),
        validation_accuracy=record.accuracy[-1].tolist(),
        test_loss=test.loss.tolist(),
        test_accuracy=test.accuracy.tolist(),
        parameters=record.parameters[-1].tolist(),
        spent=record.spent[-1].tolist(),
        seconds=time.perf_counter() - begun,
        curve=list(curve),
    )


def try_rates(arm: Arm, setting: Setting, rates: Sequence[float], each: int = 1) -> dict[float, float]:
    """Return the final validation loss by learning-rate scale; `each` members try every one."""
    scales = [rate for rate in rates for _ in range(each)]
    ids = CHOOSING + torch.arange(each).repeat(len(rates))
    record = play(setting.environment(arm, ids, scales), arm.controller(), 0)
    losses = np.nan_to_num(record.loss[-1], nan=np.inf).reshape(len(rates), each).mean(1)
    return dict(zip(rates, losses.tolist(), strict=True))


def choose_rate(arm: Arm, setting: Setting, rates: Sequence[float], each: int = 1) -> float:
    """Return the learning-rate scale with the least validation loss at the end."""
    tried = try_rates(arm, setting, rates, each)
    return min(tried, key=lambda rate: tried[rate])


def run_arms(
    arms: Sequence[Arm],
    setting: Setting,
    members: int,
    rate_of: Callable[[Arm], float],
    path: Path,
    gather: Gather,
) -> list[Result]:
    """What all arms reached, each at its learning rate's scale, in their order.

    The last arm goes first: what grows is what a study that is cut short needs most. Several processes take
    an arm each, so that nothing depends on how many there are; all get all results, and the first one tells
    of each and writes those that there are to `path`.
    """
    _check_same_data(setting.task.train, gather)
    results: list[Result] = []
    queue = arms[::-1]
    for begin in range(0, len(queue), gather.size):
        mine = queue[begin : begin + gather.size][gather.rank : gather.rank + 1]
        reached = [asdict(run_arm(arm, setting, members, rate_of(arm))) for arm in mine]
        for told in (told for each in all_gather_values(gather, reached) for told in each):
            results.insert(0, Result(**told))
            if gather.rank == 0:
                print(_line(results[0]), flush=True)
        if gather.rank == 0:
            write(results, path, setting)
    return results


def _check_same_data(split: Split, gather: Gather) -> None:
    """Raise UserError where processes have other data: some are made of what is installed on a machine."""
    if gather.size > 1:
        mine = crc32(split.inputs.numpy().tobytes(), crc32(split.targets.numpy().tobytes()))
        others = [rank for rank, sum in enumerate(all_gather_values(gather, mine)) if sum != mine]
        if others:
            raise UserError(
                f"processes {gather.rank} and {others[0]} have made different data of what is installed on "
                "their machines: use the same versions of Python and torch on all of them"
            )


def _line(result: Result) -> str:
    loss, accuracy = np.mean(result.validation_loss), np.mean(result.validation_accuracy)
    return (
        f"{result.arm}: validation loss {loss:.4f}, accuracy {accuracy:.4f}, rate ×{result.rate:g}, "
        f"{result.seconds:.0f} s"
    )


def write(results: Iterable[Result], path: Path, setting: Setting) -> None:
    """One JSON line per arm, and the machine, into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if setting.device.startswith("cuda") else "none"
    head = {"machine": platform.processor() or platform.machine(), "gpu": gpu, "torch": torch.__version__}
    lines = [json.dumps(head), *(json.dumps(asdict(result)) for result in results)]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> list[Result]:
    """What `write` wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [Result(**{**line, "curve": [tuple(point) for point in line["curve"]]}) for line in lines]


def table(results: Sequence[Result], score: str = "validation_loss") -> str:
    """A line per arm: means with 95 % intervals, and the differences to the last arm, member by member."""
    rows = [
        "| arm | rate | parameters | " + score.replace("_", " ") + " | minus the last arm | seconds |",
        "|---|---|---|---|---|---|",
    ]
    last = np.asarray(getattr(results[-1], score))
    for result in results:
        values = np.asarray(getattr(result, score))
        mean, half = mean_interval(values.tolist())
        gap, gap_half = mean_interval((values - last).tolist())
        beyond = "" if result is results[-1] else f"{gap:+.4f} ± {gap_half:.4f}"
        rows.append(
            f"| {result.arm} | ×{result.rate:g} | {int(np.mean(result.parameters)):,} "
            f"| {mean:.4f} ± {half:.4f} | {beyond} | {result.seconds:.0f} |"
        )
    return "\n".join(rows)


def comparison(columns: Mapping[str, Sequence[Result]], score: str = "validation_loss") -> str:
    """A line per arm and a column per budget; then the last arm, which grew, minus others, pair by pair.

    The others are the best of the fixed ones, and the last fixed one, which is what the grown one ends as.
    Losses are told as they are and accuracies in percent; means over the members with 95 % intervals.
    """
    percent, digits = (100.0, 2) if score.endswith("accuracy") else (1.0, 4)
    arms = [result.arm for result in next(iter(columns.values()))]
    *fixed, grown = arms
    values = {
        (result.arm, name): percent * np.asarray(getattr(result, score))
        for name, results in columns.items()
        for result in results
    }

    def cell(numbers: NDArray[np.float64], sign: str = "") -> str:
        mean, half = mean_interval(numbers.tolist())
        return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"

    def best(name: str) -> str:
        order = sorted(fixed, key=lambda arm: float(values[arm, name].mean()))
        return order[-1 if percent > 1 else 0]

    members = len(values[grown, next(iter(columns))])
    title = f"{score.replace('_', ' ')}, mean of {members} ± 95 %"
    rows = [[title, *columns], ["---"] * (1 + len(columns))]
    rows += [[arm, *(cell(values[arm, name]) for name in columns)] for arm in fixed]
    rows += [[f"**{grown}**", *(f"**{cell(values[grown, name])}**" for name in columns)]]
    against = [(name, values[grown, name] - values[best(name), name]) for name in columns]
    rows += [["grown minus the best fixed", *(f"{cell(gap, '+')} ({best(name)})" for name, gap in against)]]
    same = [cell(values[grown, name] - values[fixed[-1], name], "+") for name in columns]
    rows += [[f"grown minus {fixed[-1]}", *same]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def picture(groups: Mapping[str, Sequence[Result]], path: Path, low: float, high: float) -> None:
    """Validation loss against FLOPs, a panel for each budget, a line for each arm."""
    figure, axes = plt.subplots(1, len(groups), figsize=(6 * len(groups), 4), squeeze=False)
    for axis, (title, results) in zip(axes[0], groups.items(), strict=True):
        for result in results:
            flops, loss = zip(*result.curve, strict=True)
            grown = result.arm.startswith("grown")
            axis.plot(flops, loss, label=result.arm, linewidth=2.2 if grown else 1.1)
        axis.set(title=title, xlabel="training FLOPs", ylabel="validation loss", ylim=(low, high))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
