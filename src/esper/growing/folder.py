"""The run folder of an `esper.grow`: written after every epoch, and taken up again after any kill.

After an epoch come events, lanes and curves, which are replaced whole, then a line of metrics, then the
checkpoint. The checkpoint is the truth: what was written after it is forgotten when the growth goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from esper.growing.course import Course, Prepared
from esper.growing.data import is_pair
from esper.growing.exporting import save_archive, save_network
from esper.growing.result import GROWN, Grown
from esper.lifecycle.actions import Op
from esper.runs.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from esper.runs.run_folder import CALL, RunFolder
from esper.runs.schema import Growth, RoundSummary, SavedNetwork, SavedSlot
from esper.simic.rollout import EpisodeRecord
from esper.simic.telemetry import episode_events, lanes_of
from esper.utils.errors import UserError, one_line
from esper.utils.settings import parse_yaml
from esper.watch import report

SCHEMA = "growth-1"  # of the checkpoints
MAY_CHANGE = ("device", "progress", "on_epoch", "time_limit")  # settings that decide no bit
_FORMER = ("engine", "control")  # arguments of earlier versions, which their folders name
_BODIES = "environment.population."  # where a state has the weights of now, and where older ones
_SNAPSHOTS = ("environment.governor.bodies.", "ending.best.bodies.")
_SLASH = "\u2215"  # stands for "/" in the names of a checkpoint, where that has a meaning


class GrowFolder:
    """What one growth leaves in its `folder`, which is the caller's to close. Make one with `begin`."""

    def __init__(self, folder: RunFolder, growth: Growth):
        self.folder, self.growth = folder, growth
        self._seconds, self._since = 0.0, time.monotonic()

    @classmethod
    def begin(
        cls, out: Path, resume: bool, config: Mapping[str, Any], seed: int, growth: Growth
    ) -> GrowFolder:
        """A new folder; or, with `resume`, the one that is there already, if it was begun with the same
        arguments. Raises a UserError in one sentence otherwise.
        """
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        if resume and (out / "config.yaml").exists():
            folder = RunFolder.read(out)
            _check_same(folder, config)
            found = cls(RunFolder.open(out), growth)
            found._check_unbegun()
            return found
        request = {"call": CALL, "controller": growth.controller}
        return cls(RunFolder.create(out, kind="grow", request=request, config=text, seed=seed), growth)

    def restore(self, arm: str, course: Course) -> None:
        """Put a course to where its last checkpoint has it; nothing where there is none."""
        path = self._checkpoint(arm)
        if not path.exists():
            return
        saved = load_checkpoint(path, SCHEMA)
        try:
            tensors = {name.replace(_SLASH, "/"): value for name, value in saved.tensors.items()}
            again = {n: tensors[str(_own(n))].clone() for n in saved.record["repeated"]}
            course.load_state_dict(tensors | again)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not fit this model ({error}); give the model and data that {self.folder.path} "
                "was begun with"
            ) from None
        if arm == GROWN:
            self._seconds = float(saved.record["seconds"])
            self.folder.metrics_file.truncate_after(course.epochs_done)

    def keep(self, arm: str, course: Course) -> None:
        """Another epoch of an arm is over: write everything that is known now."""
        seconds = self._seconds + time.monotonic() - self._since
        if arm == GROWN:
            record = replace(course.record(), slot_ids=course.prepared.slot_names)
            self.tell_story(record, course.prepared)
            self.folder.write(self.growth_of(record, course.prepared))
            self.folder.append_metrics(epoch_summary(record, course.environment.steps, seconds))
        tensors = course.state_dict()
        repeated = [name for name, value in tensors.items() if _repeats(name, value, tensors)]
        kept = {name.replace("/", _SLASH): tensors[name] for name in tensors.keys() - set(repeated)}
        save_checkpoint(self._checkpoint(arm), kept, {"seconds": seconds, "repeated": repeated}, SCHEMA)

    def tell_story(self, record: EpisodeRecord, prepared: Prepared) -> None:
        """Write the events and lanes of the epochs so far."""
        self.folder.replace_events(episode_events(record, 0))
        self.folder.lanes.write(lanes_of(record, prepared.parts, 0))

    def growth_of(self, record: EpisodeRecord, prepared: Prepared) -> Growth:
        """The record for growth.json while the growth goes on."""
        samples = prepared.environment.validation_samples
        return replace(self.growth, curves=[Grown.curve_of(record, GROWN)], validation_samples=samples)

    def finish(self, grown: Grown, prepared: Prepared, finished: bool) -> None:
        """Write the grown model, the curves and the report; one that is not finished may still go on."""
        story = replace(grown.record, slot_ids=grown.slot_names)
        self.tell_story(story, prepared)
        growth = replace(
            self.growth_of(story, prepared),
            curves=grown.curves(),
            finished=finished,
            verdicts=grown.verdicts(),
        )
        self.folder.write(growth)
        reason = _exported(grown.model, prepared.example, self.folder.path / "network.pt2")
        network = _saved(grown, self.growth)
        save_network(self.folder.path, grown.model, network, _described(grown, reason))
        report.write_report(self.folder)

    def _checkpoint(self, arm: str) -> Path:
        return self.folder.checkpoints_path / f"{arm}.safetensors"

    def _check_unbegun(self) -> None:
        if not self._checkpoint(GROWN).exists() and len(list(self.folder.metrics_file)) > 1:
            self.folder.close()
            raise UserError(
                f"{self.folder.path} holds finished epochs, and {self._checkpoint(GROWN)} is missing: to go "
                "on would erase them; choose another folder"
            )


