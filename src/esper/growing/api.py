"""Grow a model of your own, in a few lines.

grown = esper.grow(model, train=(x, y), epochs=30)
grown.model                # a plain nn.Module
print(grown.report())      # what grew where, and what it earned
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.growing.arms import Arms, folder_of
from esper.growing.batches import UserStep
from esper.growing.randomness import own_randomness
from esper.growing.request import ModelOrMaker, Request
from esper.growing.result import Grown
from esper.tamiyo.controller import Controller
from esper.utils.errors import UserError
from esper.utils.launch import StopRequest


def grow(
    model: ModelOrMaker,
    train: Any,
    val: Any = None,
    slots: Sequence[str | int] | None = None,
    controller: str | Controller | None = None,
    epochs: int = 30,
    budget: int | None = None,
    step: UserStep | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    baseline: bool = False,
    force: bool = False,
    **settings: Any,
) -> Grown:
    """Train a model, and let it grow as a controller decides.

    model: any nn.Module, or a function that makes one. It is copied, never changed; frozen parameters stay
        frozen.
    train, val: a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays. Without `val`, a
        fifth of the samples is held back. Nothing else is ever looked at: keep a test set.
    slots: names of the submodules after which something may grow; found if left out.
    controller: who decides what grows: schedule:widen_full@0.1 (twice the hidden units at a tenth of the
        epochs), heuristic, static (never grows) ..., or an object. Without one the model is trained plainly
        and nothing grows, because at equal compute that did better than every controller that was tried.
    epochs: passes over the training data; before each the controller decides once.
    budget: the most parameters that growth may add at any one time; None is no limit.
    step: (model, batch) → loss, score, for batches and models of any kind.
    out: a folder for the run, written after every epoch: settings, metrics, events, checkpoints, the grown
        network and a report page. 'esper watch' shows it while it is written.
    resume: go on with the growth in `out`, to the same bits as if it had never been stopped, given the same
        model, data and arguments; it begins anew where nothing is there yet.
    baseline: whether the model is trained without growth as well, on the same order of the data for the same
        training FLOPs, and put beside the grown one in `report()`, `plot()` and the folder.
    force: let a learned controller act, which was trained on hosts of esper and not on models like this one;
        without it the model is trained plainly, and `report()` says so.
    settings: those of `GrowSettings` and `PopulationConfig` (lr, batch_size, loss, metric, seed, device ...).

    Ctrl-C ends the growth with what has grown so far; a second one stops at once. Raises a UserError, in one
    sentence, for what cannot be done.
    """
    if not isinstance(resume, bool):
        raise UserError(f"resume is {resume!r}; give True or False")
    if not isinstance(out, str | Path | None):
        raise UserError(f"out is {out!r}; give the path of a folder")
    if resume and out is None:
        raise UserError("resume is True, and no folder is given; say where the growth is: out='runs/mine'")
    with StopRequest(_tell_of_the_end, (signal.SIGINT,)) as stop:
        asked = (slots, controller, epochs, budget, step, baseline, force)
        request = Request(model, train, val, *asked, settings, stop)
        with own_randomness(request.settings.seed, request.device):
            arms = Arms(request)
            if out is None:
                return arms.grown()
            kept = folder_of(request, arms, Path(out), resume)
            with kept.folder:
                return arms.grown(kept)


def _tell_of_the_end() -> None:
    """Answer Ctrl-C at once; called inside a signal handler."""
    os.write(2, b"ending with what has grown so far; again to stop at once\n")
