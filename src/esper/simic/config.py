"""Settings of an episode, of the reward, of the governor and of PPO. This module does not import torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.utils.settings import Config


class EpisodeConfig(Config):
    """How long an episode is and what is looked at on the way."""

    steps: int = Field(30, ge=1, description="decision steps (action and epoch) of a member that never grows")
    clock: Literal["compute", "steps"] = Field(
        "compute",
        description="what ends an episode: a member's budget in training FLOPs, which is what the bare host "
        "spends in `steps`, or the number of steps itself",
    )
    flops: float | None = Field(None, gt=0, description="training FLOPs of a member, if not the bare host's")
    rates: bool = Field(
        False,
        description="whether a controller may set the learning rate: double or halve it, or begin its decay",
    )
    rate_span: float = Field(
        1.0,
        ge=1,
        le=10_000,
        description="rates: a member begins with a learning rate that is drawn log-uniformly from a range of "
        "this factor around the recipe's",
    )

    @model_validator(mode="after")
    def _span_needs_rates(self) -> Self:
        if self.rate_span != 1 and not self.rates:
            raise ValueError(
                f"rate_span is {self.rate_span:g}, and no controller can set the learning rate; set rates to "
                "true, or leave rate_span at 1"
            )
        return self


class RewardConfig(Config):
    """What is paid at every step: γΦ(s') − Φ(s) with Φ = accuracy − rent_weight · ln(parameters / host's).

    The discount is not here: it is `PPOConfig.gamma`, for the potential and for the returns alike.
    """

    rent_weight: float = Field(0.002, ge=0, description="what a network e times as large as its host costs")
    control_variate: bool = Field(False, description="subtract the rewards of ungrown runs played beside")


class LearnerConfig(Config):
    """How a controller begins; PPO itself is `PPOConfig`."""

    patience: float = Field(
        0.0,
        ge=0,
        description="how much the first policy is biased to raise what it plants, and against pruning; "
        "the shipped controller began with 1",
    )
    imitate: int = Field(
        0,
        ge=0,
        description="first rounds in which it learns to do what the rule of thumb does, at its own pace; "
        "with episode.rates, what turned out to be best among plans for the learning rate",
    )
    plans: int = Field(
        8,
        ge=2,
        description="imitate, with episode.rates: plans tried on the same network, data and first rate; "
        "members / plans networks are taught, those with the first ids",
    )
    temperature: float = Field(
        0.02,
        gt=0,
        description="imitate, with episode.rates: a plan that ends this much reward behind another counts "
        "1/e of it",
    )


class GovernorConfig(Config):
    """When a member is taken back to its last good rows, and what that costs."""

    enabled: bool = Field(True, description="whether anything is ever rolled back")
    penalty: float = Field(0.1, ge=0, description="taken from the reward of the step that did it")


def lifecycle_for(steps: int) -> LifecycleConfig:
    """Fit the time in TRAINING to an episode: a tenth of its steps, at most 10, so that several seeds fit."""
    return LifecycleConfig(gates=GateConfig(training_epochs=max(1, min(10, steps // 10))))


class PPOConfig(Config):
    """How Simic learns."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount of returns; below 1 spending fast pays")
    lam: float = Field(0.98, ge=0, le=1, description="λ of the advantages")
    learning_rate: float = Field(3e-4, gt=0, description="of Adam")
    epochs: int = Field(4, ge=1, description="passes over a rollout")
    minibatches: int = Field(4, ge=1, description="minibatches of whole rows per pass; at most one per row")
    clip: float = Field(0.2, gt=0, description="how far a head's ratio may leave 1")
    value_coefficient: float = Field(0.5, ge=0, description="weight of the value loss")
    max_grad_norm: float = Field(5.0, gt=0, description="norm to which gradients are clipped")
    target_kl: float | None = Field(
        0.02,
        gt=0,
        description="an update stops once it is this far from the policy that acted (KL per decision); "
        "none never stops",
    )
    entropy_start: float = Field(0.05, ge=0, description="entropy coefficient of the first update")
    entropy_end: float = Field(0.01, ge=0, description="entropy coefficient after entropy_updates updates")
    entropy_updates: int = Field(200, ge=1, description="updates over which the entropy coefficient moves")
    entropy_floor: float = Field(
        0.0, ge=0, lt=1, description="heads with less entropy (0..1) are pushed back"
    )
