"""A growth, and what it is measured against: each lived through in turn, with or without a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from esper.growing.course import Course, Prepared
from esper.growing.folder import GrowFolder, about_data, described
from esper.growing.randomness import Randomness
from esper.growing.request import ModelOrMaker, Request
from esper.growing.result import GROWN, STATIC, WIDER, Grown
from esper.growing.wider import Wider
from esper.lifecycle.legality import holds_seed
from esper.simic.costs import TRAINING_PASSES
from esper.tamiyo.policy.observation import Observation
from esper.telemetry.schema import Growth

Prepare = Callable[[Request], Prepared]


class Arms:
    """The runs that one call of `esper.grow` asks for."""

    def __init__(self, request: Request, prepare: Prepare):
        self.request, self._prepare = request, prepare
        self._randomness = Randomness(request.device, (request.train, request.val))
        self._start = self._randomness.state_dict()
        self.prepared = prepare(request)
        self._wider = self._can_be_wider() if request.control else None

    def grown(self, folder: GrowFolder | None = None) -> Grown:
        """Live through all of them; what has grown, and what it is measured against."""
        grown = self._lived(GROWN, self.prepared, folder)
        if self.request.baseline and not self.request.stop.requested:
            # Where nothing may grow, the run is its own baseline.
            plain = self.prepared.decides == STATIC
            baseline = grown if plain else self._ungrown(STATIC, self.request.model, grown, folder)
            grown = replace(grown, baseline=baseline)
        if self._wider is not None and not self.request.stop.requested:
            grown = self._beside_a_wider_one(grown, self._wider, folder)
        if folder is not None:
            folder.finish(grown, self.prepared, not self.request.stop.requested)
        return grown

    def _can_be_wider(self) -> Wider:
        """Refuse a model that cannot be made wider before anything is trained."""
        before = self._randomness.state_dict()
        wider = Wider(self.request.build_model(), self.prepared.example)
        self._randomness.load_state_dict(before)
        return wider

    def _beside_a_wider_one(self, grown: Grown, wider: Wider, folder: GrowFolder | None) -> Grown:
        """The same with a control of its size; of a model that did not grow there is none."""
        size = int(grown.record.parameters[-1, grown.best])
        if size <= grown.host_parameters:
            remark = "nothing stayed, so there is no wider model of the grown size"
            return replace(grown, remarks=(*grown.remarks, remark))
        self._randomness.load_state_dict(self._start)
        given, first = self.request.model, self.request.build_model()
        factor = wider.factor_for(first, size)

        def make() -> nn.Module:
            return wider.widened(self.request.build_model(), factor)

        model = wider.widened(first, factor) if isinstance(given, nn.Module) else make
        return replace(grown, control=self._ungrown(WIDER, model, grown, folder))

    def _ungrown(
        self, arm: str, model: ModelOrMaker, grown: Grown, folder: GrowFolder | None
    ) -> Grown | None:
        """A model that never grows, at the FLOPs of what has grown; None if it was broken off."""
        once = self._ready(model, 1)
        growth = self.prepared.environment
        # Both arms take the weights of their best epoch, so both pay for a validation in every epoch.
        samples = TRAINING_PASSES * growth.samples_trained + growth.validation_samples
        epoch = samples * once.environment.costs.host
        epochs = max(1, round(float(grown.record.flops.mean()) / epoch))
        run = self._lived(arm, self._ready(model, epochs), folder)
        return None if run.record.num_steps < epochs else run

    def _ready(self, model: ModelOrMaker, epochs: int) -> Prepared:
        """A model that never grows, with the randomness that the growth began with."""
        self._randomness.load_state_dict(self._start)
        return self._prepare(self.request.ungrown(model, epochs, self.prepared.engine))

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
    """While inside, a bar of the epochs done; it is told of each with what is seen after it.

    It says the score of the best member and how many seeds live in it.
    """
    console = Console(stderr=True)
    shown = show and console.is_terminal
    status = TextColumn("{task.fields[status]}")
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(doing, total=epochs, status="")

        def update(observation: Observation) -> None:
            if shown:
                best = int(observation.val_accuracy.argmax())
                score, seeds = (
                    float(observation.val_accuracy[best]),
                    int(holds_seed(observation.slots)[best].sum()),
                )
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
        "engine": prepared.engine,
        "step": described(request.step),
        "baseline": request.baseline,
        "control": request.control,
        "seed": request.settings.seed,
        **({"force": True} if request.force else {}),
        **{key: described(value) for key, value in request.given.items()},
    }
    growth = Growth(
        model=model,
        controller=prepared.decides,
        engine=prepared.engine,
        reason=prepared.reason,
        score_name=prepared.score_name,
        epochs=request.epochs,
        finished=False,
        curves=(),
    )
    return GrowFolder.begin(out, resume, config, request.settings.seed, growth)
