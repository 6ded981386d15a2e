"""Settings for runs of a second."""

from __future__ import annotations

from collections.abc import Sequence

GROWING = (  # what 'esper compare' and 'esper grow' take
    "members=3",
    "episode.steps=3",
    "lifecycle.allow_unfinished=true",  # else nothing could grow in so few
    "population.batch_size=8",
    "population.batches_per_epoch=1",
    "population.validation_samples=16",
    "population.initial_weights=4",
    "population.seed_weights=1",
)
TINY = (*GROWING, "rounds=2", "policy.width=8", "policy.embedding=2", "ppo.epochs=1", "ppo.minibatches=1")


def sets(*more: str, tiny: Sequence[str] = TINY) -> list[str]:
    """The tiny settings and more, as options of a command."""
    return [word for setting in (*tiny, *more) for word in ("--set", setting)]
