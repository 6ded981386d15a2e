"""Do the shipped controllers do harm? Each minus static at equal FLOPs, cell by cell.

    python -m studies.no_harm --out FILE            an hour of a core; extras: those of held_out
    python -m studies.no_harm --quick --out FILE    a minute: few cells, two networks
    python -m studies.no_harm --read FILE           the tables

A cell is a built-in task with a preset, as `esper compare --preset PRESET --task TASK -C static,tamiyo` runs
it; the recipe of `compute` on all tasks at a quarter and a sixteenth of its budget, and on tables with larger
hosts; and models of transformers in `esper.grow(beyond=True, controller="tamiyo")`. The controller of the
learning rate, `rates`, has the built-in tasks with the preset `demo`, from random rates and from the usual
one, and the held-out tables of `studies.held_out`. Both arms have the same first weights, data and FLOPs.
Outside of the conditions in its file a controller leaves the run alone: such a cell of `esper compare` is
static by construction and is not trained. Larger hosts are trained with `--force`; models are trained both
ways all the same, and once more with `force=True`. A line of JSON for each cell goes to --out; cells that it
has are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.comparing import compare, prepare
from esper.config import RunConfig, load_config, preset_names
from esper.controllers import PRETRAINED, RATES, Fixed, load_controller
from esper.runs.console import interval
from esper.tamiyo.scripted import Static
from esper.tasks import load_task
from esper.tasks.task import Task, task_table
from esper.utils.errors import require
from esper.utils.statistics import mean_interval, paired_interval
from studies import command_line
from studies.growth.ladders import LADDERS
from studies.held_out import HELD_OUT, spec_for, splits_of
from studies.rates import FRESH, at_rate, test_accuracy

STATIC, FORCED, RULE = "static", f"{PRETRAINED}, forced", "reactive"
COMPUTE, DEMO = "compute", "demo"  # the presets with the recipes that Tamiyo and `rates` were trained with
FULL, SMALLER = 16, (1, 4)  # its budget in units of docs/study.md, and those that are tried besides
SIZES = (2, 5)  # larger hosts, by their place on the study's ladder
NETWORKS = {"mlp": 8, "cnn": 4, "transformer": 4}  # of an arm, by topology: images and text cost most
RATE_NETWORKS = 16  # small perceptrons cost little
MARGIN = 1.0  # points
SAMPLES, EPOCHS, SEEDS = 1000, 12, 4  # of a model of transformers


@dataclass(frozen=True)
class Cell:
    """A population: a task with a preset, perhaps at another budget or with a host of another size."""

    preset: str
    task: str
    budget: int | None = None  # in units of the study; None is the preset's own
    size: int = 0  # on the ladder of the host; 0 is the task's own
    controller: str = PRETRAINED
    usual_rate: bool = False  # for all networks, in place of random ones where the preset draws those

    def config(self, networks: int | None = None) -> RunConfig:
        """Return its settings; the networks are none that anything was trained or chosen on."""
        entry = next(entry for entry in task_table() if entry.name == self.task)
        changes = {"task": self.task, "members": NETWORKS[entry.topology], "seed": FRESH, "device": "cpu"}
        if self.controller == RATES:
            changes |= {"members": RATE_NETWORKS} | ({"episode.rate_span": 1} if self.usual_rate else {})
        if networks:
            changes |= {"members": networks}
        if self.size:
            changes |= {f"host.{k}": v for k, v in LADDERS[entry.host.preset][self.size].items()}
        config = load_config(preset=self.preset, overrides=[f"{k}={v}" for k, v in changes.items()])
        if self.budget is None:
            return config
        steps = config.episode.steps * self.budget // FULL
        return config.model_copy(update={"episode": config.episode.model_copy(update={"steps": steps})})


def cells() -> list[Cell]:
    """List all populations: the presets' own budgets first, and cheap tasks first."""
    tables = [entry.name for entry in task_table() if entry.topology == "mlp"]
    tasks = tables + [entry.name for entry in task_table() if entry.topology != "mlp"]
    # The host of the demo takes numbers, and text is tokens.
    found = [Cell(p, task) for p in preset_names() for task in tasks if (p, task) != (DEMO, "text")]
    found += [Cell(COMPUTE, task, budget) for task in tasks for budget in SMALLER]
    found += [Cell(COMPUTE, task, max(SMALLER), size) for task in tables for size in SIZES]
    for usual in (False, True):
        found += [Cell(DEMO, task, controller=RATES, usual_rate=usual) for task in tasks if task != "text"]
    return found


