"""The live engine: any one model, as it is, trained on its own loader while seeds grow on its submodules."""

from __future__ import annotations

import copy
from typing import Any

from esper.growing.batches import loaders_of
from esper.growing.budget import Limited, Prices
from esper.growing.controllers import make_controller
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.live_slots import installed_name
from esper.growing.progress import GrowthBar
from esper.growing.request import Request
from esper.growing.result import Grown
from esper.growing.settings import LIVE_SETTINGS, settings_of
from esper.simic.ending import Ending


def grow_live(request: Request, given: dict[str, Any]) -> Grown:
    """Grow one model. Raises a UserError for a setting that this engine has no use for.

    Ctrl-C ends the run with what has grown so far, after the batch at hand; a second one is raised.
    """
    settings = settings_of(given, LIVE_SETTINGS)
    model = copy.deepcopy(request.made()).to(request.device)
    loaders = loaders_of(request.train, request.val, settings)
    live = LiveModel(model, loaders, settings, request.device, request.slots, request.step)
    environment = LiveEnvironment(live, request.epochs)
    bodies, device = environment.bodies, environment.device
    decider = make_controller(request.controller, environment.spec.lifecycle.gates, device)
    prices = Prices.of(bodies.bodies.host, device, settings.blueprints, causal=False)
    ending = Ending(environment)
    with GrowthBar(request.epochs, live.judge.score_name, settings.progress) as bar:
        limited = Limited(decider, prices, request.budget)
        record = ending.play(limited, on_step=lambda result: bar.update(result.observation))
    return Grown(
        models=(bodies.plain_model(environment.slots),),
        record=record,
        slot_names=tuple(place.name for place in live.places),
        module_names=tuple(installed_name(model, place) for place in live.places),
        score_name=live.judge.score_name,
        topology=live.places[0].topology,
        epochs=tuple(ending.epoch.tolist()),
    )
