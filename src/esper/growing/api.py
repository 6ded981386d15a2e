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

from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.foundation.devices import ROWS
from esper.foundation.errors import UserError
from esper.foundation.interrupts import StopRequest
from esper.growing.arms import Arms, folder_of
from esper.growing.batches import UserStep
from esper.growing.course import Prepared
from esper.growing.live_engine import prepare_live
from esper.growing.randomness import own_randomness
from esper.growing.request import ModelOrMaker, Request
from esper.growing.result import Grown
from esper.growing.rows_engine import CannotRun, prepare_rows
from esper.growing.settings import LIVE_ONLY, LIVE_SETTINGS
from esper.tamiyo.controller import Controller

LARGEST_ROWS = 300_000  # parameters up to which a model is copied into rows without being asked


def grow(
    model: ModelOrMaker,
    train: Any,
    val: Any = None,
    slots: Sequence[str | int] | None = None,
    controller: str | Controller | None = None,
    epochs: int = 30,
    budget: int | None = None,
    engine: str = "auto",
    step: UserStep | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    baseline: bool = False,
    control: str | None = None,
    **settings: Any,
) -> Grown:
    """Train a model and let it grow where that helps.

    model: any nn.Module, or a function that makes one (then every member begins with weights of its own). It
        is copied, never changed; frozen parameters stay frozen.
    train, val: a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays. Without `val`, a
        fifth of the samples is held back. Nothing else is ever looked at: keep a test set.
    slots: names of the submodules after which something may grow; found if left out.
    controller: schedule:widen_full@0.1 (twice the hidden units at a tenth of the epochs: the default where
        they can be doubled), heuristic (the default elsewhere), tamiyo, habit, static (never grows) ..., or
        an object.
    epochs: passes over the training data; before each the controller decides once.
    budget: the most parameters that growth may add at any one time; None is no limit.
    engine: rows trains copies of a small model as one program; live trains any one model as it is, with data
        streamed from its loader; auto chooses, and says why.
    step: live: (model, batch) → loss, score, for batches and models of any kind.
    out: a folder for the run, written after every epoch: settings, metrics, events, checkpoints, the grown
        network and a report page. 'esper watch' shows it while it is written.
    resume: go on with the growth in `out`, to the same bits as if it had never been stopped, given the same
        model, data and arguments; it begins anew where nothing is there yet.
    baseline: whether the model is trained without growth as well, on the same order of the data for the same
        training FLOPs, and put beside the grown one in `report()`, `plot()` and the folder.
    control: "wider" trains a model of the grown size as well, the given one with wider hidden layers and no
        growth, for the same training FLOPs: it tells when not to grow.
    settings: those of `GrowSettings` and `PopulationConfig` (lr, batch_size, loss, metric, seed, device ...).

    Ctrl-C ends the growth with what has grown so far; a second one stops at once. Raises a UserError, in one
    sentence, for what cannot be done.
    """
    if resume and out is None:
        raise UserError("resume is True, and no folder is given; say where the growth is: out='runs/mine'")
    with StopRequest(_tell_of_the_end, (signal.SIGINT,)) as stop:
        asked = (slots, controller, epochs, budget, engine, step, baseline, control)
        request = Request(model, train, val, *asked, settings, stop)
        with own_randomness(request.settings.seed, request.device):
            arms = Arms(request, prepare)
            if out is None:
                return arms.grown()
            kept = folder_of(request, arms, Path(out), resume)
            with kept.folder:
                return arms.grown(kept)


def prepare(request: Request) -> Prepared:
    """The model made ready, by the engine that was asked for or suits it."""
    engine, given = request.engine, request.given
    reason = why_live(request) if engine == "auto" else "it was asked for"
    if engine != "live" and (engine == "rows" or reason is None):
        refused = sorted(set(given) & set(LIVE_ONLY))
        if refused or request.step is not None:
            raise UserError(f"{(refused or ['step'])[0]} is for the live engine; give engine='live'")
        try:
            return prepare_rows(request)
        except CannotRun as error:
            if engine == "rows" or request.settings.members > 1:
                raise
            reason = str(error)
    prepared = prepare_live(request, str(reason))
    if request.settings.progress:
        print(f"esper grows it with the live engine: {reason}")
    return prepared


def _tell_of_the_end() -> None:
    """Answer Ctrl-C at once; called inside a signal handler."""
    os.write(2, b"ending with what has grown so far; again to stop at once\n")


def why_live(request: Request) -> str | None:
    """Why the live engine is the one for this, or None where rows may do."""
    asked = sorted(set(request.given) & set(LIVE_ONLY))
    if request.step is not None or asked:
        return f"{'step' if request.step is not None else asked[0]} was given"
    if request.controller is None and not set(request.given) - set(LIVE_SETTINGS):
        return "its own layers are to get wider, which rows cannot"
    if request.device.type not in ROWS:
        return f"the device is {request.device.type}"
    train, data = request.train, getattr(request.train, "dataset", request.train)
    in_memory = isinstance(data, TensorDataset) and getattr(train, "num_workers", 0) == 0
    if isinstance(train, DataLoader | Dataset) and not in_memory and request.settings.members == 1:
        return "its data come from a loader, which is read anew in every epoch"
    if isinstance(request.model, nn.Module) and request.settings.members == 1:
        size = sum(p.numel() for p in request.model.parameters())
        if size > LARGEST_ROWS:
            return f"the model has {size:,} parameters"
    return None
