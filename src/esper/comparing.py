"""Controllers against each other on equal footing, over several seeds, and a film of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from esper.builders import make_environment
from esper.config import RunConfig
from esper.controllers import CONTROLLER_NAMES, load_controller
from esper.foundation.devices import choose_device, cpu_threads
from esper.foundation.errors import UserError
from esper.simic.compare import ControllerRun, as_comparison, compare
from esper.simic.environment import GrowthEnvironment, StepResult
from esper.simic.films import film, film_reel
from esper.tamiyo.controllers import Controller
from esper.telemetry.differences import paired_differences
from esper.telemetry.schema import Comparison, ControllerResult, FilmReel

FINAL = "final:"


@dataclass(frozen=True)
class LineUp:
    """Who is compared, and whose final networks are trained from the start."""

    controllers: Mapping[str, str]  # shown name → name or path
    finals: tuple[str, ...]  # shown names

    @staticmethod
    def parse(text: str) -> LineUp:
        """'static,heuristic,final:heuristic,runs/mine': the first one is the baseline."""
        asked = [part.strip() for part in text.split(",") if part.strip()]
        if not asked:
            raise UserError(
                f"--controllers is {text!r}; give some of {', '.join(CONTROLLER_NAMES)}, run folders "
                "and final:NAME, with commas between them"
            )
        names = dict.fromkeys(part.removeprefix(FINAL) for part in asked)
        shown = {name: _shown(name) for name in names}
        doubles = len(names) - len(set(shown.values()))
        labels = names if doubles else shown.values()
        controllers = dict(zip(labels, names, strict=True))
        back = {name: label for label, name in controllers.items()}
        finals = dict.fromkeys(back[p.removeprefix(FINAL)] for p in asked if p.startswith(FINAL))
        return LineUp(controllers, tuple(finals))

    def load(self, config: RunConfig) -> dict[str, Controller]:
        """The controllers themselves."""
        device = choose_device(config.device)
        return {
            shown: load_controller(name, config.lifecycle.gates, device)
            for shown, name in self.controllers.items()
        }


def _shown(name: str) -> str:
    """A path is shown by its last part; a checkpoint inside a run by the run's."""
    if name.partition(":")[0] in CONTROLLER_NAMES:
        return name
    parts = Path(name).parts
    return parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else Path(name).name


class Contest:
    """Every controller with the same `config.members` members under each of `seeds` seeds.

    Seed k is config.seed + k: other initial weights, another order of the data, other random numbers. What
    can be refused is refused when the contest is made, before anything has run.
    """

    def __init__(
        self,
        config: RunConfig,
        controllers: Mapping[str, Controller],
        finals: Sequence[str] = (),
        seeds: int = 1,
    ) -> None:
        if seeds < 1:
            raise UserError(f"seeds is {seeds}; it must be at least 1")
        self.config, self.controllers, self.finals, self.seeds = config, controllers, finals, seeds
        self._device = choose_device(config.device)
        self._first = make_environment(config, self._device)

    @property
    def steps(self) -> int:
        """Decision steps of the whole contest."""
        return self.seeds * (len(self.controllers) + len(self.finals)) * self.config.episode.steps

    def run(self, on_step: Callable[[StepResult], None] | None = None) -> tuple[Comparison, FilmReel]:
        """What every controller reached, and the same member filmed under each of them."""
        results: dict[str, list[ControllerResult]] = {}
        filmed: list[ControllerRun] = []
        for k in range(self.seeds):
            with cpu_threads(self.config.threads):
                environment = self._environment(k)
                runs = list(compare(environment, self.controllers, self.finals, on_step=on_step))
            filmed = filmed or runs
            for run in runs:
                members = [k * self.config.members + int(member) for member in run.record.members]
                results.setdefault(run.name, []).append(replace(run.result(), members=members))
        joined = [_joined(parts) for parts in results.values()]
        comparison = as_comparison(self._first, filmed)
        return replace(comparison, controllers=joined, differences=paired_differences(joined)), _films(filmed)

    def _environment(self, k: int) -> GrowthEnvironment:
        if not k:
            return self._first
        return make_environment(self.config.model_copy(update={"seed": self.config.seed + k}), self._device)


def _joined(parts: Sequence[ControllerResult]) -> ControllerResult:
    """One controller's results over all seeds."""

    def column(name: str) -> list[float]:
        return list(chain.from_iterable(getattr(part, name) for part in parts))

    return ControllerResult(
        name=parts[0].name,
        members=[int(member) for member in column("members")],
        test_accuracy=column("test_accuracy"),
        parameters=column("parameters"),
        member_epochs=column("member_epochs"),
        flops=column("flops"),
        potential=column("potential"),
    )


def _films(runs: Sequence[ControllerRun]) -> FilmReel:
    """The same member under every controller: the one that is typical of the last."""
    returns = runs[-1].record.returns
    row = int(np.argsort(np.nan_to_num(returns, nan=-np.inf), kind="stable")[len(returns) // 2])
    reel = film_reel(runs[0].record, 0)
    return replace(reel, films=[film(run.record, row, run.name) for run in runs])
