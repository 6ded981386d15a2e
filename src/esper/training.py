"""A training run: rounds, and everything that they leave in the run folder.

After every round, in this order: events, metrics, film, checkpoint. The checkpoint is the truth: a run that
is killed at any moment goes on from the last one to the same bits as a run that was never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from esper.builders import LEARNER, agent_schema, make_trainer
from esper.config import RunConfig, load_config, saved_config
from esper.controllers import checkpoint_config
from esper.foundation.config_files import dump, parse_override, parse_yaml
from esper.foundation.devices import choose_device, cpu_threads
from esper.foundation.errors import UserError
from esper.foundation.interrupts import StopRequest
from esper.simic.events import episode_events
from esper.simic.films import film_reel
from esper.simic.lanes import lanes_of
from esper.simic.steps import StepResult
from esper.simic.trainer import Round, Trainer
from esper.telemetry.checkpoints import CheckpointError, CheckpointStore, load_checkpoint
from esper.telemetry.live import QuietView
from esper.telemetry.run_folder import Kind, RunFolder
from esper.telemetry.sinks import Sink, open_sinks

MAY_CHANGE = ("rounds", "device", "telemetry")  # settings of a run that has begun; the others decide its bits


class TrainingRun:
    """A trainer and the folder that it writes to. Make one with `start` or `resume`."""

    def __init__(self, config: RunConfig, folder: RunFolder, trainer: Trainer) -> None:
        self.config = config
        self.folder = folder
        self.trainer = trainer
        self.store = CheckpointStore(
            folder.checkpoints_path, config.telemetry.checkpoint_every, config.telemetry.checkpoints_kept
        )
        self._sinks: Sequence[Sink] = ()

    @classmethod
    def start(
        cls,
        config: RunConfig,
        out: Path,
        command: Sequence[str] | None = None,
        kind: Kind = "train",
        request: Mapping[str, Any] | None = None,
    ) -> TrainingRun:
        """A new run in a new folder, which is made once everything else is known to work."""
        trainer = make_trainer(config, choose_device(config.device))
        folder = RunFolder.create(
            out, config=dump(config), seed=config.seed, kind=kind, request=request, command=command
        )
        return cls(config, folder, trainer)

    @classmethod
    def resume(
        cls,
        path: Path,
        device: str | None = None,
        checkpoint: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> TrainingRun:
        """A run that was stopped, from its last checkpoint or from the one that is given.

        `overrides` change settings of MAY_CHANGE for good: `rounds=200` extends the run. Raises UserError for
        a folder of another kind, for any other setting, and where rounds would be lost.
        """
        with ExitStack() as undo:
            folder = undo.enter_context(RunFolder.open(path))
            if folder.kind not in ("train", "demo"):
                raise UserError(f"{path} holds a run of 'esper {folder.kind}', which trains nothing")
            before = read_config(folder)
            config = changed(before, overrides)
            run = cls(config, folder, make_trainer(config, choose_device(device or config.device)))
            if checkpoint is not None or run.store.last.exists():
                run.load(checkpoint or run.store.last)
            else:
                folder.check_unbegun()
            if config.rounds < run.trainer.rounds_done:
                raise UserError(
                    f"rounds is {config.rounds}, and {run.trainer.rounds_done} are done; give at least that"
                )
            if config != before:
                folder.write_config(dump(config))
            folder.truncate_after(run.trainer.rounds_done)
            undo.pop_all()  # all is well: the folder stays open
        return run

    def load(self, path: Path) -> None:
        """Take the state of the run from a checkpoint of it."""
        checkpoint = load_checkpoint(path, agent_schema(), self.trainer.environment.device)
        if _fixed(checkpoint_config(checkpoint, path)) != _fixed(self.config):
            raise CheckpointError(
                f"{path} belongs to a run with other settings than {self.folder.path / 'config.yaml'}; "
                "give a checkpoint of this run"
            )
        try:
            self.trainer.load_state_dict(checkpoint.tensors)
        except (ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{path} does not fit this run: {error}") from None

    def run(self, view: QuietView, stop: StopRequest) -> None:
        """Play the rounds that are left, or those until a stop is asked for, and keep what each leaves."""
        steps = self.config.episode.steps
        begun, ticks = self.trainer.rounds_done, count(1)

        def show(result: StepResult) -> None:
            view.progress(begun + next(ticks) / steps)

        self._sinks = open_sinks(
            self.config.telemetry.sinks,
            self.folder,
            self.config.model_dump(mode="json"),
            self.trainer.rounds_done,
        )
        with ExitStack() as after, cpu_threads(self.config.threads):
            for sink in self._sinks:
                after.callback(sink.close)
            while not self.finished and not stop.requested:
                self._keep(self.trainer.play_round(show)[LEARNER], view)

    def _keep(self, round: Round, view: QuietView) -> None:
        """Write a finished round and show it."""
        telemetry, number = self.config.telemetry, round.summary.round
        if telemetry.events:
            self.folder.append_events(episode_events(round.record, number))
        for sink in self._sinks:
            sink.write(round.summary)
        reel = film_reel(round.record, telemetry.film_members, number) if telemetry.film_members else None
        if reel is not None:
            self.folder.write_film(reel)
        if telemetry.lanes:
            self.folder.lanes.write(lanes_of(round.record, self.trainer.environment, number), telemetry.lanes)
        record = {"config": self.config.model_dump(mode="json")}
        self.store.save(
            number, self.trainer.state_dict(), record, agent_schema(), score=round.summary.return_mean
        )
        view.update(round.summary, reel)

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.trainer.rounds_done >= self.trainer.rounds


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The settings of a run that has begun with others of MAY_CHANGE; UserError names any that may not."""
    for override in overrides:
        (name,) = parse_override(override)
        if name in RunConfig.model_fields and name not in MAY_CHANGE:
            raise UserError(
                f"--set is {override!r}: a run that has begun keeps its {name}; what may change is "
                f"{', '.join(MAY_CHANGE)}: start a new run with 'esper train'"
            )
    return load_config(overrides=overrides, base=config)


def _fixed(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(exclude=set(MAY_CHANGE))


def read_config(folder: RunFolder) -> RunConfig:
    """The settings of a run, or a sentence about why they cannot be used."""
    where = str(folder.path / "config.yaml")
    data = parse_yaml(folder.config_text(), where)
    if not isinstance(data, dict):
        raise UserError(f"{where} is damaged: it holds no settings")
    try:
        return saved_config(data)
    except UserError as error:
        raise UserError(f"{where} was written by another version of esper, or is damaged: {error}") from None