def measure(cell: Cell, networks: int | None = None) -> dict[str, Any]:
    """Train both arms of a cell, unless the controller leaves it alone; return accuracies in points.

    With a larger host the controller is forced to act.
    """
    began, config = time.perf_counter(), cell.config(networks)
    asked = {STATIC: Fixed(), cell.controller: load_controller(cell.controller)}
    environment, _, why = prepare(config, asked)
    record: dict[str, Any] = {**asdict(cell), "why": "".join(why), "accuracy": {}}
    if not why or cell.size:
        runs = compare(environment, asked)
        record["accuracy"] = {run.name: _points(run.test.accuracy) for run in runs}
        record["parameters"] = {run.name: round(float(run.record.parameters[-1].mean())) for run in runs}
        record["gigaflops"] = {run.name: round(float(run.record.flops.mean()) / 1e9, 3) for run in runs}
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def measure_table(name: str, networks: int = RATE_NETWORKS) -> dict[str, Any]:
    """Train from the usual rate on a held-out table, each network on its own split; the rule as well."""
    began, config = time.perf_counter(), load_config(preset=DEMO, overrides=["device=cpu"])
    spec = at_rate(spec_for(config, splits_of(name)[:networks]), 1.0)
    arms = {STATIC: Static(), RATES: load_controller(RATES), RULE: load_controller(RULE)}
    accuracy = test_accuracy(spec, arms)
    seconds = round(time.perf_counter() - began, 1)
    return {"table": name, "controller": RATES, "why": "", "accuracy": accuracy, "seconds": seconds}


def _points(shares: Sequence[float] | NDArray[Any]) -> list[float]:
    return [round(100.0 * float(share), 3) for share in shares]


# ---- models of other people --------------------------------------------------------------------------------


def resnet(task: Task) -> nn.Module:
    """A small ResNet of transformers."""
    hf = require("transformers", "transformers", "the models of other people")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    config = hf.ResNetConfig(num_channels=1, num_labels=task.num_classes, **sizes)
    model: nn.Module = hf.ResNetForImageClassification(config)
    return model


def vit(task: Task) -> nn.Module:
    """A small vision transformer of transformers."""
    hf = require("transformers", "transformers", "the models of other people")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    image = {"image_size": task.input_shape[-1], "patch_size": 2, "num_channels": 1}
    model: nn.Module = hf.ViTForImageClassification(
        hf.ViTConfig(num_labels=task.num_classes, **sizes, **image)
    )
    return model


def gpt2(task: Task) -> nn.Module:
    """A small GPT-2 of transformers."""
    hf = require("transformers", "transformers", "the models of other people")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": task.input_shape[0]}
    config = hf.GPT2Config(vocab_size=task.num_classes, **sizes, bos_token_id=0, eos_token_id=0)
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


MODELS: dict[str, tuple[Callable[[Task], nn.Module], str]] = {
    "ResNet": (resnet, "digits"),
    "ViT": (vit, "digits"),
    "GPT-2": (gpt2, "text"),
}


