"""Small runs whose numbers must survive a redesign of the package.

Every scene returns series: arrays of numbers under the names that they have now. Names, files and the order
of fields may change, the numbers may not. Scenes use the command line, `esper.grow` and `load_controller`;
what else they take from the package is marked.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import esper
from esper import cli
from esper.utils.gather import Gather
from tests.growing import models
from tests.shards import on_processes
from tests.tiny import GROWING, TINY, sets

Series = dict[str, np.ndarray]

OBSERVATIONS = Path(__file__).parent / "observations.npz"
ROUNDS = 2
EPOCHS = 5
LEFT_OUT = {"seconds", "folder", "report"}  # times and paths
TASK_OF_HOST = {"mlp": "spirals", "cnn": "digits", "resmlp": "spirals", "resnet": "digits", "gpt": "text"}
QUICK = (  # within ten epochs seeds are planted, blended in, fossilised, pruned and folded
    "episode.steps=10",
    "episode.clock=steps",
    "lifecycle.gates.training_epochs=1",
    "lifecycle.min_prune_age=1",
    "lifecycle.embargo_ticks=1",
)
ARMS = (
    "static",
    "random",
    "heuristic",
    "schedule",
    "schedule:clone@0.1+widen_full@0.3",
    "tamiyo",
    "fixed:hidden=2",
)
GROWTHS = ("clone", "widen_full")
SHARDED = ("resmlp", "shards=2", "members=4", "episode.steps=6")


# ---- how scenes are run and read -------------------------------------------------------------------------


@contextlib.contextmanager
def controlled() -> Iterator[Path]:
    """One thread, a random state of its own and an empty folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), without_report():
            yield Path(folder)
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def without_report() -> Iterator[None]:
    """Write neither the report nor the archive of torch.export: both take longer than a run."""

    def write_nothing(folder: Any) -> Path:
        path: Path = folder.report_path
        return path

    with (
        mock.patch("esper.watch.report.write_report", write_nothing),  # three paths inside the package
        mock.patch("esper.growing.folder.save_archive", return_value=None),
        mock.patch("esper.grown_network.save_archive", return_value=None),
    ):
        yield


