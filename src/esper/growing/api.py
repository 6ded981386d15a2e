"""Grow a model of your own, in a few lines.

grown = esper.grow(model, train=(x, y), epochs=30)
grown.model                # a plain nn.Module
print(grown.report())      # what grew where, and what it earned
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed, nn

from esper.controllers import INTO
from esper.growing.blocks import check_module, find_blocks, find_pretrained
from esper.growing.criterion import UserStep
from esper.growing.data import GeneratorStates, first_batch, make_loaders, seeded_generators, split_batch
from esper.growing.folder import GrowFolder
from esper.growing.live import LiveEnvironment, LivePopulation
from esper.growing.result import GROWN, Grown
from esper.growing.settings import STATIC, GrowSettings, UserController, check_settings, choose_controller
from esper.growing.slots import SlotNames, floating_dtype, trainable_parameters
from esper.growing.surgery.insertion import graft_name
from esper.lifecycle.legality import holds_seed
from esper.runs.console import duration
from esper.runs.trajectories import HostPart
from esper.simic.costs import TRAINING_PASSES
from esper.simic.ending import FinalSelection
from esper.simic.environment import StepResult
from esper.simic.rollout import Episode
from esper.simic.telemetry import describe_layers
from esper.tamiyo.controller import Controller
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import Static
from esper.utils.devices import MODEL_DEVICES, choose_device, cpu_threads, threads_for
from esper.utils.errors import UserError, one_line, raised_at
from esper.utils.launch import StopRequest
from esper.utils.rows import add_prefix, strip_prefix

ModelOrMaker = nn.Module | Callable[[], nn.Module]
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
# What `beyond` stands for. By `benchmarks.when_to_grow`, at equal compute, doubling hidden units loses
# 3.0 ± 2.8 points to plain training, and every other controller loses more.
BEYOND = "schedule:widen_full@0.1"
LINE_EVERY = 5.0  # seconds between two lines of progress in a log
_EXAMPLE_SAMPLES = 4  # torch.export needs more than one to keep the batch size free


def grow(
    model: ModelOrMaker,
    train: Any,
    val: Any = None,
    slots: Sequence[str | int] | None = None,
    controller: str | Controller | None = None,
    epochs: int = 30,
    step: UserStep | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    baseline: bool = False,
    force: bool = False,
    beyond: bool = False,
    pretrained: bool = False,
    equal_compute: bool = False,
    **settings: Any,
) -> Grown:
    """Train a model for less compute: a part of its blocks at first, the others later as copies of them.

    The result is the model that was given, with all of its blocks. Where that cannot be expected to pay (few
    blocks, few steps, more data than `esper.estimate` advises, a model that was loaded from a checkpoint) it
    is trained plainly, and `report()` says why. With a controller, or `beyond`, the model grows beyond what
    was given instead.

    model: any nn.Module, or a function that makes one. It is copied, never changed; frozen parameters stay
        frozen.
    train, val: a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays. Without `val`, a
        fifth of the samples is held back. Nothing else is ever looked at: keep a test set.
    slots: names of the submodules after which something may grow; found if left out.
    controller: who decides what grows: schedule:widen_full@0.1 (twice the hidden units at a tenth of the
        epochs), heuristic, static (train plainly) ..., or an object; 'into' grows into the model also where
        that is not expected to pay.
    epochs: passes over the training data; before each the controller decides once.
    step: (model, batch) → loss, score, for batches and models of any kind.
    out: a folder for the run, written after every epoch: settings, metrics, events, checkpoints, the grown
        network and a report page. 'esper watch' shows it while it is written.
    resume: go on with the growth in `out`, to the same bits as if it had never been stopped, given the same
        model, data and arguments; more epochs and another lr are allowed, and noted. It begins anew where
        nothing is there yet.
    baseline: whether the model is trained without growth as well, on the same order of the data, for the
        number of epochs whose FLOPs are nearest, and put beside the grown one in `report()` and the folder.
    force: let a learned controller act, which was trained on hosts of esper and not on models like this one;
        without it the model is trained plainly, and `report()` says so.
    beyond: let the model grow beyond what was given without naming a controller; its widths double at a
        tenth of the epochs.
    pretrained: the model was trained before, so that no block of it is skipped; models of transformers that
        were loaded from a checkpoint are known.
    equal_compute: spend what growing into the model saves on more epochs, until it has cost as many training
        FLOPs as `epochs` of the whole model.
    settings: those of `GrowSettings` and `PopulationConfig` (lr, batch_size, loss, metric, seed, device ...).

    Ctrl-C returns the model so far, after the batch in flight and a few validations; a second one stops at
    once. Raises a UserError, in one sentence, for what cannot be done.
    """
    flags = {"force": force, "pretrained": pretrained, "equal_compute": equal_compute}
    _check_arguments(epochs, step, {"resume": resume, "baseline": baseline, "beyond": beyond, **flags})
    chosen = check_settings(settings)
    if out is None and (resume or chosen.sinks):
        given = "resume is True" if resume else f"sinks are {list(chosen.sinks)}"
        raise UserError(f"{given}, and no folder is given; say where the growth is: out='runs/mine'")
    device = choose_device(chosen.device, kinds=MODEL_DEVICES)
    with StopRequest(_stop_notice(out), (signal.SIGINT,)) as stop, seeded_generators(chosen.seed, device):
        # A baseline draws the same numbers: it reads the data in the same order from the same first weights.
        generators = GeneratorStates(device, (train, val))
        start = generators.state_dict()

        def prepare(settings: GrowSettings, controller: str | Controller | None, epochs: int) -> Growth:
            own = _build_model(model, device)
            return Growth(own, train, val, settings, device, epochs, slots, step, controller, force)

        controller = BEYOND if beyond and controller is None else controller
        into = isinstance(controller, str) and controller == INTO
        with cpu_threads(chosen.threads or threads_for(0)):  # trial passes over a few samples
            growth = prepare(chosen, None if into else controller, epochs)
            if into or controller is None:
                growth.grow_into_model(epochs, pretrained, equal_compute, into)
        folder = None
        if out is not None:
            asked: dict[str, Any] = {"slots": slots, "controller": growth.controller_name, "epochs": epochs}
            asked |= {"step": step, "baseline": baseline, "seed": chosen.seed}
            asked |= {name: True for name, flag in flags.items() if flag} | settings
            folder = GrowFolder.begin(Path(out), resume, growth, model, (train, val), asked)
        bodies = growth.bodies
        threads = chosen.threads or threads_for(bodies.host_flops * bodies.batch_samples)
        with cpu_threads(threads), nullcontext() if folder is None else folder.opened(chosen.sinks):
            grown = growth.run(stop, GROWN, folder)
            if baseline and not stop.requested and growth.controller_name == STATIC:
                grown = replace(grown, baseline=grown)  # nothing may grow: the run is its own baseline
            elif baseline and not stop.requested:
                generators.load_state_dict(start)
                epochs = growth.epochs_of_equal_cost(grown)
                # The user's function is for the growth alone.
                unwatched = chosen.model_copy(update={"on_epoch": None})
                ungrown = prepare(unwatched, STATIC, epochs).run(stop, STATIC, folder)
                grown = replace(grown, baseline=ungrown if ungrown.record.num_steps == epochs else None)
            if folder is not None:
                folder.finish(grown, growth, not stop.requested)
            return grown


def _stop_notice(out: str | Path | None) -> Callable[[], object]:
    """Return the function that answers Ctrl-C at once with what is kept; a signal handler calls it."""
    kept = "nothing is saved, since no out= is given"
    if out is not None:
        kept = f"{out} has the epochs before this one, from which the same call with resume=True goes on"
    notice = (
        "stopping after this batch and a few validations: the model so far is returned, and "
        f"{kept}; Ctrl-C again stops at once\n"
    )
    # Not by print: a signal may come while a buffered stream is in the middle of a write.
    return partial(os.write, 2, notice.encode())


class Growth:
    """A model with its data and a controller, from first epoch to last; between two it can be saved."""

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        val: Any,
        settings: GrowSettings,
        device: torch.device,
        epochs: int,
        slots: SlotNames | None,
        step: UserStep | None,
        controller: str | Controller | None,
        force: bool,
    ):
        """Open the data, attach slots to `model`, a copy of the user's, and choose the controller."""
        self.settings = settings
        loaders = make_loaders(train, val, settings, floating_dtype(model))
        decider, self.controller_name, self.remarks = choose_controller(controller, force)
        grows = not isinstance(decider, Static)
        self.bodies = LivePopulation(model, loaders, settings, device, slots, step, grows)
        if controller is not None and not trainable_parameters(model):  # else it cannot be trained at all
            warnings.warn(
                f"all parameters of {type(model).__name__} are frozen (requires_grad is False): only what "
                "grows is trained",
                stacklevel=4,  # of the call of `grow`
            )
        self.environment, self.plain_epochs = LiveEnvironment(self.bodies, epochs), epochs
        self.controller, live = UserController(decider), self.bodies.live
        if grows:  # a model in which nothing fits can be trained all the same
            lines = decider.events if isinstance(decider, Schedule) else []
            scheduled = list(dict.fromkeys(line.blueprint for line in lines))
            self.remarks += self.bodies.limit_blueprints(settings.blueprints, scheduled)
        self.generators = GeneratorStates(device, loaders)
        self.slot_names = tuple(live.names)
        self.module_names = tuple(graft_name(model, spec) for spec in live.specs)
        # Inputs of a few samples for torch.export; none where only the user's step tells them from targets.
        inputs, _ = split_batch(first_batch("val", self.bodies.val_loader)) or ((), None)
        self.example = tuple(x[:_EXAMPLE_SAMPLES] if isinstance(x, Tensor) else x for x in inputs)
        self.host_parts = _describe_host(self.bodies)
        self.seconds: list[float] = []  # of each epoch with its validation

    def grow_into_model(self, epochs: int, pretrained: bool, equal_compute: bool, asked: bool) -> None:
        """Skip blocks at first, where that is asked for or expected to pay; else say why not."""
        model = self.bodies.model
        name = type(model).__name__
        if not trainable_parameters(model):
            raise UserError(f"all parameters of {name} are frozen; give beyond=True, or unfreeze some")
        try:
            if pretrained or (not asked and find_pretrained(model, find_blocks(model))):
                raise UserError(f"{name} was loaded from a checkpoint")
            total, self.remarks = self.bodies.grow_into(epochs, equal_compute, asked)
            self.controller_name = INTO
            if total != epochs:
                self.environment = LiveEnvironment(self.bodies, total)
        except UserError as error:
            if asked:
                raise
            self.remarks = [f"it trains plainly: {str(error).removesuffix('; train it plainly')}"]

    def run(self, stop: StopRequest, name: str, folder: GrowFolder | None = None) -> Grown:
        """Run the epochs that are left, decide every seed, and return the result.

        stop: ends it after at least one epoch. name: GROWN, or STATIC for a baseline. folder: of checkpoints
        to go on from and to write. Raises a UserError where training broke in every epoch.
        """
        if (remark := self.bodies.criterion.remark) is not None:
            self.remarks = [*self.remarks, remark]
        self.bodies.stop = lambda: stop.requested
        self.episode = Episode(self.environment, self.controller)  # measures the model before any training
        self.ending = FinalSelection(self.environment)
        if folder is not None:
            folder.restore(name, self)
        plain = self.controller_name == STATIC
        title = f"beside it, {name}" if name != GROWN else "training" if plain else "growing"
        if self.settings.progress and name == GROWN:
            for remark in self.remarks:
                print(remark, file=sys.stderr)
        with _progress_bar(self, title) as update:
            while not self.environment.done and not (self.environment.clock > 0 and stop.requested):
                update(self.run_epoch().observation)
                if folder is not None and not self.bodies.interrupted:
                    folder.save(name, self)
        return self.finish()

    def run_epoch(self) -> StepResult:
        """Decide once and train for an epoch; then call the user's `on_epoch`."""
        began = time.monotonic()
        self._latest = result = self.episode.step()
        self.seconds.append(time.monotonic() - began)
        if self.bodies.whole:  # else these are not the weights of the user's model
            self.ending.update(result)
        history = self.environment.state.history
        if self.settings.on_epoch is not None:
            self.settings.on_epoch(
                {
                    "epoch": self.environment.clock,
                    "train_loss": float(result.training.loss),
                    "val_loss": float(history.loss),
                    "score": float(history.accuracy),
                    "parameters": int(self.environment.derived.parameters),
                }
            )
        return result

    def finish(self) -> Grown:
        """Decide every seed, and return the result; raises a UserError where nothing was learned."""
        if bool(self.episode.record().panicked.all()):
            raise UserError(
                f"training broke in each of its {self.environment.clock} epochs: the loss was not finite, or "
                "exploded; look for such values in the batches of train and val and in the loss, or lower lr"
            )
        # After Ctrl-C blocks may still be skipped, and the user's model has all of them.
        grew = self.bodies.whole and self.bodies.progressive is not None
        if not self.bodies.whole:
            self._complete()
        self.ending.finish()
        self.episode.refresh_last()
        live = self.bodies.live
        folds = [f"{fold.description}, for good, {fold.parameters:,} parameters" for fold in live.folds]
        return Grown(
            model=self.bodies.plain_model(self.environment.slots),
            record=self.episode.record(),
            slot_names=self.slot_names,
            module_names=self.module_names,
            score_name=self.bodies.criterion.score_name,
            topology=self.bodies.topology,
            epoch=int(self.ending.epoch),
            asked=self.environment.steps,
            plain_epochs=self.plain_epochs,
            folded=tuple(folds),
            widened=live.describe_growth(),
            remarks=tuple(self.remarks),
            seconds=tuple(self.seconds),
            grew=grew or bool(self.episode.record().germinated.any()),
        )

    def _complete(self) -> None:
        """Activate all blocks of a model whose training ends before its growth, and measure it again."""
        grower = self.bodies.progressive
        assert grower is not None
        self.remarks = [
            f"it was stopped before its growth: {grower.active} of {grower.blocks} blocks were trained, and "
            "the others are copies of them",
            *self.remarks[1:],  # without the one that says when the others begin
        ]
        grower.complete()
        self.bodies.forget_measurements()
        state = self.environment.state
        measured = self.bodies.run_validation(state.slots, ablate=False)
        history = state.history.append(measured.loss, measured.accuracy)
        self.environment.set_state(replace(state, history=history))
        self.ending.update(self._latest)

    def epochs_of_equal_cost(self, grown: Grown) -> int:
        """Return the epochs of the model without growth that cost the FLOPs of this run."""
        # Both runs end with the weights of their best epoch, so both pay for a validation in every epoch.
        trained, validated = self.bodies.samples
        cost = (TRAINING_PASSES * trained + validated) * self.bodies.host_flops
        return max(1, round(float(grown.record.flops.mean()) / cost))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state after an epoch as tensors; raises a UserError if the optimizer cannot be saved."""
        return {
            **add_prefix("environment", self.environment.state_dict()),
            **add_prefix("live", self.bodies.progress_tensors()),
            **add_prefix("episode", self.episode.state_dict()),
            **(add_prefix("ending", self.ending.state_dict()) if self.bodies.whole else {}),
            **add_prefix("generators", self.generators.state_dict()),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved state to the same bits; raises ValueError for the state of another model."""
        self.environment.load_state_dict(strip_prefix("environment", tensors))
        self.bodies.load_progress(strip_prefix("live", tensors))
        self.episode.load_state_dict(strip_prefix("episode", tensors))
        if ending := strip_prefix("ending", tensors):
            self.ending.load_state_dict(ending)
        self.generators.load_state_dict(strip_prefix("generators", tensors))