def loss_and_score(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and accuracy of a batch; outputs are those of transformers."""
    inputs, targets = batch
    logits = model(inputs).logits.flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten()), (logits.argmax(1) == targets.flatten()).float().mean()


def measure_model(name: str, seeds: int = SEEDS, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train a model of transformers plainly, with Tamiyo, and with Tamiyo forced to act."""
    began, (make, data) = time.perf_counter(), MODELS[name]
    task, accuracy = load_task(data), defaultdict[str, list[float]](list)
    train, val = (torch.utils.data.TensorDataset(s.inputs, s.targets) for s in (task.train, task.validation))
    parts = {"train": torch.utils.data.Subset(train, range(SAMPLES)), "val": val}
    test, why = task.test(), ""
    for seed in range(FRESH, FRESH + seeds):
        torch.manual_seed(seed)
        model = make(task)
        shared = {"epochs": epochs, "seed": seed, "beyond": True, "step": loss_and_score, "progress": False}
        alone = esper.grow(model, **parts, controller=PRETRAINED, **shared)
        forced = esper.grow(model, **parts, controller=PRETRAINED, force=True, baseline=True, **shared)
        plain = esper.grow(model, **parts, controller=STATIC, **shared)
        why = " ".join(alone.report().split())
        # Forced growth costs more, so that it has a plain run of its own FLOPs to be compared with.
        assert forced.baseline is not None
        arms = {STATIC: plain, PRETRAINED: alone, FORCED: forced, f"{STATIC} for {FORCED}": forced.baseline}
        for arm, grown in arms.items():
            with torch.no_grad():
                score = loss_and_score(grown.model.eval(), (test.inputs, test.targets))[1]
            accuracy[arm] += _points([float(score)])
    return {
        "model": name, "task": data, "controller": PRETRAINED, "why": why, "accuracy": accuracy,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


# ---- the tables --------------------------------------------------------------------------------------------


def gap_of(record: Mapping[str, Any], arm: str | None = None) -> tuple[float, float]:
    """Return the controller, or another arm, minus static in points, with the 95 % interval over networks.

    Both are 0 where the controller leaves a population alone, unless it is named as the arm.
    """
    if arm is None and record["why"] and "preset" in record:
        return 0.0, 0.0
    accuracy, opponent = record["accuracy"], f"{STATIC} for {FORCED}" if arm == FORCED else STATIC
    return paired_interval(accuracy[arm or record["controller"]], accuracy[opponent])


def is_harmed(gap: tuple[float, float]) -> bool:
    """Return whether an arm is behind by more than the margin, and by more than noise."""
    mean, half = gap
    return mean < -MARGIN and mean + half < 0


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the gaps of the cells in which a controller acts, those of models, and the counts."""
    growth = [r for r in records if "preset" in r and r["controller"] == PRETRAINED]
    rates = [r for r in records if "preset" in r and r["controller"] == RATES]
    models, tables = ([r for r in records if kind in r] for kind in ("model", "table"))
    # Every population in which Tamiyo acts has the preset COMPUTE.
    columns = {f"×{budget or FULL}": (budget, 0) for budget in (*SMALLER, None)}
    columns |= {f"×{max(SMALLER)}, host {size + 1} of 6, forced": (max(SMALLER), size) for size in SIZES}
    own = {(r["task"], r["budget"], r["size"]): gap_of(r, PRETRAINED) for r in growth if r["accuracy"]}
    names = dict.fromkeys(task for task, *_ in own)
    rows = {name: [own.get((name, *column)) for column in columns.values()] for name in names}
    lines = _table(f"{PRETRAINED} minus {STATIC}", columns, rows)
    lines += _table(
        f"{PRETRAINED} minus {STATIC}, models",
        ("as shipped", "forced to act"),
        {f"{r['model']}, {r['task']}": [gap_of(r), gap_of(r, FORCED)] for r in models},
    )
    rates_of = {(r["task"], r["usual_rate"]): gap_of(r) for r in rates if r["accuracy"]}
    lines += _table(
        f"{RATES} minus {STATIC}",
        ("random rates", "the usual rate"),
        {name: [rates_of.get((name, usual)) for usual in (False, True)] for name, _ in rates_of},
    )
    ahead = {r["table"]: [gap_of(r), gap_of(r, RULE)] for r in tables}
    means = [[gap[0] for gap in gaps] for gaps in zip(*ahead.values(), strict=True)]  # [arms, tables]
    ahead["mean, tables as a random effect"] = [mean_interval(arm) for arm in means]
    lines += _table(f"minus {STATIC}, held-out tables", (RATES, RULE), ahead)
    if means:
        lines += [f"{RATES} minus {RULE} over these tables: {interval(*paired_interval(*means), '+.2f')}", ""]
    lines += ["| cells | all | it acts | harmed | more than a point behind is not excluded |"]
    lines.append("|---|---:|---:|---:|---:|")
    groups = {
        f"{PRETRAINED}: tasks with presets": [r for r in growth if r["budget"] is None],
        f"{PRETRAINED}: smaller budgets": [r for r in growth if r["budget"] is not None and not r["size"]],
        f"{PRETRAINED}: larger hosts": [r for r in growth if r["size"]],
        f"{PRETRAINED}: models of other people": models,
        f"{RATES}: tasks with the preset {DEMO}": [r for r in rates if not r["usual_rate"]],
        f"{RATES}: the same from the usual rate": [r for r in rates if r["usual_rate"]],
        f"{RATES}: held-out tables from the usual rate": tables,
    }
    for name, group in groups.items():
        gaps = [gap_of(record) for record in group]
        acts = sum(not record["why"] for record in group)
        unsure = sum(not mean - half > -MARGIN for mean, half in gaps)
        lines.append(f"| {name} | {len(group)} | {acts} | {sum(map(is_harmed, gaps))} | {unsure} |")
    return "\n".join(lines)


def _table(
    title: str, columns: Iterable[str], rows: Mapping[str, Sequence[tuple[float, float] | None]]
) -> list[str]:
    """Return the lines of a table of gaps, and an empty one."""
    titles = [title, *columns]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for name, gaps in rows.items():
        cells = ["" if gap is None else interval(*gap, "+.2f") for gap in gaps]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return [*lines, ""]


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells one record from another."""
    names = ("model", "table", "controller", "preset", "task", "budget", "size", "usual_rate")
    return tuple(record.get(name) for name in names)


def judge(done: set[tuple[Any, ...]], quick: bool) -> Iterator[dict[str, Any]]:
    """Measure every cell that is not done."""
    found, tables, models = cells(), list(HELD_OUT), list(MODELS)
    if quick:
        found = [cell for cell in found if cell.task == "spirals" and cell.budget in (None, 1)]
        tables, models = tables[:1], models[:1]
    for name in models:
        if key_of({"model": name, "task": MODELS[name][1], "controller": PRETRAINED}) not in done:
            yield measure_model(name, *((2, 3) if quick else ()))
    for name in tables:
        if key_of({"table": name, "controller": RATES}) not in done:
            yield measure_table(name, *((2,) if quick else ()))
    for cell in found:
        if key_of(asdict(cell)) not in done:
            yield measure(cell, 2 if quick else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print the tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each cell")
    parser.add_argument("--quick", action="store_true", help="one task, two networks, one model")
    parser.add_argument("--read", type=Path, help="a file to report on")
    given = parser.parse_args(arguments)
    path = given.read or given.out
    if path is None:
        parser.error("give --out to train, or --read to report")
    torch.set_num_threads(1)
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if given.read is None:
        with path.open("a") as file:
            for record in judge({key_of(record) for record in records}, given.quick):
                print(json.dumps(record), file=file, flush=True)
                records.append(record)
                cell = " ".join(str(part) for part in key_of(record) if part)
                gap = "left alone" if record["why"] else interval(*gap_of(record), "+.2f")
                print(f"{cell}: {gap}, {record['seconds']} s", flush=True)
    print(report(records))


if __name__ == "__main__":
    command_line.run(main)