def command(*arguments: str | Path) -> str:
    """Run a command of `esper` in this process; return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.run([str(argument) for argument in arguments])
    assert code == 0, f"esper {' '.join(map(str, arguments))} ended with {code}: {out.getvalue()}"
    return out.getvalue()


def columns(records: Sequence[Any], prefix: str) -> Series:
    """Collect the numbers of JSON records by the path of their fields, one series for each path.

    null is NaN. A text counts as the number of other texts that came before it in its series, so that a
    renamed one changes nothing.
    """
    found: dict[str, list[Any]] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in LEFT_OUT:
                    collect(item, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for item in value:
                named = isinstance(item, dict) and "name" in item
                collect(item, f"{path}.{item['name']}" if named else path)
        else:
            found.setdefault(path, []).append(value)

    for record in records:
        collect(record, prefix)
    series = {}
    for path, values in found.items():
        texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
        numbers = [texts.index(v) if isinstance(v, str) else np.nan if v is None else v for v in values]
        series[path] = np.array(numbers, dtype=np.float64)
    return series


def tensors(found: dict[str, Tensor], prefix: str) -> Series:
    return {f"{prefix}.{name}": value.numpy() for name, value in found.items() if name not in LEFT_OUT}


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_training(run: Path) -> Series:
    """Read the last checkpoint, the metrics and the events of a run of `esper train`."""
    return {
        **tensors(load_file(run / "checkpoints" / "last.safetensors"), "checkpoint"),
        **columns(json_lines(run / "metrics.jsonl"), "metrics"),
        **columns(json_lines(run / "events.jsonl"), "events"),
    }


# ---- populations -----------------------------------------------------------------------------------------


def settings_of(host: str) -> tuple[str, ...]:
    patience = "learner.patience=2" if host in ("resmlp", "resnet", "gpt") else "learner.patience=0.5"
    learning = ("ppo.gamma=0.995", "telemetry.checkpoint_every=1", patience)
    return (*QUICK, f"rounds={ROUNDS}", f"host.preset={host}", *learning)


def train_in(folder: Path, host: str, *settings: str) -> None:
    task, chosen = TASK_OF_HOST[host], sets(*settings_of(host), *settings)
    command("train", "--quiet", "--task", task, "--out", folder, *chosen)


def train(host: str) -> Series:
    with controlled() as folder:
        train_in(folder / "run", host)
        return read_training(folder / "run")


def train_resumed(host: str) -> Iterator[tuple[str, Series]]:
    """Train to the end, then go on from the checkpoint of the first round."""
    with controlled() as folder:
        train_in(folder / "run", host)
        checkpoint = folder / "run" / "checkpoints" / "round-000001.safetensors"
        command("resume", folder / "run", "--quiet", "--checkpoint", checkpoint)
        yield "from round 1", read_training(folder / "run")


def train_sharded() -> Series:
    with controlled() as folder:
        train_in(folder / "run", *SHARDED)
        return read_training(folder / "run")


def train_in_two_processes() -> Iterator[tuple[str, Series]]:
    """The same in two processes that threads play; tests/test_processes.py has some that talk by gloo."""
    from esper.config import load_config  # two paths inside the package
    from esper.training import TrainingRun

    host, *settings = SHARDED
    task = f"task={TASK_OF_HOST[host]}"
    config = load_config(overrides=[task, *TINY, *settings_of(host), *settings])
    with controlled() as folder:

        def work(gather: Gather) -> None:
            run = TrainingRun.start(config, folder / "run", gather=gather)
            run.run()
            if run.writes:
                run.folder.close()

        on_processes(2, work)
        yield "in two processes", read_training(folder / "run")


def compare() -> Series:
    changed = ("episode.clock=compute", "episode.steps=8", "members=2", "population.validation_samples=64")
    with controlled() as folder:
        arms = ("--controllers", ",".join(ARMS), "--force")
        where = ("--task", "digits", "--out", folder / "run", "--quiet")
        command("compare", *where, *arms, *sets(*QUICK, *changed, tiny=GROWING))
        return columns([json.loads((folder / "run" / "results.json").read_text())], "comparison")


def grow_host(task: str) -> Series:
    """`esper grow`: the weights of the best network of a population."""
    with controlled() as folder:
        recipe = ("--controller", "schedule:clone@0.1+widen_full@0.3", "--members", "8")
        recipe += tuple(sets(*QUICK, "episode.steps=6", tiny=GROWING))
        command("grow", "--quiet", "--task", task, "--out", folder / "run", *recipe)
        return tensors(load_file(folder / "run" / "network.safetensors"), "network")


# ---- models of a user ------------------------------------------------------------------------------------


def grow_model(growth: str, **settings: Any) -> Series:
    """Grow twice at the same slots in float64 by `esper.grow`; the first growth is folded into the model."""
    torch.manual_seed(0)
    if growth == "clone":
        model: nn.Module = models.LanguageModel().double()
        train, val = models.text(32), models.text(16, seed=1)
    else:
        model = models.small_cnn().double()
        train, val = ((x.double(), y) for x, y in (models.images(48), models.images(24, seed=1)))
    grown = esper.grow(
        model,
        train=train,
        val=val,
        controller=f"schedule:{growth}@0.1+{growth}@0.5",
        folds=2,
        epochs=EPOCHS,
        batch_size=16,
        lr=1e-2,
        progress=False,
        **settings,
    )
    assert all(value.dtype in (torch.float64, torch.int64) for value in grown.model.state_dict().values())
    return {
        **tensors(grown.model.state_dict(), "weights"),
        **columns([asdict(epoch) for epoch in grown.history], "history"),
        **columns([asdict(addition) for addition in grown.added], "added"),
    }


def grow(growth: str) -> Series:
    with controlled():
        return grow_model(growth)


def grow_resumed(growth: str) -> Iterator[tuple[str, Series]]:
    """Go on from the folder of a growth as it was between its two growths, and after the second."""
    with controlled() as folder:
        out = folder / "run"

        def copy_folder(epoch: dict[str, float]) -> None:
            if epoch["epoch"] in (2, 4):
                shutil.copytree(out, folder / f"killed in epoch {epoch['epoch']}")

        grow_model(growth, out=out, on_epoch=copy_folder)
        copies = sorted(folder.glob("killed*"))
        assert len(copies) == 2
        for copy in copies:
            yield copy.name, grow_model(growth, out=copy, resume=True)


# ---- the shipped controller ------------------------------------------------------------------------------


def refill(kind: type, values: Iterator[Tensor]) -> Any:
    """Build a record of tensors from its values in the order of its fields, whatever these are called.

    Fields with a default are left to it.
    """
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: next(values) if hints[field.name] is Tensor else refill(hints[field.name], values)
            for field in fields(kind)
            if field.default is MISSING
        }
    )


def tamiyo() -> Series:
    """Actions of the shipped controller on recorded observations, drawn and greedy, with their log-probs."""
    from esper.controllers import load_controller
    from esper.tamiyo.controller import EpisodeInfo  # three paths inside the package
    from esper.tamiyo.policy.action_masks import ActionMasks
    from esper.tamiyo.policy.features import Observation

    recorded = np.load(OBSERVATIONS)
    given = {name: torch.from_numpy(recorded[name]) for name in recorded.files}
    steps, members, slots = given["masks.slot"].shape
    scene = EpisodeInfo(torch.arange(members), slots, 7, torch.device("cpu"))
    found: Series = {}
    with controlled(), torch.no_grad():
        for name in ("tamiyo", "tamiyo:greedy"):
            controller: Any = load_controller(name)
            controller.begin(scene)
            output: dict[str, list[Tensor]] = {"actions": [], "log_prob": [], "value": []}
            for step in range(steps):
                values = iter([value[step] for value in given.values()])
                observation, masks = refill(Observation, values), refill(ActionMasks, values)
                controller.decide(observation, masks, step)
                for key, series in output.items():
                    series.append(
                        getattr(controller._decided, key)
                    )  # private: the decision with its log-probs
            found |= {f"{name}.{key}": torch.stack(series).numpy() for key, series in output.items()}
    return found


SCENES: dict[str, Callable[[], Series]] = {
    **{f"train {host}": partial(train, host) for host in TASK_OF_HOST},
    "train sharded": train_sharded,
    "compare": compare,
    **{f"grow {task}": partial(grow_host, task) for task in ("spirals", "text")},
    **{f"grow by {growth}": partial(grow, growth) for growth in GROWTHS},
    "tamiyo": tamiyo,
}
OF_THIS_PYTHON = ("train gpt", "grow text")  # the task "text" reads the standard library's sources
# Runs that must give the numbers of a scene to the bit, on every machine.
SAME: dict[str, Callable[[], Iterator[tuple[str, Series]]]] = {
    "train resmlp": partial(train_resumed, "resmlp"),
    "train sharded": train_in_two_processes,
    **{f"grow by {growth}": partial(grow_resumed, growth) for growth in GROWTHS},
}
