"""The run folder of an `esper.grow`: written after every epoch, and restored after any kill.

After an epoch come events, trajectories and curves, which are replaced whole, then a line of metrics, then
the checkpoint. The checkpoint is the truth: what was written after it is dropped when the growth goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from esper.growing.data import is_pair, length_of
from esper.growing.result import GROWN, Grown, save_archive, save_network
from esper.lifecycle.actions import Op
from esper.runs.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from esper.runs.run_folder import CALL, RunFolder
from esper.runs.schema import Growth as GrowthFile
from esper.runs.schema import RoundSummary, SavedNetwork, SavedSlot
from esper.runs.sinks import Sink, make_sinks
from esper.simic.rollout import EpisodeRecord
from esper.simic.telemetry import build_trajectories, episode_events
from esper.utils.errors import UserError, one_line
from esper.watch import report

if TYPE_CHECKING:
    from esper.growing.api import Growth

SCHEMA = "growth-3"  # of the checkpoints
MAY_CHANGE = ("device", "progress", "on_epoch", "sinks")  # settings that decide no bit
MAY_DIFFER = ("epochs", "lr")  # arguments that a resumed growth may have anew, which is noted
_BODIES = "environment.population."  # prefix of the present weights and moments in a state
_SNAPSHOTS = ("environment.governor.bodies.", "ending.best.bodies.")  # prefixes of earlier ones


class GrowFolder:
    """Writes one growth to its `folder`, which is the caller's to close. Make one with `begin`."""

    def __init__(self, folder: RunFolder, growth: GrowthFile):
        self.folder, self.growth = folder, growth
        self._sinks: list[Sink] = []
        self._seconds, self._since = 0.0, time.monotonic()

    @classmethod
    def begin(
        cls, out: Path, resume: bool, growth: Growth, model: Any, data: tuple[Any, Any], asked: dict[str, Any]
    ) -> GrowFolder:
        """Create a folder or, with `resume`, open the one that was begun with the same arguments.

        model, data: as the user gave them. asked: the other arguments by name, for config.yaml.
        Raises a UserError for a folder that was begun by something else, or with other arguments.
        """
        name = describe_argument(model)
        config = {
            "task": name,
            "model": {"parameters": growth.environment.host_parameters, "slots": list(growth.slot_names)},
            "train": _describe_data(data[0]),
            "val": _describe_data(data[1]),
            **{key: describe_argument(value) for key, value in asked.items()},
        }
        begun = GrowthFile(
            model=name,
            controller=growth.controller_name,
            score_name=growth.bodies.criterion.score_name,
            epochs=asked["epochs"],
            finished=False,
            curves=(),
        )
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        if resume and (out / "config.yaml").exists():
            folder = RunFolder.read(out)
            if not folder.from_python:
                raise UserError(f"{out} holds a run of 'esper {folder.kind}', not of {CALL}; choose another")
            before = folder.settings()
            # All checks come before `open`, which repairs and locks: a refusal leaves the folder as it was.
            folder.check_settings(before, config, (*MAY_CHANGE, *MAY_DIFFER))
            folder.check_checkpoint(folder.checkpoints_path / f"{GROWN}.safetensors")
            opened = RunFolder.open(out)
            # The config is written anew, so that the next resume compares with what holds now.
            for key in (key for key in MAY_DIFFER if before.get(key) != config.get(key)):
                was, now = (settings.get(key, "the default") for settings in (before, config))
                growth.remarks.append(f"{key} is {now} since the run was resumed; it was begun with {was}")
                opened.write_config(text)
            return cls(opened, begun)
        if resume:
            growth.remarks.append(f"{out} holds no run that could be resumed, so it begins anew")
        request = {"call": CALL, "controller": begun.controller}
        seed = asked["seed"]
        return cls(RunFolder.create(out, kind="grow", request=request, config=text, seed=seed), begun)

    @contextmanager
    def opened(self, sinks: Sequence[str]) -> Iterator[None]:
        """Hold the folder and its sinks open."""
        done = max((line["round"] for line in self.folder.metrics_file), default=0)
        with self.folder, ExitStack() as after:
            made = make_sinks(sinks, self.folder, self.folder.settings(), done)
            self._sinks = [after.enter_context(sink) for sink in made]
            yield

    def restore(self, name: str, run: Growth) -> None:
        """Restore a run from its checkpoint, if there is one."""
        path = self._checkpoint(name)
        if not path.exists():
            return
        saved = load_checkpoint(path, SCHEMA)
        try:
            again = {key: saved.tensors[_current_name(key)].clone() for key in saved.record["repeated"]}
            run.load_state_dict(saved.tensors | again)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not fit this model ({error}); give the model and data that {self.folder.path} "
                "was begun with"
            ) from None
        steps, done = run.environment.steps, run.environment.clock
        if done > steps:
            raise UserError(f"epochs is {steps}, and {done} are over in {self.folder.path}; give no fewer")
        run.seconds = list(saved.record.get("epochs", ()))
        if name == GROWN:
            self._seconds = float(saved.record["seconds"])
            self.folder.metrics_file.truncate_after(done)

    def save(self, name: str, run: Growth) -> None:
        """Write everything that is known after an epoch of a run."""
        seconds = self._seconds + time.monotonic() - self._since
        if name == GROWN:
            record = replace(run.episode.record(), slot_ids=run.slot_names)
            self._write_history(record, run)
            self.folder.write(replace(self.growth, curves=[Grown.curve_of(record, GROWN)]))
            summary = _epoch_summary(record, run.environment.steps, seconds)
            self.folder.metrics_file.append(summary)
            for sink in self._sinks:
                sink(summary)
        tensors = run.state_dict()
        # After a good epoch the governor's snapshot equals the present weights and moments, and after the
        # best one that of the best epoch does too: what is equal is written once.
        repeated = []
        for key, value in tensors.items():
            own = tensors.get(_current_name(key))
            if own is not None and own.dtype == value.dtype and torch.equal(own, value):
                repeated.append(key)
        kept = {key: tensors[key] for key in tensors.keys() - set(repeated)}
        known = {"seconds": seconds, "epochs": run.seconds, "repeated": repeated}
        save_checkpoint(self._checkpoint(name), kept, known, SCHEMA)

    def finish(self, grown: Grown, run: Growth, finished: bool) -> None:
        """Write the grown model, the curves and the report; a run that is not finished may still go on."""
        self._write_history(replace(grown.record, slot_ids=grown.slot_names), run)
        curves, verdicts = grown.curves(), grown.verdicts()
        self.folder.write(replace(self.growth, curves=curves, finished=finished, verdicts=verdicts))
        load = 'model = torch.export.load("network.pt2").module()   # needs torch alone'
        archive = self.folder.path / "network.pt2"
        archive.unlink(missing_ok=True)  # of an earlier ending, from which this run went on
        if run.example:
            try:
                save_archive(grown.model, run.example, archive)
            except Exception as error:  # whatever torch.export raises for a user's model
                load = f"# there is no network.pt2: {one_line(error)}"
        else:
            load = "# there is no network.pt2: what the model is called with is known to your step alone"
        tensors = 'tensors = safetensors.torch.load_file("network.safetensors")   # its state_dict'
        python = f"```python\nimport safetensors.torch, torch\n{load}\n{tensors}\n```"
        page = f"# A {grown.name} network\n\n{grown.report()}\n\n{python}\n\n```\n{grown.model}\n```\n"
        save_network(self.folder.path, grown.model, _saved_network(grown, self.growth), page)
        report.write_report(self.folder)

    def _write_history(self, record: EpisodeRecord, run: Growth) -> None:
        self.folder.replace_events(episode_events(record, 0))
        self.folder.trajectories.write(build_trajectories(record, run.host_parts, 0))

    def _checkpoint(self, name: str) -> Path:
        return self.folder.checkpoints_path / f"{name}.safetensors"


