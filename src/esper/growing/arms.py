"""A growth, and the same model without growth: each lived through in turn, with or without a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.growing.course import Course, Prepared
from esper.growing.folder import GrowFolder, about_data, described
from esper.growing.live_engine import prepare
from esper.growing.randomness import Randomness
from esper.growing.request import Request
from esper.growing.result import GROWN, STATIC, Grown
from esper.lifecycle.legality import holds_seed
from esper.runs.schema import Growth
from esper.simic.costs import TRAINING_PASSES
from esper.tamiyo.policy.features import Observation


class Arms:
    """The runs that one call of `esper.grow` asks for."""

    def __init__(self, request: Request):
        self.request = request
        self._randomness = Randomness(request.device, (request.train, request.val))
        self._start = self._randomness.state_dict()
        self.prepared = prepare(request)

    def grown(self, folder: GrowFolder | None = None) -> Grown:
        """Live through all of them; what has grown, and what it is measured against."""
        grown = self._lived(GROWN, self.prepared, folder)
        if self.request.baseline and not self.request.stop.requested:
            # Where nothing may grow, the run is its own baseline.
            plain = self.prepared.decides == STATIC
            baseline = grown if plain else self._ungrown(grown, folder)
            grown = replace(grown, baseline=baseline)
        if folder is not None:
            folder.finish(grown, self.prepared, not self.request.stop.requested)
        return grown

    def _ungrown(self, grown: Grown, folder: GrowFolder | None) -> Grown | None:
        """Train the model without growth, at the FLOPs of what has grown; None if it was broken off."""
        growth = self.prepared.environment
        # Both arms take the weights of their best epoch, so both pay for a validation in every epoch.
        samples = TRAINING_PASSES * growth.samples_trained + growth.validation_samples
        epochs = max(1, round(float(grown.record.flops.mean()) / (samples * growth.bodies.host_flops)))
        self._randomness.load_state_dict(self._start)
        run = self._lived(STATIC, prepare(self.request.ungrown(epochs)), folder)
        return None if run.record.num_steps < epochs else run

    def _lived(self, arm: str, prepared: Prepared, folder: GrowFolder | None) -> Grown:
        course = Course(prepared)
        if folder is not None:
            folder.restore(arm, course)
        steps = prepared.environment.steps
        doing = "training" if prepared.decides == STATIC else "growing"
        if arm != GROWN:
            doing = f"beside it, {arm}"
        shown = self.request.settings.progress
        if shown and arm == GROWN:
            for remark in prepared.remarks:
                print(remark, file=sys.stderr)
        with growth_bar(steps, prepared.score_name, shown, doing) as advance:

            def after(result: Any) -> None:
                advance(result.observation)
                if folder is not None and not prepared.broken_off():
                    folder.keep(arm, course)

            course.run(self.request.stop, after)
        return course.finish()


@contextmanager
def growth_bar(
    epochs: int, score_name: str, show: bool, doing: str
) -> Iterator[Callable[[Observation], None]]:
    """Show a bar of the epochs done, with score and living seeds; yields what updates it after an epoch."""
    console = Console(stderr=True)
    shown = show and console.is_terminal
    status = TextColumn("{task.fields[status]}")
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(doing, total=epochs, status="")

        def update(observation: Observation) -> None:
            if shown:
                score, seeds = float(observation.val_accuracy), int(holds_seed(observation.slots).sum())
                progress.update(task, advance=1, status=f"{score_name} {score:.3f}, {seeds} seeds")

        yield update


def folder_of(request: Request, arms: Arms, out: Path, resume: bool) -> GrowFolder:
    """The folder for these arms, with all that was asked for in its config.yaml."""
    model, prepared = described(request.model), arms.prepared
    config = {
        "task": model,
        "model": {
            "parameters": prepared.environment.host_parameters,
            "slots": list(prepared.slot_names),
        },
        "train": about_data(request.train),
        "val": about_data(request.val),
        "slots": described(request.slots),
        "controller": prepared.decides,
        "epochs": request.epochs,
        "budget": request.budget,
        "step": described(request.step),
        "baseline": request.baseline,
        "seed": request.settings.seed,
        **({"force": True} if request.force else {}),
        **{key: described(value) for key, value in request.given.items()},
    }
    growth = Growth(
        model=model,
        controller=prepared.decides,
        score_name=prepared.score_name,
        epochs=request.epochs,
        finished=False,
        curves=(),
    )
    return GrowFolder.begin(out, resume, config, request.settings.seed, growth)
