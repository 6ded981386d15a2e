"""The nearest living library: gromo grows an MLP on MNIST-1D, neurons where they lower the loss most.

    python -m studies.gromo_baseline            (a CPU, minutes; needs the extra "study")

Rows: an MLP grown by gromo from 8 + 8 hidden neurons to about 5,900 parameters, the network that it ended on,
from scratch for as many steps, and Esper on an MLP host that ends at about that size, grown by a fixed
schedule, with its own final network from scratch. Each way picks its peak learning rate by validation.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gromo.containers.growing_mlp import GrowingMLP
from gromo.utils.training_utils import compute_statistics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.comparing import ControllerRun, from_the_start, run_controller
from esper.lifecycle.slot_states import SlotStates
from esper.simic.config import GovernorConfig
from esper.simic.environment import GrowthEnvironment
from esper.tamiyo.controller import Controller
from esper.tamiyo.scripted import Scheduled, Static
from esper.tasks import load_task
from esper.tasks.task import HostSpec, Split, Task
from studies import command_line
from studies.setting import GATES, Setting

RESULTS = Path(__file__).parent / "results" / "gromo.json"
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # peak learning rates to choose from
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0)  # of an addition, tried on the training loss


@dataclass(frozen=True)
class Plan:
    """How long an MLP trains, and how it grows."""

    steps: int = 4000
    batch: int = 128
    hidden: int = 8  # neurons of each of two layers at the start
    target: int = 5900  # parameters
    grown_by: float = 0.7  # of the training: the last neurons are in by then
    additions: int = 20  # growth events
    neurons: int = 6  # at most, in an event


@dataclass(frozen=True)
class Outcome:
    """One trained network."""

    parameters: int
    validation: float
    test: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """One way of getting a network, over seeds."""

    way: str
    steps: int
    peak_lr: float
    parameters: list[int]
    validation: list[float]
    test: list[float]


def rate_at(step: int, steps: int, peak: float, warmup: float = 0.2) -> float:
    """One cycle: a cosine up, a cosine down."""
    done = step / steps
    if done < warmup:
        return peak * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * done / warmup)))
    return peak * max(0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))), 1e-3)


class Training:
    """Minibatch steps of AdamW on any module; growth makes a new optimiser, for the parameters are new."""

    def __init__(self, task: Task, plan: Plan, peak: float, seed: int):
        self.task, self.plan, self.peak = task, plan, peak
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def run(self, model: nn.Module, until: int) -> None:
        optimiser = torch.optim.AdamW(model.parameters(), lr=self.peak, weight_decay=1e-2, betas=(0.9, 0.99))
        data = self.task.train
        while self.step < until:
            for group in optimiser.param_groups:
                group["lr"] = rate_at(self.step, self.plan.steps, self.peak)
            chosen = torch.randint(len(data), (self.plan.batch,), generator=self.generator)
            loss = nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            self.step += 1


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    return float((model(split.inputs).argmax(1) == split.targets).float().mean())


@torch.no_grad()
def extended_loss(model: GrowingMLP, split: Split, scale: float) -> float:
    model.currently_updated_layer.set_scaling_factor(scale)
    return float(nn.functional.cross_entropy(model.extended_forward(split.inputs), split.targets))


def grow_once(model: GrowingMLP, task: Task, plan: Plan) -> None:
    """Neurons for the layer that gains most, at the strength that lowers the training loss most."""
    missing = plan.target - model.number_of_parameters()
    costs = [layer.in_features for layer in model.layers]  # what a neuron costs is about in + out
    neurons = max(1, min(plan.neurons, missing // (max(costs) + 11)))
    loader = DataLoader(TensorDataset(task.train.inputs, task.train.targets), batch_size=500)
    compute_statistics(model, loader, nn.CrossEntropyLoss(reduction="sum"))
    model.compute_optimal_updates(maximum_added_neurons=neurons)
    model.reset_computation()
    model.select_best_update()
    best = min(SCALES, key=lambda scale: extended_loss(model, task.train, scale))
    model.currently_updated_layer.set_scaling_factor(best)
    model.apply_change()


def grown(task: Task, plan: Plan, peak: float, seed: int) -> Outcome:
    torch.manual_seed(seed)
    model = GrowingMLP(40, task.num_classes, plan.hidden, 2, activation=nn.ReLU(), device=torch.device("cpu"))
    training = Training(task, plan, peak, seed)
    event = 0
    while training.step < plan.steps:
        event += 1
        full = model.number_of_parameters() >= plan.target
        late = training.step >= plan.grown_by * plan.steps
        until = plan.steps if full or late else round(event * plan.grown_by * plan.steps / plan.additions)
        training.run(model, min(until, plan.steps))
        if not full and training.step < plan.steps:
            grow_once(model, task, plan)
    return outcome(model, task, tuple(layer.in_features for layer in model.layers[1:]))


def outcome(model: nn.Module, task: Task, hidden: tuple[int, ...]) -> Outcome:
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(parameters, accuracy(model, task.validation), accuracy(model, task.test()), hidden)


def from_scratch(task: Task, plan: Plan, peak: float, seed: int, hidden: tuple[int, ...]) -> Outcome:
    torch.manual_seed(seed)
    sizes = [40, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(hidden[-1], task.num_classes))
    Training(task, plan, peak, seed).run(model, plan.steps)
    return outcome(model, task, hidden)


# ---- Esper, on an MLP host -------------------------------------------------------------------------------


ESPER_HOST = HostSpec("mlp", {"width": 30, "depth": 3})


def esper_runs(
    task: Task, plan: Plan, peak: float, seeds: int, controller: Controller, slots: SlotStates | None
) -> ControllerRun:
    """As many members as seeds, for as many steps as gromo's MLP, at the same size of minibatch.

    An MLP overfits these signals until its validation loss is that of chance while its accuracy still rises;
    the governor would take that for a collapse, so that it is off.
    """
    setting = Setting(batches=plan.steps // Setting.steps)
    calm = GovernorConfig(enabled=False)
    spec = setting.spec(replace(task, host=ESPER_HOST), torch.arange(seeds), governor=calm)
    changes = {"batch_size": plan.batch, "host_lr": peak, "seed_lr": peak}
    world = GrowthEnvironment(replace(spec, population=spec.population.model_copy(update=changes)))
    return run_controller(world, "", controller, initial_slots=slots)


def esper_rows(task: Task, plan: Plan, seeds: int) -> list[Row]:
    def tuned(controller: Controller, slots: SlotStates | None) -> tuple[float, ControllerRun]:
        tried = {rate: esper_runs(task, plan, rate, seeds, controller, slots) for rate in RATES}
        best = max(tried, key=lambda rate: float(tried[rate].record.accuracy[-1].mean()))
        return best, tried[best]

    rate, run = tuned(Scheduled(gates=GATES), None)
    from_start = tuned(Static(), from_the_start(run.record.final_slots))
    host = tuned(Static(), None)
    ways = {
        "esper, fixed schedule": (rate, run),
        "esper's final network from scratch": from_start,
        "esper's host alone": host,
    }
    return [
        Row(
            way=way,
            steps=run.record.num_steps * (plan.steps // Setting.steps),
            peak_lr=rate,
            parameters=run.record.parameters[-1].tolist(),
            validation=[round(float(a), 4) for a in run.record.accuracy[-1]],
            test=[round(float(a), 4) for a in run.test.accuracy],
        )
        for way, (rate, run) in ways.items()
    ]


# ---- the table -------------------------------------------------------------------------------------------


def tuned_row(
    way: str, plan: Plan, seeds: int, train: Callable[[float, int], Outcome]
) -> tuple[Row, list[Outcome]]:
    """Every seed at the peak learning rate with the best mean validation accuracy."""
    tried = {rate: [train(rate, seed) for seed in range(seeds)] for rate in RATES}
    best = max(tried, key=lambda rate: sum(o.validation for o in tried[rate]))
    chosen = tried[best]
    row = Row(
        way=way,
        steps=plan.steps,
        peak_lr=best,
        parameters=[o.parameters for o in chosen],
        validation=[round(o.validation, 4) for o in chosen],
        test=[round(o.test, 4) for o in chosen],
    )
    return row, chosen


def show(rows: Sequence[Row]) -> str:
    lines = ["| way | parameters | test accuracy, % (min to max) | peak rate |", "|---|---:|---:|---:|"]
    for row in rows:
        mean, size = sum(row.test) / len(row.test), sum(row.parameters) / len(row.parameters)
        spread = f"{100 * mean:.1f} ({100 * min(row.test):.1f} to {100 * max(row.test):.1f})"
        lines.append(f"| {row.way} | {size:.0f} | {spread} | {row.peak_lr:g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, plan = load_task("mnist1d"), Plan(steps=args.steps)
    by_gromo, ended = tuned_row(
        "gromo, grown", plan, args.seeds, lambda rate, seed: grown(task, plan, rate, seed)
    )
    scratch, _ = tuned_row(
        "gromo's final network from scratch",
        plan,
        args.seeds,
        lambda rate, seed: from_scratch(task, plan, rate, seed, ended[seed].hidden),
    )
    print(show([by_gromo, scratch]), flush=True)
    rows = [by_gromo, scratch, *esper_rows(task, plan, args.seeds)]
    print(show(rows), flush=True)
    args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main)
