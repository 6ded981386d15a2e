"""Growth for people who keep their own training loop.

    grower = esper.Grower(model, optimiser, train=loader, val=val_loader, epochs=40)
    for epoch in range(40):
        for x, y in loader:
            ...                                  # train the model as you always did
        grower.step()
    plain = grower.finish()

Seeds hang on the model's own submodules by hooks, so the loop, the optimiser and its schedule stay as they
are. A seed that still learns in isolation is trained inside `step`, on one pass over `train`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from esper.foundation.errors import UserError
from esper.growing.batches import UserStep, loaders_of
from esper.growing.budget import Limited, Prices
from esper.growing.controllers import make_controller
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.randomness import own_randomness
from esper.growing.settings import settings_of
from esper.lifecycle.actions import Actions, Blueprint, Head, Op
from esper.lifecycle.slot_states import SlotStates
from esper.simic.ending import Ending
from esper.tamiyo.controller import Controller, Scene

METRICS = ("val_loss", "val_accuracy")
SETTINGS = ("objective", "loss", "metric", "blueprints", "lr", "seed", "topology", "lifecycle")
TRAINING_SETTINGS = ("batch_size", "weight_decay", "precision", "clip_norm")  # of seeds in isolation


class Grower:
    """Watches a model that somebody trains, and grows it: one `step` after every epoch.

    model, optimiser: the user's own. New parameters join the optimiser's first group, with a state of their
        own, when they begin to be trained.
    train, val, slots, controller, epochs, budget, step: as in `esper.grow`.
    settings: some of those of `esper.grow`; one that a loop of one's own decides is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: Optimizer,
        train: Any,
        val: Any = None,
        slots: Sequence[str | int] | None = None,
        controller: str | Controller = "heuristic",
        epochs: int = 30,
        budget: int | None = None,
        step: UserStep | None = None,
        **settings: Any,
    ):
        chosen = settings_of(settings, (*SETTINGS, *TRAINING_SETTINGS))
        cpu = torch.device("cpu")
        device = next((p.device for p in model.parameters()), cpu)
        self.model, self._seed, self._device = model, chosen.seed, device
        with own_randomness(chosen.seed, device):
            live = LiveModel(model, loaders_of(train, val, chosen), chosen, device, slots, step)
            self._environment = LiveEnvironment(live, epochs, optimiser)
            self._environment.reset(0)
        self.slot_names = tuple(place.name for place in live.places)
        prices = Prices.of(self._environment.bodies.bodies.host, cpu, chosen.blueprints, causal=False)
        decider = make_controller(controller, self._environment.spec.lifecycle.gates, cpu)
        self._controller = Limited(decider, prices, budget)
        self._controller.begin(Scene(self._environment.members, len(live.places), chosen.seed, cpu))
        self._ending = Ending(self._environment)
        self._decide()

    @property
    def states(self) -> SlotStates:
        """What lives where.  # [1, S]"""
        return self._environment.slots

    def step(self, metrics: Mapping[str, float] | None = None) -> str:
        """An epoch of the user's training is over: measure, decide, grow. Returns what was done, in words.

        metrics: val_loss and val_accuracy (a score in 0..1) as the user measures them; measured here on `val`
        where they are left out. After the last epoch nothing more is decided.
        """
        given = _checked(metrics or {})
        environment, bodies = self._environment, self._environment.bodies
        if environment.done:
            raise UserError(
                f"the {environment.steps} epochs are over; call finish(), or give a larger epochs"
            )
        was_training = self.model.training
        draw = hash((self._seed, environment.clock)) & 0x7FFFFFFF
        with own_randomness(draw, self._device), torch.inference_mode(False), torch.enable_grad():
            training = bodies.train_isolated(environment.begun.states)
            bodies.told = given
            self._ending.look(environment.end(training))
        self.model.train(was_training)
        return "the end" if environment.done else self._decide()

    def finish(self) -> nn.Module:
        """The grown model, plain, on the CPU: the user's class and names, and the seeds that earned a place.

        The weights are those of the best epoch, and every seed that lived then is decided by the test of
        `esper.simic.deciding`. The given model is left with those weights and without hooks.
        """
        with own_randomness(self._seed, self._device):
            self._ending.finish()
        bodies = self._environment.bodies
        plain = bodies.plain_model(self._environment.slots)
        bodies.hooks.detach()
        return plain

    def _decide(self) -> str:
        environment = self._environment
        actions = self._controller.decide(environment.observe(), environment.masks(), environment.clock)
        environment.begin(actions)
        environment.bodies.follow(environment.begun.states)
        return self._told(actions if isinstance(actions, Actions) else actions[0])

    def _told(self, actions: Actions) -> str:
        slot = self.slot_names[int(actions[Head.SLOT][0])]
        op, blueprint = Op(int(actions[Head.OP][0])), Blueprint(int(actions[Head.BLUEPRINT][0]))
        if not bool(self._environment.begun.succeeded):
            return f"asked for {op.name} after {slot} and was refused"
        words = {Op.WAIT: "waited", Op.GERMINATE: f"planted {blueprint.name} after {slot}"}
        return words.get(op, f"{op.name.lower()} after {slot}")


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
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