def _current_name(name: str) -> str:
    """Return the name of the present tensor for one of a snapshot; "" for any other tensor."""
    prefix = next((prefix for prefix in _SNAPSHOTS if name.startswith(prefix)), None)
    return "" if prefix is None else _BODIES + name.removeprefix(prefix)


def describe_argument(value: Any) -> Any:
    """Return an argument as config.yaml holds it: plain values as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe_argument(v) for key, v in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [describe_argument(v) for v in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_data(data: Any) -> str | None:
    """Describe data without reading them."""
    if data is None:
        return None
    if is_pair(data):
        return f"{len(data[0]):,} samples of shape {list(data[0].shape[1:])}"
    size = length_of(getattr(data, "dataset", data))
    return type(data).__name__ if size is None else f"{type(data).__name__} of {size:,}"


def _epoch_summary(record: EpisodeRecord, epochs: int, seconds: float) -> RoundSummary:
    """Return the latest epoch as a line of metrics."""
    done = record.num_steps
    return RoundSummary(
        round=done,
        rounds=epochs,
        members=1,
        member_epochs=done,
        seconds=seconds,
        accuracy_mean=float(record.accuracy[-1, 0]),
        parameter_ratio_mean=float(record.parameter_ratio[-1, 0]),
        op_shares={op.name: float((record.executed_op[-1] == op).mean()) for op in Op},
        extra={
            "training_loss": float(record.training_loss[-1, 0]),
            "validation_loss": float(record.loss[-1, 0]),
        },
        anomalies=["training broke and was taken back"] if record.panicked[-1].any() else (),
    )


def _saved_network(grown: Grown, growth: GrowthFile) -> SavedNetwork:
    record = grown.record
    by_slot = {item.slot: item for item in grown.added}
    return SavedNetwork(
        task=growth.model,
        host=growth.model,
        controller=growth.controller,
        member=0,
        members=1,
        steps=record.num_steps,
        host_parameters=grown.host_parameters,
        parameters=grown.parameters,
        validation_accuracy=float(record.accuracy[-1, 0]),
        test_accuracy=float("nan"),
        slots=[
            SavedSlot(name, "FOSSILIZED", item.blueprint, item.blend, 1.0, item.contribution)
            if (item := by_slot.get(name))
            else SavedSlot(name, "DORMANT")
            for name in grown.slot_names
        ],
        changes=[
            *(grown.remarks[:1] if grown.grew_into else ()),
            *(line[2:] for line in grown.diff().splitlines() if line.startswith("+ ")),
        ],
    )
