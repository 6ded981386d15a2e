"""Growth in a training loop of one's own.

    grower = esper.Grower(model, optimizer, train=loader, val=val_loader, epochs=40)
    for epoch in range(40):
        for x, y in loader:
            ...                                  # train the model as you always did
        grower.step()
    plain = grower.finish()

Seeds hang on the model's own submodules by hooks, so the loop, the optimizer and its schedule stay as they
are. A seed that still learns in isolation is trained inside `step`, on one pass over `train`.

To stop and go on, save `grower.state_dict()` after a `step`; in a new process, make everything as before and
give it to `grower.load_state_dict`, last of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growing.api import Growth, check_arguments, check_model
from esper.growing.criterion import UserStep
from esper.growing.data import seeded_generators
from esper.growing.live_optimizer import check_optimizer, hide_seeds
from esper.growing.result import describe_decision
from esper.growing.settings import check_settings
from esper.growing.slots import SlotNames
from esper.lifecycle.actions import Actions
from esper.lifecycle.slot_states import SlotStates
from esper.simic.ending import FinalSelection
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.utils.errors import UserError
from esper.utils.rows import add_prefix, refill, strip_prefix, tensors_of

METRICS = ("val_loss", "val_accuracy")
SETTINGS = ("objective", "loss", "metric", "blueprints", "lr", "seed", "topology", "lifecycle")
TRAINING_SETTINGS = (  # of seeds in isolation, and of how much is read of loaders without a length
    *("batch_size", "weight_decay", "precision", "clip_norm"),
    *("batches_per_epoch", "validation_batch", "validation_samples"),
)


class Grower:
    """Grows a model that a loop of the user's trains: one `step` after every epoch.

    model, optimizer: the user's own. New parameters join the optimizer's group of their kind, with a state
        of their own, when they begin to blend in. `optimizer.state_dict()` has the same form whatever grows.
    train, val, slots, controller, epochs, budget, step, force: as in `esper.grow`; `remarks` says where
        nothing grows, and why.
    settings: some of those of `esper.grow`; one that a loop of one's own decides is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train: Any,
        val: Any = None,
        slots: SlotNames | None = None,
        controller: str | Controller | None = None,
        epochs: int = 30,
        budget: int | None = None,
        step: UserStep | None = None,
        force: bool = False,
        **settings: Any,
    ):
        check_model(model)
        check_optimizer("optimizer is", optimizer)
        chosen = check_settings(settings, (*SETTINGS, *TRAINING_SETTINGS), "a loop of your own")
        check_arguments(epochs, budget, step)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.model, self._seed, self._device = model, chosen.seed, device
        with seeded_generators(chosen.seed, device):
            growth = Growth(
                model, train, val, chosen, device, epochs, slots, step, controller, force, budget, optimizer
            )
            self._bodies, self._environment = growth.bodies, growth.environment
            self._environment.reset(0, uses_metrics=growth.controller.uses_metrics)
        self.slot_names = growth.slot_names
        self._controller, self._generators = growth.controller, growth.generators
        self.remarks = growth.remarks  # on what was asked for and cannot be had, one sentence each
        env, batches = self._environment, self._bodies.batches
        self._info = EpisodeInfo(env.members, env.num_slots, chosen.seed, env.device, batches=batches)
        self._controller.begin(self._info)
        self._ending = FinalSelection(self._environment)
        self._handles = hide_seeds(optimizer, lambda: {id(p) for p in self.seed_parameters})
        self._decide()

    @property
    def states(self) -> SlotStates:
        """The states of the slots.  # [1, S]"""
        return self._environment.slots

    @property
    def seed_parameters(self) -> list[nn.Parameter]:
        """Those of seeds that the user's optimizer trains; `model.parameters()` does not hold them."""
        return [p for own in self._bodies.optimizer.seeds.values() for p in own]

    @property
    def epochs_done(self) -> int:
        """How many epochs are over, and with them how many times `step` was called."""
        return self._environment.clock

    @property
    def done(self) -> bool:
        """Whether all epochs are over, so that nothing is decided any more."""
        return self._environment.done

    def step(self, metrics: Mapping[str, float] | None = None) -> str:
        """Measure, decide and grow after an epoch of the user's training; return what was done, in words.

        The first one also says why nothing grows, where that is so.

        metrics: val_loss and val_accuracy (a score in 0..1) as the user measures them; measured here on `val`
        where they are left out. After the last epoch nothing more is decided.
        """
        given = _check_metrics(metrics or {})
        environment, bodies = self._environment, self._bodies
        if environment.done:
            raise UserError(
                f"the {environment.steps} epochs are over; call finish(), or give a larger epochs"
            )
        draw = hash((self._seed, environment.clock)) & 0x7FFFFFFF
        with seeded_generators(draw, self._device), torch.inference_mode(False), torch.enable_grad():
            training = bodies.train_isolated(environment.applied.slots)
            bodies.reported = given
            self._ending.update(environment.finish_step(training))
        done = "the end" if environment.done else self._decide()
        return "; ".join([done, *self.remarks]) if environment.clock == 1 else done

    def finish(self) -> nn.Module:
        """Return the grown model, plain, on the CPU: the user's class and names, with the seeds it keeps.

        The weights are those of the best epoch, and every seed that lived then is decided by the test of
        `esper.simic.ending`. The given model is left with those weights and without hooks.
        """
        with seeded_generators(self._seed, self._device):
            self._ending.finish()
        plain = self._bodies.plain_model(self._environment.slots)
        self.close()
        return plain

    def close(self) -> None:
        """Remove all hooks from the model and the optimizer; the weights stay as they are."""
        self._bodies.live.detach()
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that growth needs to go on from here, as plain tensors.

        That is the model with its seeds, the optimizer state of both, slots, evidence and decisions, the best
        epoch so far, and the random states of torch, NumPy, Python and the loaders. The optimizer's settings,
        a schedule of rates and the like are the user's to save.
        """
        environment = self._environment
        parts = {
            "environment": environment.state_dict(),
            "live": self._bodies.progress_tensors(),
            "begun": tensors_of(environment.applied),
            "ending": self._ending.state_dict() if environment.clock else {},
            "controller": self._controller.state_dict(),
            # A seed's latest gradients are evidence for the next decision, which may come before they are
            # computed again: a state can be saved on the last step of an epoch.
            "gradients": {name: p.grad for name, p in self._named_seeds() if p.grad is not None},
            "generators": self._generators.state_dict(),
        }
        return {name: value for key, own in parts.items() for name, value in add_prefix(key, own).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state to the same bits, with the same model, data, controller and settings.

        Raises a ValueError for the state of another model and a UserError for one that is no state at all.
        """
        if "environment.clock" not in state:
            raise UserError("the state has no environment.clock; give what Grower.state_dict returned")
        environment = self._environment
        environment.load_state_dict(strip_prefix("environment", state))
        self._bodies.load_progress(strip_prefix("live", state))
        environment.applied = refill(environment.applied, strip_prefix("begun", state))
        self._bodies.sync_slots(environment.applied.slots)
        gradients = strip_prefix("gradients", state)
        for name, parameter in self._named_seeds():
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        if environment.clock:
            self._ending.load_state_dict(strip_prefix("ending", state))
        self._controller.begin(self._info)
        self._controller.load_state_dict(strip_prefix("controller", state))
        self._generators.load_state_dict(strip_prefix("generators", state))

    def _named_seeds(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all seeds, in isolation too, by slot and name."""
        for k, slot in enumerate(self._bodies.slots):
            yield from ((f"{k}.{name}", parameter) for name, parameter in slot.named_parameters())

    def _decide(self) -> str:
        environment = self._environment
        observation, masks = environment.observe(), environment.masks()
        actions = self._controller.decide(observation, masks, environment.clock)
        environment.apply_actions(actions)
        self._bodies.sync_slots(environment.applied.slots)
        first, outcome = actions if isinstance(actions, Actions) else actions[0], environment.applied.outcome
        states = outcome.states
        return describe_decision(
            self.slot_names,
            *(rows[0] for rows in (first.choices, states.stage, states.blueprint)),
            *(rows[0] for rows in (outcome.germinated, outcome.succeeded, outcome.refused_by)),
        )


def _check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    unknown = sorted(set(metrics) - set(METRICS))
    if unknown:
        raise UserError(f"metrics name {', '.join(unknown)}; allowed are {', '.join(METRICS)}")
    values = {name: float(value) for name, value in metrics.items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"{bad[0]} is {values[bad[0]]}: training has broken; lower the learning rate, or go back to a "
            "checkpoint before you step"
        )
    return values
