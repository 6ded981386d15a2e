"""A training run: rounds of the trainer, and what each of them writes to the run folder.

After every round, in this order: events, metrics, trajectories, checkpoint. The checkpoint is the truth: a
run that is killed at any moment goes on from the last one to the same bits as a run that was never stopped.

Of several processes the first one alone has the folder, and sends the others what they begin with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from esper.builders import LEARNER, agent_schema, make_trainer
from esper.config import RunConfig
from esper.controllers import checkpoint_config, conditions_of
from esper.runs.checkpoints import CheckpointError, CheckpointStore, load_checkpoint
from esper.runs.files import disk_errors, write_atomically
from esper.runs.run_folder import RunFolder
from esper.runs.schema import RoundSummary
from esper.runs.sinks import Sink, make_sinks
from esper.simic.telemetry import build_trajectories, describe_host, episode_events
from esper.simic.trainer import Round, Trainer
from esper.utils.devices import cpu_threads, own_device
from esper.utils.errors import UserError
from esper.utils.gather import Gather, all_or_none, any_process, broadcast
from esper.utils.launch import StopRequest
from esper.utils.settings import build, dump

# Settings of a run that has begun; the others decide its bits.
MAY_CHANGE = ("rounds", "device", "telemetry")
Change = Callable[[RunConfig], RunConfig]


class TrainingRun:
    """A trainer and the folder that it writes to. Make one with `start` or `resume`."""

    def __init__(self, config: RunConfig, folder: RunFolder | None, trainer: Trainer) -> None:
        """Put a trainer and its folder together; folder: None in every process but the first."""
        self.config = config
        self.trainer = trainer
        self._folder = folder
        self.rounds_saved = 0  # whose checkpoint is written; set by `run`
        self._sinks: list[Sink] = []
        specs = [shards[0].spec for shards in trainer.environments]
        self._conditions = conditions_of(specs).model_dump(mode="json")  # counts FLOPs: once a run

    @property
    def folder(self) -> RunFolder:
        """Return the run folder; raise RuntimeError in a process that writes nothing."""
        if self._folder is None:
            raise RuntimeError("only the first process of a run has its folder")
        return self._folder

    @property
    def writes(self) -> bool:
        """Return whether this process has the folder."""
        return self._folder is not None

    @property
    def store(self) -> CheckpointStore:
        """Return the checkpoints of the run."""
        return CheckpointStore(self.folder.checkpoints_path, self.config.telemetry.checkpoint_every)

    @classmethod
    def start(cls, config: RunConfig, out: Path, gather: Gather | None = None) -> TrainingRun:
        """Start a run in a new folder, which is created once everything else is known to work.

        `gather`: the processes that share it, each of which calls this; settings are those of the first.
        Without a number of shards there is one for each process.
        """
        gather = gather or Gather()
        config = _broadcast_config(config, gather)
        if config.shards is None and gather.size > 1:
            config = config.model_copy(update={"shards": gather.size})

        def prepare() -> TrainingRun:
            trainer = make_trainer(config, own_device(config.device), gather)
            folder = None if gather.rank else RunFolder.create(out, config=dump(config), seed=config.seed)
            return cls(config, folder, trainer)

        return all_or_none(gather, prepare)

    @classmethod
    def resume(
        cls,
        path: Path,
        device: str | None = None,
        checkpoint: Path | None = None,
        change: Change | None = None,
        gather: Gather | None = None,
    ) -> TrainingRun:
        """Resume a run that was stopped, from its last checkpoint or from the one that is given.

        `change` maps the settings of the folder to those to go on with; those of MAY_CHANGE may differ, and
        are then kept: more rounds extend the run. `gather`: the processes that share it now, as many as there
        are shards or fewer. Raises UserError for a folder of another kind, for any other setting that
        differs, and where rounds would be lost.
        """
        gather = gather or Gather()
        with ExitStack() as undo:

            def open_folder() -> tuple[RunFolder | None, RunConfig]:
                if gather.rank > 0:
                    return None, RunConfig()  # that of the first process replaces it
                folder = undo.enter_context(RunFolder.open(path))
                if folder.kind != "train":
                    raise UserError(f"{path} holds a run of 'esper {folder.kind}', which trains nothing")
                before = read_config(folder)
                changed = change(before) if change else before
                folder.check_settings(before.model_dump(), changed.model_dump(), MAY_CHANGE)
                return folder, changed

            folder, config = all_or_none(gather, open_folder)
            config = _broadcast_config(config, gather)

            def prepare() -> TrainingRun:
                trainer = make_trainer(config, own_device(device or config.device), gather)
                run = cls(config, folder, trainer)
                if folder is not None:
                    run._rewind(checkpoint)
                return run

            run = all_or_none(gather, prepare)
            if gather.size > 1:  # only the first process has read the checkpoint
                state = {name: value.cpu() for name, value in run.trainer.state_dict().items()}
                run.trainer.load_state_dict(broadcast(gather, state))
            undo.pop_all()  # all is well: the folder stays open
        return run

    def _rewind(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, by default the last, and remove from the folder what came after it."""
        start = checkpoint or self.store.last
        if checkpoint is None:
            self.folder.check_checkpoint(start)
        if checkpoint is not None or start.exists():
            self.load(start)
        done = self.trainer.rounds_done
        if self.config.rounds < done:
            raise UserError(f"rounds is {self.config.rounds}, and {done} are done; give at least that")
        if checkpoint is not None:  # before rounds are cut off: a kill from here on loses nothing more
            write_atomically(self.store.last, start.read_bytes())
        # Settings that may change (more rounds, say) hold for the rest of the run and for its next resume.
        self.folder.write_config(dump(self.config))
        self.folder.truncate_after(done)
        with disk_errors("remove old checkpoints in", self.store.folder):
            for path in self.store.periodic():
                if path.stem[6:12] > f"{done:06d}":  # as in round-000010
                    path.unlink()

    def load(self, path: Path) -> None:
        """Load the state of the run from one of its checkpoints."""
        schema = agent_schema(self.config.episode.rates)
        checkpoint = load_checkpoint(path, schema, self.trainer.environment.device)
        configs = checkpoint_config(checkpoint, path), self.config
        theirs, own = (config.model_dump(exclude=set(MAY_CHANGE)) for config in configs)
        if theirs != own:
            raise CheckpointError(
                f"{path} belongs to a run with other settings than {self.folder.path / 'config.yaml'}; "
                "give a checkpoint of this run"
            )
        try:
            self.trainer.load_state_dict(checkpoint.tensors)
        except (ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{path} does not fit this run: {error}") from None

    def run(
        self, stop: StopRequest | None = None, show: Callable[[RoundSummary], None] | None = None
    ) -> None:
        """Train for the rounds that are left, or until a stop is asked for, and write each to the folder.

        A stop that is asked of any process stops all of them. `show` gets every finished round.
        """
        gather, begun = self.trainer.gather, self.trainer.rounds_done
        self.rounds_saved = begun

        with ExitStack() as after, cpu_threads(self.config.threads):

            def open_sinks() -> list[Sink]:
                if not self.writes:
                    return []
                settings = self.config.model_dump(mode="json")
                sinks = make_sinks(self.config.telemetry.sinks, self.folder, settings, begun)
                return [after.enter_context(sink) for sink in sinks]

            # A sink that cannot be opened must stop every process, not the first one alone.
            self._sinks = all_or_none(gather, open_sinks)
            while not self.finished and not any_process(gather, stop is not None and stop.requested):
                played = self.trainer.play_round()[LEARNER]
                if self.writes:
                    self._write_round(played)
                self.rounds_saved = self.trainer.rounds_done
                if self.writes and show is not None:
                    show(played.summary)

    def _write_round(self, round: Round) -> None:
        """Write a finished round."""
        telemetry, number = self.config.telemetry, round.summary.round
        # The checkpoint comes last: after a crash, what was written beyond it is cut off and done again.
        self.folder.events_file.append(*episode_events(round.record, number))
        self.folder.metrics_file.append(round.summary)
        for sink in self._sinks:
            sink(round.summary)
        if telemetry.trajectories:
            parts = describe_host(self.trainer.environment.population)
            built = build_trajectories(round.record, parts, number)
            self.folder.trajectories.write(built, telemetry.trajectories)
        record = {"config": self.config.model_dump(mode="json"), "conditions": self._conditions}
        self.store.save(number, self.trainer.state_dict(), record, agent_schema(self.config.episode.rates))

    @property
    def finished(self) -> bool:
        """Return whether all rounds are done."""
        return self.trainer.rounds_done >= self.trainer.rounds


def _broadcast_config(config: RunConfig, gather: Gather) -> RunConfig:
    """Return the settings of the first process in all of them."""
    if gather.size == 1:
        return config
    return build(RunConfig, broadcast(gather, config.model_dump(mode="json")))


def read_config(folder: RunFolder) -> RunConfig:
    """Read the settings of a run; raise UserError where they are damaged or of another version."""
    where, settings = folder.path / "config.yaml", folder.settings()
    if not settings:
        raise UserError(f"{where} is damaged: it holds no settings")
    try:
        return build(RunConfig, settings)
    except UserError as error:
        raise UserError(f"{where} was written by another version of esper, or is damaged: {error}") from None