def _describe_host(bodies: LivePopulation) -> tuple[HostPart, ...]:
    """Return the submodules after which seeds may grow, and the rest of the model, for a drawing."""
    found, rest = [], set(bodies.model.parameters())
    for module, spec in zip(bodies.live.modules, bodies.live.specs, strict=True):
        size = sum(p.numel() for p in module.parameters())
        found.append(HostPart(spec.name, describe_layers(module), size, tuple(spec.shape)))
        rest -= set(module.parameters())
    return (*found, HostPart("the rest", (), sum(p.numel() for p in rest), ()))


@contextmanager
def _progress_bar(growth: Growth, title: str) -> Iterator[Callable[[Observation], None]]:
    """Show the epochs with score and seeds; yields what updates it after one."""
    console, epochs, done = Console(stderr=True), growth.environment.steps, growth.environment.clock
    show, score_name = growth.settings.progress, growth.bodies.criterion.score_name
    shown = show and console.is_terminal
    status = TextColumn("{task.fields[status]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task, begun = progress.add_task(title, total=epochs, completed=done, status=""), time.monotonic()
        printed_at = begun

        def update(observation: Observation) -> None:
            nonlocal printed_at
            if not show:
                return
            score, seeds = float(observation.val_accuracy), int(holds_seed(observation.slots).sum())
            status = f"{score_name} {score:.3f}" + (f", {seeds} seeds" if seeds else "")
            progress.update(task, advance=1, status=status)
            if not shown and time.monotonic() - printed_at > LINE_EVERY:  # no terminal for a bar
                printed_at = time.monotonic()
                count = int(progress.tasks[task].completed)
                left = (epochs - count) * (printed_at - begun) / (count - done)
                status += f", {duration(left)} left"
                print(f"{title}: {count} of {epochs} epochs, {status}", file=sys.stderr)

        yield update


# ---- arguments -----------------------------------------------------------------------------------------


def _check_arguments(epochs: Any, step: Any, flags: Mapping[str, Any]) -> None:
    """Raise a UserError for values that are not allowed, and where several processes train together."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{name} is {flag!r}; give True or False")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UserError(
            f"{distributed.get_world_size()} processes train together, and the seeds of each would differ; "
            "grow in one process on one device, without DDP or FSDP"
        )
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise UserError(f"epochs is {epochs!r}; give a whole number, at least 1")
    if step is not None and not callable(step):
        raise UserError(f"step is a {type(step).__name__}; give a function (model, batch) → loss, score")


def _build_model(model: ModelOrMaker, device: torch.device) -> nn.Module:
    """Copy the model, or what the given function makes, to a device; raise a UserError if it cannot grow."""
    try:
        made = model() if callable(model) and not isinstance(model, nn.Module) else model
    except Exception as error:  # whatever the user's function raises
        raise UserError(
            f"model cannot be made ({one_line(error)}{raised_at(error)}); give an nn.Module, or a function "
            "without arguments that makes one"
        ) from error
    check_module(made, ", or a function that makes one")
    for name, module in made.named_modules():
        kind = f"{f'the submodule {name}' if name else 'model'} is a {type(module).__name__}"
        compiled = hasattr(module, "_orig_mod")
        if isinstance(module, torch.jit.ScriptModule) or compiled:
            made_by = ", made by torch.compile" if compiled else ""
            raise UserError(f"{kind}{made_by}, which takes no hooks; give the module that it was made from")
        if any(base.__name__ in _WRAPPERS for base in type(module).__mro__):
            raise UserError(
                f"{kind}, wrapped for several processes or devices, where the seeds of each would differ; "
                "give the module inside, and grow in one process"
            )
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if tensor.is_meta:
            raise UserError(
                f"{name} of {type(made).__name__} is on the meta device and has no values; call "
                "model.to_empty(device='cpu') and load its weights first"
            )
    try:
        return copy.deepcopy(made).to(device)
    except RuntimeError as error:  # as of a module that keeps what it computed
        why = f"{one_line(error)}; the old weight_norm does that, nn.utils.parametrizations does not"
        raise UserError(f"{type(made).__name__} cannot be copied ({why})") from error
