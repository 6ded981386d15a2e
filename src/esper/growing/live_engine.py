"""The live engine: any one model, as it is, trained on its own loader while seeds grow on its submodules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.batches import first_batch, loaders_of
from esper.growing.budget import Limited, LivePrices
from esper.growing.controllers import default_controller, make_controller, name_of
from esper.growing.course import Prepared
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.live_slots import installed_name
from esper.growing.places import Place
from esper.growing.randomness import Randomness
from esper.growing.request import Request
from esper.growing.settings import LIVE_SETTINGS, settings_of
from esper.simic.lanes import layers_of
from esper.tamiyo.scripted import Static
from esper.telemetry.lanes import HostPart

_SAMPLES = 4  # of an example


def prepare_live(request: Request) -> Prepared:
    """Make one model ready. Raises a UserError for a setting that this engine has no use for."""
    settings = settings_of(request.given, LIVE_SETTINGS)
    model = copy.deepcopy(request.build_model()).to(request.device)
    loaders = loaders_of(request.train, request.val, settings)
    randomness = Randomness(request.device, loaders)
    gates, given = settings.rules(request.epochs).gates, request.controller
    decider = None if given is None else make_controller(given, gates, torch.device("cpu"))
    grows = not isinstance(decider, Static)
    live = LiveModel(model, loaders, settings, request.device, request.slots, request.step, grows)
    if decider is None:
        given = default_controller(live.hooks, request.budget, settings.blueprints)
        decider = make_controller(given, gates, torch.device("cpu"))
    environment = LiveEnvironment(live, request.epochs)
    bodies = environment.bodies
    bodies.stop = lambda: request.stop.requested
    controller = Limited(decider, LivePrices(bodies, settings.blueprints), request.budget)
    return Prepared(
        environment=environment,
        controller=controller,
        decides=name_of(given),
        randomness=randomness,
        models=lambda: (bodies.plain_model(environment.slots),),
        slot_names=tuple(place.name for place in live.places),
        module_names=tuple(installed_name(model, place) for place in live.places),
        score_name=live.judge.score_name,
        topology=live.places[0].topology,
        example=_example(first_batch("val", loaders[1])),
        parts=_parts(model, live.places),
        folded=bodies.hooks.folded,
        widened=bodies.hooks.widened,
        broken_off=lambda: bodies.interrupted,
        remarks=controller.remarks,
    )


def _parts(model: nn.Module, places: Sequence[Place]) -> tuple[HostPart, ...]:
    """The submodules behind which seeds may grow, and what else there is, for a drawing."""
    modules = [(place, model.get_submodule(place.name)) for place in places]
    shown = [
        HostPart(
            place.name, layers_of(module), sum(p.numel() for p in module.parameters()), tuple(place.shape)
        )
        for place, module in modules
    ]
    inside = {id(p) for _, module in modules for p in module.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return (*shown, HostPart("the rest", (), rest, ()))


def _example(batch: Any) -> tuple[Any, ...]:
    """What a model is called with, where a batch says so; nothing for batches of another kind."""
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or len(batch) < 2:
        return ()
    inputs = batch[:-1]
    inputs = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple | list) else inputs
    return tuple(x[:_SAMPLES] if isinstance(x, Tensor) else x for x in inputs)
