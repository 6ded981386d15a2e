"""The rows engine: many copies of a small model as one program, cut between its layers and run as rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.foundation.errors import UserError, one_line
from esper.growing.budget import Limited, SeedPrices, not_taken
from esper.growing.course import Prepared
from esper.growing.cutting import Cut, cut
from esper.growing.data import Data, read_data
from esper.growing.objectives import Goal, choose_goal
from esper.growing.plain import grown_name, plain_member
from esper.growing.randomness import Randomness
from esper.growing.request import Request
from esper.growing.undoing import at_rest
from esper.population.hosts import Host
from esper.population.row_module import RowModule
from esper.simic.environment import GrowthEnvironment
from esper.simic.steps import EnvironmentSpec
from esper.tamiyo.scripted import Static

_GAMMA = 0.995  # of the potential: nothing learns from the reward here
_JUDGED = 256  # samples on which the untrained model's loss is measured, where a score is made from it


class CannotRun(UserError):
    """A model that cannot be cut, or cannot run as rows, and why."""


def prepare_rows(request: Request) -> Prepared:
    """Make `members` copies of a model ready to grow side by side.

    Raises CannotRun for a model that is not made for it.
    """
    settings, device = request.settings, request.device
    data = read_data(request.train, request.val, settings.seed, settings.training.get("validation_samples"))
    try:
        pieces = _pieces(request, data)
        _check_rows(pieces.host, data.sample, device)
    except UserError as error:
        raise CannotRun(str(error)) from error
    with at_rest(pieces.original):
        outputs = pieces.original(data.train.inputs[:_JUDGED])
    goal, data = choose_goal(data, outputs, settings)
    environment = _environment(request, pieces, data, goal)
    decider, name, remarks = request.choose_controller(device)
    grows = not isinstance(decider, Static)
    prices = SeedPrices(environment.population, settings.blueprints if grows else None, pieces.causal)
    if missing := not_taken(decider, prices):
        raise CannotRun(
            f"the schedule asks for {', '.join(missing)}, which many copies at once cannot grow in this "
            "model; give engine='live'"
        )
    return Prepared(
        environment=environment,
        engine="rows",
        reason="a small model with data in memory",
        controller=Limited(decider, prices, request.budget if grows else None),
        decides=name,
        remarks=remarks,
        randomness=Randomness(device),
        models=lambda: tuple(
            plain_member(pieces, environment.population, environment.slots, m)
            for m in range(settings.members)
        ),
        slot_names=pieces.slot_names,
        module_names=tuple(grown_name(name) for name in pieces.slot_names),
        score_name=goal.score_name,
        topology=pieces.host.topology,
        example=(data.train.inputs[:2],),
    )


def _pieces(request: Request, data: Data) -> Cut:
    return cut(request.build_model(), data.sample, request.slots, request.settings.topology)


def _environment(request: Request, pieces: Cut, data: Data, goal: Goal) -> GrowthEnvironment:
    settings = request.settings

    def make_host() -> Host:
        """The user's weights; or new ones, where a function makes the model."""
        return pieces.host if isinstance(request.model, nn.Module) else _pieces(request, data).host

    return GrowthEnvironment(
        EnvironmentSpec(
            task=data.as_task(pieces.host.topology, goal.classes),
            members=torch.arange(settings.members),
            gamma=_GAMMA,
            seed=settings.seed,
            device=request.device,
            episode=settings.episode(request.epochs),
            lifecycle=settings.rules(request.epochs),
            population=settings.population(len(data.train), len(data.validation), data.batch_size),
            make_host=make_host,
            objective=goal.objective,
            best_epoch=True,
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
            raise UserError(
                f"the model's part {_described(part)} cannot run for many copies at once "
                f"({one_line(error)}); use layers without in-place arithmetic and without branches on values"
            ) from error
        x = out.detach()


def _described(part: nn.Module) -> str:
    kinds = [type(child).__name__ for child in part.modules() if not list(child.children())]
    return "-".join(kinds[:6]) or type(part).__name__
