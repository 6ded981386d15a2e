"""The constants of the controllers that are not learned."""

from __future__ import annotations

from pydantic import Field

from esper.foundation.settings import Config


class HeuristicConfig(Config):
    """When the heuristic grows and when it gives up."""

    plateau_epochs: int = Field(
        default=1, ge=1, le=4, description="germinate after this many epochs without progress"
    )
    plateau_points: float = Field(
        default=1.0, ge=0, description="an epoch that gains fewer points of accuracy made no progress"
    )
    first_epoch: int = Field(default=2, ge=0, description="never germinate before this many epochs")
    fossilise_points: float = Field(
        default=0.5, description="fossilise a seed whose contribution is above this many points"
    )
    prune_points: float = Field(
        default=-2.0, le=0, description="prune any seed whose contribution is this many points or less"
    )
    rest_epochs: int = Field(default=5, ge=0, description="no germination for this long after a prune")
