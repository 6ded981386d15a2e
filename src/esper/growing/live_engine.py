"""The live engine: any one model, as it is, trained on its own loader while seeds grow on its submodules."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.controllers import make_controller
from esper.foundation.errors import UserError
from esper.growing.batches import first_batch, inputs_and_targets, loaders_of
from esper.growing.budget import Limited, SeedPrices
from esper.growing.course import Prepared
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.live_hooks import Hooks
from esper.growing.live_slots import installed_name
from esper.growing.places import Place
from esper.growing.randomness import Randomness
from esper.growing.request import Request
from esper.growing.settings import HEURISTIC, LIVE_SETTINGS, GrowSettings, settings_of
from esper.lifecycle.actions import Blueprint
from esper.simic.lanes import layers_of
from esper.tamiyo.scripted import Static
from esper.telemetry.lanes import HostPart

WIDENING = "schedule:widen_full@0.1"  # twice the hidden units, from a tenth of the epochs on
_SAMPLES = 4  # of an example


def default_controller(hooks: Hooks, budget: int | None, blueprints: Collection[str] | None) -> str:
    """Who decides where nobody is named: of `benchmarks.when_to_grow` the one that does best against a wider
    model at equal FLOPs, where it can grow anything; else the heuristic."""
    wide = Blueprint.WIDEN_FULL
    prices = [offer.parameters[wide] for offer in hooks.offers if wide in offer.parameters]
    fits = prices and (budget is None or min(prices) <= budget)
    return WIDENING if fits and (blueprints is None or wide.name in blueprints) else HEURISTIC


@dataclass(frozen=True)
class LiveGrowth:
    """A model that is looked at, and whoever decides what grows in it."""

    live: LiveModel
    environment: LiveEnvironment
    controller: Limited
    decides: str  # the controller's name
    randomness: Randomness

    @staticmethod
    def of(
        request: Request,
        settings: GrowSettings,
        model: nn.Module,
        device: torch.device,
        optimiser: torch.optim.Optimizer | None = None,
    ) -> LiveGrowth:
        """optimiser: the user's own, whose loop trains the model; without one it is trained here."""
        loaders = loaders_of(request.train, request.val, settings)
        given, cpu = request.controller, torch.device("cpu")
        decider = None if given is None else make_controller(given, cpu)
        grows = not isinstance(decider, Static)
        live = LiveModel(model, loaders, settings, device, request.slots, request.step, grows)
        if decider is None:
            given = default_controller(live.hooks, request.budget, settings.blueprints)
            decider = make_controller(given, cpu)
        environment = LiveEnvironment(live, request.epochs, optimiser)
        prices = SeedPrices(environment.bodies, settings.blueprints, refusals=live.hooks.refusals)
        controller = Limited(decider, prices, request.budget)
        name = given if isinstance(given, str) else type(given).__qualname__
        return LiveGrowth(live, environment, controller, name, Randomness(device, loaders))


def prepare_live(request: Request, reason: str) -> Prepared:
    """Make one model ready. Raises a UserError for a setting that this engine has no use for.

    reason: why it is this engine.
    """
    if request.settings.members > 1:
        raise UserError(
            f"members is {request.settings.members}, and the live engine trains one model; give "
            "engine='rows' for several at once, or leave members out"
        )
    settings = settings_of(request.given, LIVE_SETTINGS, "the live engine")
    model = copy.deepcopy(request.build_model()).to(request.device)
    growth = LiveGrowth.of(request, settings, model, request.device)
    environment, places = growth.environment, growth.live.places
    bodies = environment.bodies
    bodies.stop = lambda: request.stop.requested
    return Prepared(
        environment=environment,
        engine="live",
        reason=reason,
        controller=growth.controller,
        decides=growth.decides,
        randomness=growth.randomness,
        models=lambda: (bodies.plain_model(environment.slots),),
        slot_names=tuple(place.name for place in places),
        module_names=tuple(installed_name(model, place) for place in places),
        score_name=growth.live.judge.score_name,
        topology=places[0].topology,
        example=_example(first_batch("val", growth.live.loaders[1])),
        parts=_parts(model, places),
        folded=bodies.hooks.folded,
        widened=bodies.hooks.widened,
        broken_off=lambda: bodies.interrupted,
        remarks=growth.controller.remarks,
    )


def _parts(model: nn.Module, places: Sequence[Place]) -> tuple[HostPart, ...]:
    """The submodules behind which seeds may grow, and what else there is, for a drawing."""
    shown, inside = [], set[nn.Parameter]()
    for place in places:
        module = model.get_submodule(place.name)
        own = list(module.parameters())
        shown.append(HostPart(place.name, layers_of(module), sum(p.numel() for p in own), tuple(place.shape)))
        inside.update(own)
    rest = sum(p.numel() for p in model.parameters() if p not in inside)
    return (*shown, HostPart("the rest", (), rest, ()))


def _example(batch: Any) -> tuple[Any, ...]:
    """What a model is called with, where a batch says so; nothing for batches of another kind."""
    pair = inputs_and_targets(batch)
    return () if pair is None else tuple(x[:_SAMPLES] if isinstance(x, Tensor) else x for x in pair[0])
