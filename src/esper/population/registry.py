"""The registry of blueprints: which module is which blueprint in which topology, and how large it is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from esper.lifecycle.actions import TOPOLOGY_BLUEPRINTS, Blueprint

ParameterFormula = Callable[[int, int], int]  # (width, spatial_dims) → number of parameters
Factory = Callable[[int, int], nn.Module]
SeedClass = TypeVar("SeedClass", bound=type[nn.Module])


@dataclass(frozen=True)
class BlueprintEntry:
    """What the registry knows about a blueprint in one topology."""

    blueprint: Blueprint
    topology: str
    factory: Factory
    parameters: ParameterFormula
    summary: str


_REGISTRY: dict[tuple[Blueprint, str], BlueprintEntry] = {}


def blueprint(
    name: Blueprint, topologies: Collection[str], parameters: ParameterFormula
) -> Callable[[SeedClass], SeedClass]:
    """Register the decorated class as the body of a blueprint in these topologies; the latest wins."""

    def register(cls: SeedClass) -> SeedClass:
        for topology in topologies:
            if topology not in TOPOLOGY_BLUEPRINTS or name not in TOPOLOGY_BLUEPRINTS[topology]:
                fitting = [t for t, members in TOPOLOGY_BLUEPRINTS.items() if name in members]
                raise ValueError(
                    f"{cls.__name__} registers {name.name} for topology {topology!r}; "
                    f"{name.name} exists for {', '.join(fitting)}"
                )
            summary = (cls.__doc__ or cls.__name__).strip().splitlines()[0]
            _REGISTRY[name, topology] = BlueprintEntry(name, topology, cls, parameters, summary)
        return cls

    return register


def blueprint_entry(name: int, topology: str) -> BlueprintEntry:
    """The registry's entry, or one sentence about what is wrong."""
    if topology not in TOPOLOGY_BLUEPRINTS:
        raise ValueError(f"topology is {topology!r}; allowed are {', '.join(TOPOLOGY_BLUEPRINTS)}")
    known = {int(b) for b in TOPOLOGY_BLUEPRINTS[topology]}
    if name not in known:
        given = Blueprint(name).name if name in set(Blueprint) else name
        allowed = ", ".join(b.name for b in sorted(TOPOLOGY_BLUEPRINTS[topology]))
        raise ValueError(f"blueprint {given} is not for {topology} hosts; allowed are {allowed}")
    return _REGISTRY[Blueprint(name), topology]


def build_blueprint(name: int, topology: str, width: int, spatial_dims: int = 0) -> nn.Module:
    """A new seed for a joint of this width.

    Raises ValueError for a blueprint or width that does not fit, for a body that changes the shape of its
    input and for one that has another number of parameters than its formula says.
    """
    entry = blueprint_entry(name, topology)
    if width < 1:
        raise ValueError(f"width is {width}; a seed needs a width of at least 1")
    seed = entry.factory(width, spatial_dims)
    sample = torch.ones(2, *_probe_shape(topology, width, spatial_dims))
    with torch.no_grad():
        result = seed(sample)
    if result.shape != sample.shape:
        raise ValueError(
            f"blueprint {entry.blueprint.name} ({type(seed).__name__}) turns shape {list(sample.shape)} into "
            f"{list(result.shape)}; a seed keeps the shape of its input: check its padding, stride and width"
        )
    stated, found = entry.parameters(width, spatial_dims), sum(p.numel() for p in seed.parameters())
    if stated != found:
        raise ValueError(
            f"blueprint {entry.blueprint.name} ({type(seed).__name__}) has {found} parameters at width "
            f"{width}, but its formula says {stated}: correct the formula that it was registered with"
        )
    return seed


def _probe_shape(topology: str, width: int, spatial_dims: int) -> tuple[int, ...]:
    """The shape of one small sample at a joint."""
    side = 5
    shapes = {"cnn": (width, *[side] * spatial_dims), "mlp": (width,), "transformer": (side, width)}
    return shapes[topology]


def parameter_count(name: int, topology: str, width: int, spatial_dims: int = 0) -> int:
    """How many parameters a seed has, by its formula."""
    return blueprint_entry(name, topology).parameters(width, spatial_dims)


@dataclass(frozen=True)
class BlueprintRow:
    """One line of the list of blueprints."""

    index: int
    name: str
    topology: str
    parameters: int
    summary: str


def blueprint_table(width: int = 8, spatial_dims: int = 2, topology: str | None = None) -> list[BlueprintRow]:
    """Every blueprint with its parameters at a width; `spatial_dims` counts for cnn hosts alone."""
    if topology is not None and topology not in TOPOLOGY_BLUEPRINTS:
        raise ValueError(f"topology is {topology!r}; allowed are {', '.join(TOPOLOGY_BLUEPRINTS)}")
    entries = [e for e in _REGISTRY.values() if topology in (None, e.topology)]
    order = list(TOPOLOGY_BLUEPRINTS)
    return [
        BlueprintRow(
            int(e.blueprint), e.blueprint.name, e.topology, e.parameters(width, spatial_dims), e.summary
        )
        for e in sorted(entries, key=lambda e: (order.index(e.topology), e.blueprint))
    ]
