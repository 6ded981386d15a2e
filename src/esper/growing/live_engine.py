"""The live engine: any one model, as it is, trained on its own loader while seeds grow on its submodules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.batches import check_end, first_batch, inputs_and_targets, loaders_of
from esper.growing.budget import Limited, SeedPrices
from esper.growing.course import Prepared
from esper.growing.live_environment import LiveEnvironment, LiveModel
from esper.growing.live_slots import installed_name
from esper.growing.places import Place, floating_dtype, trained
from esper.growing.randomness import Randomness
from esper.growing.request import Request
from esper.growing.settings import GrowSettings
from esper.runs.lanes import HostPart
from esper.simic.telemetry import layers_of
from esper.tamiyo.scripted import Static

_SAMPLES = 4  # of an example


@dataclass(frozen=True)
class LiveGrowth:
    """A model that is looked at, and whoever decides what grows in it."""

    live: LiveModel
    environment: LiveEnvironment
    controller: Limited
    decides: str  # the controller's name
    remarks: tuple[str, ...]  # on what was asked for and cannot be had
    randomness: Randomness

    @staticmethod
    def of(
        request: Request,
        settings: GrowSettings,
        model: nn.Module,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> LiveGrowth:
        """optimizer: the user's own, whose loop trains the model; without one it is trained here."""
        loaders = loaders_of(request.train, request.val, settings, floating_dtype(model))
        check_end("train", loaders[0], "batches_per_epoch", settings.training.get("batches_per_epoch"))
        check_end("val", loaders[1], "validation_samples", settings.training.get("validation_samples"))
        decider, name, remarks = request.choose_controller(torch.device("cpu"))
        grows = not isinstance(decider, Static)
        live = LiveModel(model, loaders, settings, device, request.slots, request.step, grows)
        if not trained(model):
            rest = "only what grows is trained" if grows else "nothing is trained, and nothing grows"
            warnings.warn(
                f"all parameters of {type(model).__name__} are frozen (requires_grad is False): {rest}",
                stacklevel=2,
            )
        environment = LiveEnvironment(live, request.epochs, optimizer)
        # Limits on growth are for whoever grows: a model that cannot grow can be trained all the same.
        allowed = settings.blueprints if grows else None
        prices = SeedPrices(environment.bodies, allowed, refusals=live.hooks.refusals)
        controller = Limited(decider, prices, request.budget if grows else None)
        remarks = (*remarks, *controller.remarks)
        return LiveGrowth(live, environment, controller, name, remarks, Randomness(device, loaders))


def prepare(request: Request) -> Prepared:
    """Make a copy of the model ready to grow."""
    model = copy.deepcopy(request.build_model()).to(request.device)
    growth = LiveGrowth.of(request, request.settings, model, request.device)
    environment, places = growth.environment, growth.live.places
    bodies = environment.bodies
    bodies.stop = lambda: request.stop.requested
    return Prepared(
        environment=environment,
        controller=growth.controller,
        decides=growth.decides,
        randomness=growth.randomness,
        model=lambda: bodies.plain_model(environment.slots),
        slot_names=tuple(place.name for place in places),
        module_names=tuple(installed_name(model, place) for place in places),
        score_name=growth.live.judge.score_name,
        topology=places[0].topology,
        example=_example(first_batch("val", growth.live.loaders[1])),
        parts=_parts(model, places),
        folded=bodies.hooks.folded,
        widened=bodies.hooks.widened,
        broken_off=lambda: bodies.interrupted,
        remarks=(*growth.remarks, *filter(None, [growth.live.judge.remark])),
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