def _own(name: str) -> str | None:
    """What a tensor of a kept snapshot is called in the bodies of now; None for any other tensor."""
    kept = next((prefix for prefix in _SNAPSHOTS if name.startswith(prefix)), None)
    return None if kept is None else _BODIES + name.removeprefix(kept)


def _repeats(name: str, value: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a snapshot is the one of now, which is enough to write once."""
    own = tensors.get(_own(name) or "")
    return own is not None and own.dtype == value.dtype and torch.equal(own, value)


def described(value: Any) -> Any:
    """An argument as config.yaml holds it: plain values as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(v) for key, v in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def about_data(data: Any) -> str | None:
    """What is known of data without reading them."""
    if data is None:
        return None
    if is_pair(data):
        return f"{len(data[0]):,} samples of shape {list(data[0].shape[1:])}"
    try:
        size = f" of {len(getattr(data, 'dataset', data)):,}"
    except TypeError:
        size = ""
    return f"{type(data).__name__}{size}"


def epoch_summary(record: EpisodeRecord, epochs: int, seconds: float) -> RoundSummary:
    """The latest epoch as a line of metrics."""
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


def _check_same(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Raise a UserError where a folder was begun by something else, or with other arguments."""
    if not folder.from_python:
        raise UserError(
            f"{folder.path} holds a run of 'esper {folder.kind}', not of {CALL}; choose another folder"
        )
    before = parse_yaml(folder.config_text(), str(folder.path / "config.yaml"))
    before = before if isinstance(before, dict) else {}
    for key in (key for key in {**before, **config} if key not in (*MAY_CHANGE, *_FORMER)):
        if before.get(key) != config.get(key):
            raise UserError(
                f"{key} is {config.get(key)!r}, and {folder.path} was begun with {before.get(key)!r}; give "
                "the same to go on, or choose another folder"
            )


def _exported(model: nn.Module, example: Sequence[Any], path: Path) -> str | None:
    """Write the torch.export archive; the reason where the model cannot be exported."""
    if not example:
        return "what the model is called with is known to your step alone"
    try:
        save_archive(model, example, path)
    except Exception as error:  # whatever torch.export says about a stranger's model
        return one_line(error)
    return None


def _described(grown: Grown, reason: str | None) -> str:
    load = (
        'model = torch.export.load("network.pt2").module()   # needs torch alone'
        if reason is None
        else f"# there is no network.pt2: {reason}"
    )
    tensors = 'tensors = safetensors.torch.load_file("network.safetensors")   # its state_dict'
    python = f"```python\nimport torch\n{load}\n{tensors}\n```"
    return f"# A grown network\n\n{grown.report()}\n\n{python}\n\n```\n{grown.model}\n```\n"


def _saved(grown: Grown, growth: Growth) -> SavedNetwork:
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
    )
