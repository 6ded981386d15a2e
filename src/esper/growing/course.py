"""The course of a growth, from its first epoch to its last; between two epochs it can be saved.

A model that is ready to grow (`Prepared`) is all that it needs: it knows nothing of hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from esper.growing.randomness import Randomness
from esper.growing.result import Grown
from esper.runs.lanes import HostPart
from esper.simic.ending import Ending
from esper.simic.environment import Environment
from esper.simic.rollout import Episode, EpisodeRecord
from esper.simic.steps import StepResult
from esper.tamiyo.controller import Controller
from esper.utils.errors import UserError
from esper.utils.launch import StopRequest
from esper.utils.rows import under_prefix, with_prefix


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to grow."""

    environment: Environment
    controller: Controller
    decides: str  # the controller's name
    randomness: Randomness
    model: Callable[[], nn.Module]  # the plain module, as it is now
    slot_names: tuple[str, ...]  # the user's submodules after which something may grow
    module_names: tuple[str, ...]  # what grew there is called this in the plain model
    score_name: str
    topology: str
    example: tuple[Any, ...]  # what the model is called with, two samples or more
    parts: tuple[HostPart, ...] = ()  # what the network is drawn from
    folded: Callable[[], tuple[str, ...]] = lambda: ()  # what became part of the model on the way, in words
    widened: Callable[[], Mapping[int, tuple[str, int]]] = dict  # as in `Grown`
    broken_off: Callable[[], bool] = lambda: False  # whether the latest epoch was ended before its end
    remarks: tuple[str, ...] = ()  # on what was asked for and cannot be had, one sentence each


class Course:
    """One growth under way. It begins when it is made: the model is measured once, before any training."""

    def __init__(self, prepared: Prepared):
        self.prepared, self.environment = prepared, prepared.environment
        self.episode = Episode(self.environment, prepared.controller)
        self.ending = Ending(self.environment)

    @property
    def epochs_done(self) -> int:
        """Epochs so far."""
        return self.environment.clock

    def run(self, stop: StopRequest, on_epoch: Callable[[StepResult], None]) -> None:
        """Live through the epochs that are left, or until a stop is asked for; `on_epoch` sees each."""
        while not self.environment.done and not (stop.requested and self.epochs_done):
            result = self.episode.step()
            self.ending.look(result)
            on_epoch(result)

    def record(self) -> EpisodeRecord:
        """What happened so far; at least one epoch must be over."""
        return self.episode.record()

    def finish(self) -> Grown:
        """Decide every seed, and hand out what has grown; raises a UserError where nothing was learned."""
        if bool(self.record().panicked.all()):
            raise UserError(
                f"training broke in each of its {self.epochs_done} epochs: the loss was not finite, or "
                "exploded; look for such values in the batches of train and in the loss, or lower lr"
            )
        self.ending.finish()
        self.episode.look_again()
        prepared = self.prepared
        return Grown(
            model=prepared.model(),
            record=self.record(),
            slot_names=prepared.slot_names,
            module_names=prepared.module_names,
            score_name=prepared.score_name,
            topology=prepared.topology,
            epoch=int(self.ending.epoch),
            asked=self.environment.steps,
            folded=prepared.folded(),
            widened=prepared.widened(),
            remarks=prepared.remarks,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Where the growth stands between two epochs, as plain tensors; at least one must be over."""
        return {
            **with_prefix("environment", self.environment.state_dict()),
            **with_prefix("episode", self.episode.state_dict()),
            **with_prefix("ending", self.ending.state_dict()),
            **with_prefix("randomness", self.prepared.randomness.state_dict()),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved state to the same bits; raises ValueError for the state of another model."""
        self.environment.load_state_dict(under_prefix("environment", tensors))
        self.episode.load_state_dict(under_prefix("episode", tensors))
        self.ending.load_state_dict(under_prefix("ending", tensors))
        self.prepared.randomness.load_state_dict(under_prefix("randomness", tensors))
