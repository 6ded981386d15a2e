"""Grow a model of your own, in a few lines.

grown = esper.grow(model, train=(x, y), epochs=30)
grown.model                # a plain nn.Module
print(grown.report())      # what grew where, and what it earned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.foundation.devices import choose_device
from esper.foundation.errors import UserError
from esper.growing.budget import Limited, Prices
from esper.growing.controllers import make_controller
from esper.growing.cutting import Cut, cut
from esper.growing.data import Data, read_data
from esper.growing.objectives import Goal, choose_goal
from esper.growing.plain import plain_member
from esper.growing.progress import GrowthBar
from esper.growing.result import Grown
from esper.growing.settings import GrowSettings, settings_of
from esper.population.hosts import Host
from esper.population.row_module import RowModule
from esper.simic.ending import Ending
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.tamiyo.controller import Controller

ModelOrMaker = nn.Module | Callable[[], nn.Module]
_GAMMA = 0.995  # of the potential: nothing learns from the reward here
_JUDGED = 256  # samples on which the untrained model's loss is measured, where a score is made from it


def grow(
    model: ModelOrMaker,
    train: Any,
    val: Any = None,
    slots: Sequence[str | int] | None = None,
    controller: str | Controller = "heuristic",
    epochs: int = 30,
    budget: int | None = None,
    **settings: Any,
) -> Grown:
    """Train a model and let it grow where that helps.

    model: any nn.Module that can be cut between its layers, or a function that makes one (then every member
        begins with weights of its own). It is copied, never changed; frozen parameters stay frozen.
    train, val: a DataLoader, a Dataset, or a pair (inputs, targets) of tensors or arrays. A loader is read
        once. Without `val`, a fifth of `train` is held back. Nothing else is ever looked at: keep a test set.
    slots: names of the submodules after which something may grow; found by tracing if left out.
    controller: heuristic, tamiyo, periodic, scheduled, random, static (which never grows), or an object.
    epochs: passes over the training data; after each the controller decides once.
    budget: the most parameters that growth may add at any one time; None is no limit.
    settings: those of `GrowSettings` (lr, batch_size, loss, metric, members, seed, device ...).
    """
    chosen = settings_of(settings)
    if epochs < 1:
        raise UserError(f"epochs is {epochs}; at least 1 is needed")
    device = choose_device(chosen.device)
    with _own_randomness(chosen.seed, device):
        data = read_data(train, val, chosen.seed, chosen.training.get("validation_samples"))
        pieces = _pieces(model, data, slots, chosen)
        goal, data = choose_goal(data, pieces.outputs(data.train.inputs[:_JUDGED]), chosen)
        _check_rows(pieces.host, data.sample, device)
        environment = _environment(model, pieces, data, goal, _Run(slots, epochs, chosen, device))
        decider = make_controller(controller, chosen.rules(epochs).gates, device)
        prices = Prices.of(pieces.host, device, chosen.blueprints, pieces.causal)
        ending = Ending(environment)
        with GrowthBar(epochs, goal.score_name, chosen.progress) as bar:
            record = ending.play(
                Limited(decider, prices, budget), on_step=lambda result: bar.update(result.observation)
            )
        models = tuple(
            plain_member(pieces, environment.population, environment.slots, m) for m in range(chosen.members)
        )
    return Grown(
        models, record, pieces.slot_names, goal.score_name, pieces.host.topology, tuple(ending.epoch.tolist())
    )


@dataclass(frozen=True)
class _Run:
    slots: Sequence[str | int] | None
    epochs: int
    settings: GrowSettings
    device: torch.device


def _pieces(
    model: ModelOrMaker, data: Data, slots: Sequence[str | int] | None, settings: GrowSettings
) -> Cut:
    made = model if isinstance(model, nn.Module) else _made(model)
    return cut(made, data.sample, slots, settings.topology)


def _made(maker: Callable[[], nn.Module]) -> nn.Module:
    if not callable(maker):
        raise UserError(f"model is a {type(maker).__name__}; give an nn.Module, or a function that makes one")
    return maker()


def _environment(model: ModelOrMaker, pieces: Cut, data: Data, goal: Goal, run: _Run) -> GrowthEnvironment:
    settings = run.settings

    def make_host() -> Host:
        """The user's weights; or new ones, where a function makes the model."""
        return pieces.host if isinstance(model, nn.Module) else _pieces(model, data, run.slots, settings).host

    return GrowthEnvironment(
        EnvironmentSpec(
            task=data.as_task(pieces.host.topology, goal.classes),
            members=torch.arange(settings.members),
            gamma=_GAMMA,
            seed=settings.seed,
            device=run.device,
            episode=settings.episode(run.epochs),
            lifecycle=settings.rules(run.epochs),
            population=settings.population(len(data.train), len(data.validation), data.batch_size),
            make_host=make_host,
            objective=goal.objective,
        )
    )


def _check_rows(host: Host, sample: Tensor, device: torch.device) -> None:
    """Run every part once for two rows of weights, learning and not, before anything is trained."""
    x = sample.to(device).unsqueeze(0).expand(2, *sample.shape)
    for part in (*host.segments, host.head):
        rows = RowModule(part, device)
        weights = torch.cat([p.detach().flatten() for p in part.parameters()] or [torch.zeros(0)])
        try:
            for training in (True, False):
                buffers = rows.initial_buffers(2, device)
                keys = torch.zeros(2, dtype=torch.long, device=device)
                out = rows(weights.to(device).expand(2, -1), x, buffers, training, keys)
        except Exception as error:  # whatever a stranger's layer raises under vmap
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the model's part {_described(part)} cannot run for many copies at once ({reason}); use "
                "layers without in-place arithmetic and without branches on values"
            ) from error
        x = out.detach()


def _described(part: nn.Module) -> str:
    kinds = [type(child).__name__ for child in part.modules() if not list(child.children())]
    return "-".join(kinds[:6]) or type(part).__name__


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and new models draw from the seed, and the caller's generators are left as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
