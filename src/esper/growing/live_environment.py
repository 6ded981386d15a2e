"""The environment of one living model: the steps of any growth, over the user's own model and loaders."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.batches import (
    LOSS_RAISED,
    Judge,
    UserStep,
    autocast,
    first_batch,
    over_tensors,
    to_device,
)
from esper.growing.ground import Ground, few_samples
from esper.growing.live import LivePopulation
from esper.growing.live_hooks import Hooks
from esper.growing.live_state import progress_of, put_progress
from esper.growing.places import find_places, floating_dtype
from esper.growing.settings import GrowSettings
from esper.growing.undoing import at_rest
from esper.simic.environment import Environment
from esper.simic.steps import RuleSpec, StepResult
from esper.utils.errors import UserError, one_line, raised_at
from esper.utils.rows import check_like, under_prefix, with_prefix

_GAMMA = 0.995  # of the potential: nothing learns from the reward here


class LiveModel:
    """A model with its data, looked at once: where seeds may grow, and what a batch gives."""

    def __init__(
        self,
        model: nn.Module,
        loaders: tuple[Iterable[Any], Iterable[Any]],
        settings: GrowSettings,
        device: torch.device,
        slots: Any = None,
        step: UserStep | None = None,
        grows: bool = True,
    ):
        """grows: whether its own blocks and layers are looked at, for a controller that may grow them."""
        self.model, self.loaders, self.settings, self.device = model, loaders, settings, device
        self.judge = Judge(settings, step)
        trained_on = first_batch("train", loaders[0])
        batch = to_device(first_batch("val", loaders[1]), device)
        with autocast(device, settings.training.get("precision", "float32")):  # as it is trained
            self.places = find_places(model, lambda: self._try("val", batch), slots, settings.topology)
        self.judge.checks = False
        for loader, first in zip(loaders, (trained_on, batch), strict=True):
            self.judge.check_classes(loader, first)
        with at_rest(model):
            self._try("train", few_samples(to_device(trained_on, device)))
        self.hooks = Hooks(model, self.places, Ground(model, self.judge, batch, grows))

    def _try(self, name: str, batch: Any) -> None:
        """The first pass over the data of that name, in which what does not fit shows itself."""
        try:
            judged = self.judge(self.model, batch)
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's forward raises
            raise UserError(self._blamed(name, batch, error)) from error
        if not bool(judged.loss.isfinite()):
            raise UserError(
                f"the loss of {type(self.model).__name__} on the first batch of {name} is "
                f"{float(judged.loss)} before any training; look for such values in the batch, in the "
                "weights and in the loss"
            )

    def _blamed(self, name: str, batch: Any, error: Exception) -> str:
        """The sentence for an exception of the user's model, loss or step, with the line that raised it."""
        place, model = raised_at(error), type(self.model).__name__
        said = f"raises {type(error).__name__}{place} ({one_line(error)})"
        if self.judge.step is not None:
            return (
                f"step {said} for the first batch of {name}; make it a function (model, batch) → loss, score "
                "that takes such batches"
            )
        shapes = [note for note in getattr(error, "__notes__", ()) if note.startswith(LOSS_RAISED)]
        if shapes:
            about = shapes[0].removeprefix(LOSS_RAISED)
            return f"loss {said}{about}; make it a function (outputs, targets) → one number"
        given, own = list[Tensor](), floating_dtype(self.model)
        over_tensors(batch, lambda x: given.append(x) or x)  # type: ignore[func-returns-value]
        others = {str(x.dtype) for x in given if x.is_floating_point() and x.dtype != own}
        if others and "type" in str(error):  # "must have the same dtype", "expected scalar type", ...
            return (
                f"the batches of {name} hold {' and '.join(sorted(others))} and the weights of {model} are "
                f"{own}, which do not go together ({one_line(error)}); convert the batches with .to({own}), "
                "or the model"
            )
        if place:
            return (
                f"{model} {said} for the first batch of {name}; mend that line, or give batches that it takes"
            )
        return (
            f"{model} does not take the batches of {name} ({one_line(error)}); make the data fit its first "
            "layer, or give step=, a function (model, batch) → loss, score"
        )


class LiveEnvironment(Environment):
    """One member: the model itself."""

    bodies: LivePopulation

    def __init__(self, live: LiveModel, epochs: int, optimizer: torch.optim.Optimizer | None = None):
        settings = live.settings
        self._live_model = live
        self._started, self._best, self._since_best = time.monotonic(), float("-inf"), 0
        self.bodies = LivePopulation(live, optimizer)
        self.bodies.out_of_time = self._out_of_time
        rules = RuleSpec(
            gamma=_GAMMA,
            seed=settings.seed,
            episode=settings.episode(epochs),
            lifecycle=settings.rules(epochs),
            best_epoch=True,
        )
        super().__init__(rules, self.bodies, math.log(live.judge.classes))

    @property
    def done(self) -> bool:
        """All epochs are over, or somebody or something asked for an end."""
        patience = self._live_model.settings.patience
        return super().done or (
            self.clock > 0
            and (
                self.bodies.interrupted
                or (patience is not None and self._since_best >= patience)
                or self._out_of_time()
            )
        )

    def _out_of_time(self) -> bool:
        limit = self._live_model.settings.time_limit
        return limit is not None and time.monotonic() - self._started > limit

    def state_dict(self) -> dict[str, Tensor]:
        """Where the model stands between two epochs, as plain tensors; raises a UserError where its optimizer
        cannot be saved."""
        patience = torch.tensor([self._best, self._since_best], dtype=torch.float64)
        return {**super().state_dict(), **with_prefix("live", progress_of(self.bodies)), "patience": patience}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`: growth goes on to the same bits."""
        super().load_state_dict(tensors)
        put_progress(self.bodies, under_prefix("live", tensors))
        self._best, self._since_best = float(tensors["patience"][0]), int(tensors["patience"][1])

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare what every state of this model has; which seeds lived then is for the state to say."""

        def always(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value for name, value in named.items() if name.startswith("population.model.")}

        if len(tensors["population.folds"]) or self.bodies.hooks.folds:
            return  # layers have grown: they are made again before weights are put back
        check_like(always(self.state_dict()), always(tensors), "the saved model", "give the same model")

    def end(self, training: Any) -> StepResult:
        """The second half of a step; then the user's own callback."""
        result = super().end(training)
        score = float(self.rows.signals.accuracy)
        self._since_best = 0 if score > self._best else self._since_best + 1
        self._best = max(self._best, score)
        if self._live_model.settings.on_epoch is not None:
            self._live_model.settings.on_epoch(
                {
                    "epoch": self.clock,
                    "train_loss": float(result.training.loss),
                    "val_loss": float(self.rows.signals.loss),
                    "score": score,
                    "parameters": int(self.parameters),
                }
            )
        return result
