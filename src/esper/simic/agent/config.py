"""The constants of the learner, apart from it so that reading a configuration does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esper.utils.settings import Config


class PPOConfig(Config):
    """How Simic learns."""

    gamma: float = Field(
        default=0.995, ge=0, le=1, description="discount; a shaped reward must use the same one"
    )
    lam: float = Field(default=0.98, ge=0, le=1, description="λ of the advantages")
    clip: float = Field(default=0.2, gt=0, description="how far a head's ratio may leave 1")
    learning_rate: float = Field(default=3e-4, gt=0, description="of Adam")
    adam_epsilon: float = Field(default=1e-5, gt=0, description="of Adam")
    epochs: int = Field(default=4, ge=1, description="passes over a rollout")
    minibatches: int = Field(
        default=4, ge=1, description="minibatches of whole rows per pass; at most one per row"
    )
    virtual_shards: int = Field(
        default=1,
        ge=1,
        le=65_536,
        description="parts of a minibatch whose gradients are taken apart and added up in their order, so "
        "that processes share an update: their number changes no bit, this one does; 1 learns whole in each",
    )
    target_kl: float | None = Field(
        default=0.02,
        gt=0,
        description="an update stops once it is this far from the policy that acted (KL per decision); "
        "none never stops",
    )
    entropy_start: float = Field(default=0.05, ge=0, description="entropy coefficient of the first update")
    entropy_end: float = Field(
        default=0.01, ge=0, description="entropy coefficient after entropy_updates updates"
    )
    entropy_updates: int = Field(
        default=200, ge=1, description="updates over which the entropy coefficient moves"
    )
    value_coefficient: float = Field(default=0.5, ge=0, description="weight of the value loss")
    value_clip: float | None = Field(
        default=None, gt=0, description="how far V may move per update; none does not clip"
    )
    head_average: Literal["readers", "steps"] = Field(
        default="steps",
        description="a head's share of the loss is its mean over all steps, which makes the loss the policy "
        "gradient, or over the steps that read it, which gives rarely read heads more weight",
    )
    max_grad_norm: float = Field(default=5.0, gt=0, description="norm to which gradients are clipped")
    normalize_values: bool = Field(
        default=True, description="whether V is learned in units of the returns' scale"
    )
    normalize_observations: bool = Field(
        default=False, description="whether features are standardised; ours are bounded"
    )
