"""Settings for runs of a second."""

from __future__ import annotations

TINY = (
    "members=3",
    "episode.steps=3",
    "lifecycle.allow_unfinished=true",  # else nothing could grow in so few
    "rounds=2",
    "population.batch_size=8",
    "population.batches_per_epoch=1",
    "population.validation_samples=16",
    "population.initial_weights=4",
    "population.seed_weights=1",
    "policy.width=8",
    "policy.embedding=2",
    "ppo.epochs=1",
    "ppo.minibatches=1",
)


def sets(*more: str) -> list[str]:
    """The tiny settings and more, as options of a command."""
    return [word for setting in (*TINY, *more) for word in ("--set", setting)]
