"""A growth, and what it is measured against: each lived through in turn, with or without a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from esper.growing.course import Course, Prepared
from esper.growing.folder import GROWN, GrowFolder, about_data, described
from esper.growing.progress import GrowthBar
from esper.growing.request import Request
from esper.growing.result import Grown
from esper.telemetry.schema import Growth

Prepare = Callable[[Request], tuple[Prepared, str, str]]  # → the model made ready, by which engine, and why


class Arms:
    """The runs that one call of `esper.grow` asks for."""

    def __init__(self, request: Request, prepare: Prepare):
        self.request = request
        self.prepared, self.engine, self.reason = prepare(request)

    def grown(self, folder: GrowFolder | None = None) -> Grown:
        """Live through all of them; what has grown, and what it is measured against."""
        grown = self._lived(GROWN, self.prepared, folder)
        if folder is not None:
            folder.finish(grown, self.prepared)
        return grown

    def _lived(self, arm: str, prepared: Prepared, folder: GrowFolder | None) -> Grown:
        course = Course(prepared)
        if folder is not None:
            folder.restore(arm, course)
        steps = prepared.environment.steps
        with GrowthBar(steps, prepared.score_name, self.request.settings.progress) as bar:

            def after(result: Any) -> None:
                bar.update(result.observation)
                if folder is not None and not prepared.broken_off():
                    folder.keep(arm, course)

            course.run(self.request.stop, after)
        return course.finish(self.engine, self.reason)


def folder_of(request: Request, arms: Arms, given: Mapping[str, Any], out: Path, resume: bool) -> GrowFolder:
    """The folder for these arms, with all that was asked for in its config.yaml."""
    model, environment = described(request.model), arms.prepared.environment
    config = {
        "task": model,
        "model": {"parameters": environment.host_parameters, "slots": list(arms.prepared.slot_names)},
        "train": about_data(request.train),
        "val": about_data(request.val),
        "slots": described(request.slots),
        "controller": described(request.controller),
        "epochs": request.epochs,
        "budget": request.budget,
        "engine": arms.engine,
        "step": described(request.step),
        "seed": request.settings.seed,
        **{key: described(value) for key, value in given.items()},
    }
    growth = Growth(
        model=model,
        controller=str(config["controller"]),
        engine=arms.engine,
        reason=arms.reason,
        score_name=arms.prepared.score_name,
        epochs=request.epochs,
        finished=False,
        curves=(),
    )
    return GrowFolder.begin(out, resume, config, request.settings.seed, growth)
