"""The environment of one living model: the steps of any growth, over the user's own model and loaders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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
from esper.growing.places import Place, find_places, floating_dtype
from esper.growing.settings import GrowSettings
from esper.growing.undoing import at_rest
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, NUM_BLUEPRINTS, Blueprint
from esper.lifecycle.slot_states import SlotStates
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.config import PopulationConfig
from esper.population.population import Population
from esper.simic.costs import ForwardCosts, Work
from esper.simic.deciding import BlockScores
from esper.simic.environment import GrowthEnvironment
from esper.simic.steps import EnvironmentSpec, StepResult
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.utils.errors import UserError, one_line, raised_at
from esper.utils.rows import check_like, under_prefix, with_prefix

_GATE = -1  # stands for a gate where a blueprint is asked for
_GAMMA = 0.995  # of the potential: nothing learns from the reward here


class _Task(Task):
    """Stands for data that stay with their loaders."""

    def __post_init__(self) -> None:
        """There are no splits to check."""


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


class LiveCosts:
    """Answers what `ForwardCosts` does, for layers that change and seeds that come and go.

    A seed is counted when one first lives at a place of its size: to count all that could grow there takes
    longer than many steps of training.
    """

    def __init__(self, hooks: Hooks):
        self.host = hooks.flops  # of one sample's forward pass through the model as it was given
        self._hooks = hooks
        self._counted: dict[tuple[int, Place], float] = {}  # by blueprint or _GATE

    def relative(self, slots: SlotStates, population: Population) -> Tensor:
        """What a training sample costs now over what it cost the model as it was given.  # [1]"""
        return self._now().relative(slots, population)

    def epoch(
        self, slots: SlotStates, population: Population, work: Work, looks: Tensor | None = None
    ) -> Tensor:
        """Operations of one epoch of training and one validation, as `ForwardCosts`.  # [1] float64"""
        return self._now().epoch(slots, population, work, looks)

    def _now(self) -> ForwardCosts:
        """One sample through the model and every living seed. A row of the model with another strength is a
        whole pass, so the model's cost lies behind the last slot."""
        hooks = self._hooks
        parts = torch.zeros(len(hooks.slots), NUM_BLUEPRINTS, dtype=torch.float64)
        gates = torch.zeros(len(hooks.slots), dtype=torch.float64)
        trunk = torch.zeros(len(hooks.slots) + 1, dtype=torch.float64)
        trunk[-1] = hooks.flops
        for k, slot in enumerate(hooks.slots):
            if slot.seed is None:
                continue
            if slot.blueprint in GROWTH_BLUEPRINTS:
                parts[k, slot.blueprint] = hooks.offers[k].flops.get(Blueprint(slot.blueprint), 0.0)
            else:
                parts[k, slot.blueprint] = self._count(slot.blueprint, hooks.place(k))
                gates[k] = self._count(_GATE, hooks.place(k))
        return ForwardCosts(trunk, parts, gates, self.host)

    def _count(self, blueprint: int, place: Place) -> float:
        """Operations of a seed, or of a gate, on one sample at a place; counted without data, once."""
        key = (blueprint, place)
        if key not in self._counted:
            with torch.device("meta"):
                body = (
                    BlendGate(place.width, place.topology)
                    if blueprint == _GATE
                    else build_blueprint(blueprint, place.topology, place.width, place.spatial_dims)
                )
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    body(torch.zeros(1, *place.shape))
            self._counted[key] = float(counter.get_total_flops())
        return self._counted[key]


class LiveEnvironment(GrowthEnvironment):
    """One member: the model itself."""

    def __init__(self, live: LiveModel, epochs: int, optimizer: torch.optim.Optimizer | None = None):
        settings = live.settings
        self._live_model, self._optimizer = live, optimizer
        self._started, self._best, self._since_best = time.monotonic(), float("-inf"), 0
        nothing = Split(torch.zeros(0), torch.zeros(0, dtype=torch.long))
        held, host = TestSplit(nothing), HostSpec("given")
        task = _Task("given", "given", (), live.judge.classes, nothing, nothing, held, host)
        super().__init__(
            EnvironmentSpec(
                task=task,
                members=torch.zeros(1, dtype=torch.long),
                gamma=_GAMMA,
                seed=settings.seed,
                episode=settings.episode(epochs),
                lifecycle=settings.rules(epochs),
                population=PopulationConfig(folds=settings.training.get("folds", 0)),
                best_epoch=True,
            )
        )

    @property
    def bodies(self) -> LivePopulation:
        """The population of one, by its own type."""
        return cast(LivePopulation, self.population)

    @property
    def batches(self) -> int:
        """Minibatches between two decisions: those of an epoch, as far as they are known."""
        return self.bodies.batches

    def _make_population(self) -> Population:
        bodies = LivePopulation(self._live_model, self._optimizer)
        bodies.out_of_time = self._out_of_time
        return cast(Population, bodies)

    def _prepare(self) -> None:
        self._train = self.validation = cast(Any, None)
        self.costs = cast(ForwardCosts, LiveCosts(self._live_model.hooks))

    def _work(self, measure: bool) -> Work:
        training, validation = self.bodies.samples
        return Work(training, validation, measure, best_epoch=self.spec.best_epoch)

    def scores_by_block(self, states: SlotStates, blocks: int) -> BlockScores:
        """The score on each part of the validation data, and what it loses there without each heard seed."""
        return self.bodies.scores_by_block(states, blocks)

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
